"""What the demo measured: plain numbers, kept apart from how they came about and how they are shown."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from .settings import Settings

# The runs in the order of their columns.
LABELS = {"fused": "fusedaccum", "bf16": "bf16 sums", "fp32": "FP32 batch"}


@dataclass
class Run:
    """What one run left behind.

    losses: nats per token, one for each update. validation: the same on the held-out text, after the last update.
    distances: (update, relative L2 distance of the summed gradient from its float64 sum), for the observed windows.
    seconds: phase -> seconds per update, median of the windows that were not observed.
    held: "backward" | "update" -> kind of tensor -> bytes then.
    """

    losses: list[float]
    validation: float
    distances: list[tuple[int, float]]
    seconds: dict[str, float]
    held: dict[str, dict[str, int]]
    sample: str

    @property
    def final_loss(self) -> float:
        """Mean over the last tenth of the updates: a single window's loss depends on what text it drew."""
        return statistics.mean(self.losses[-max(1, len(self.losses) // 10) :])

    @property
    def distance(self) -> float:
        return statistics.median(distance for _, distance in self.distances)

    @property
    def overhead(self) -> float:
        """Share of the time that went into folding and stepping."""
        return 1 - self.seconds["forward, backward"] / sum(self.seconds.values())


@dataclass
class Results:
    """All runs, and `by_length`: "fused" | "bf16" -> [(micro-batches in the sum, distance)]."""

    settings: Settings
    environment: dict[str, Any]
    text: dict[str, int]
    parameters: int
    runs: dict[str, Run] = field(default_factory=dict)
    by_length: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    seconds: float = 0.0

    def curve_gap(self, name: str) -> list[float]:
        """Training loss minus that of the FP32 run, update by update."""
        return [own - fp32 for own, fp32 in zip(self.runs[name].losses, self.runs["fp32"].losses, strict=True)]

    def kinds(self) -> list[str]:
        """Kinds of tensors that some run held at some moment."""
        held = [items for run in self.runs.values() for kinds in run.held.values() for items in kinds.items()]
        return list(dict.fromkeys(kind for kind, count in held if count))

    def phases(self) -> list[str]:
        return list(dict.fromkeys(phase for run in self.runs.values() for phase in run.seconds))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
