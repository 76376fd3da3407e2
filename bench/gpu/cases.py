"""Whole models where they fit: lists of shapes at full size, and with fewer layers on a smaller GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fusedaccum.benchmark.cases import KINDS, SHAPE_LISTS, Case, Kind, Shapes, fitting


@dataclass(frozen=True)
class Model:
    """A shape list. steps: the kinds whose update is measured. windows: the kinds whose whole window is."""

    title: str
    build: Callable[[int], Shapes]
    layers: int
    steps: tuple[str, ...] = ("masters", "bf16", "fp32")
    windows: tuple[str, ...] = ()

    @staticmethod
    def of(name: str, **sections: tuple[str, ...]) -> Model:
        listed = SHAPE_LISTS[name]
        return Model(listed.title, listed.build, listed.layers, **sections)


# The smaller first: what they show (launches, host time) is at stake in the goals, and costs least time.
MODELS = {
    "gpt2": Model.of("gpt2", windows=("masters", "bf16", "fp32")),
    "10000x64": Model.of("10000x64", windows=("masters",)),
    "1.3b": Model.of("1.3b", windows=("masters",)),
    "8b": Model.of("8b", steps=("bf16",)),  # FP32 moments of 8 billion parameters are 64 GB by themselves
    "odd": Model.of("odd"),
}

# The reference's three tensors, what the float64 comparison holds of one piece, the L2 flush, and the allocator's own.
RESERVE = 10e9


def fold_bytes(kind: Kind) -> int:
    """Per parameter: a gradient, the same scaled, the sums that all share, what `_foreach_add_` converts into."""
    return 2 * kind.gradient_bytes + 4 + (4 if kind.gradient_bytes < 4 else 0)


def step_bytes(kind: Kind) -> int:
    """Per parameter: start and gradient, the state that contenders share, our sums, the rival's gradient."""
    return 2 * kind.gradient_bytes + kind.state_bytes + 4 + (4 + 4 if kind.masters else kind.gradient_bytes)


def window_bytes(kind: Kind) -> int:
    """Per parameter: start, three sets of gradients, and ours with one rival; more of them run in more heats."""
    return kind.gradient_bytes * 4 + 2 * (kind.state_bytes + 8)


def make_case(name: str, kind: str, device: torch.device, bytes_per_parameter: float, sets: int | None) -> Case:
    """The case of a model held in one way. On a CPU its small stand-in."""
    if device.type == "cpu":
        return Case(SHAPE_LISTS[name].quick(), KINDS[kind], SHAPE_LISTS[name].title + ", stand-in", sets=sets)
    torch.cuda.empty_cache()
    available = torch.cuda.mem_get_info(device)[0] - RESERVE
    title, shapes = fitting(MODELS[name], bytes_per_parameter, available)
    return Case(shapes, KINDS[kind], title, device=device, sets=sets)
