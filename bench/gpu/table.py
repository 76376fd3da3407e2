"""Rows: what a race has shown of one contender, and how it is printed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from bench.cases import Case
from bench.gpu.clock import Clock, Sample


@dataclass
class Facts:
    """What is not a time. extra_bytes: per parameter, the peak of what only this contender needs."""

    launches: int | None = None
    extra_bytes: float | None = None
    error: float | None = None


@dataclass
class Row:
    """One contender in one case; seconds. kind: a key of `bench.cases.KINDS`, or the gradients' dtype.

    host: of one call, in a window of one later micro-batch.
    """

    section: str
    model: str
    kind: str
    contender: str
    title: str
    numel: int
    tensors: int
    least_bytes: int
    device_min: float
    device_median: float
    wall_min: float
    wall_median: float
    host_min: float
    host_median: float
    gb_per_s: float
    add_gb_per_s: float
    facts: Facts
    samples: list[Sample] = field(repr=False, default_factory=list)

    @property
    def share(self) -> float:
        """Of the reference bandwidth."""
        return self.gb_per_s / self.add_gb_per_s


@dataclass
class Work:
    """What was asked of the contenders: where it is listed, and the bytes per parameter that it must move."""

    section: str
    model: str
    kind: str
    least_bytes: int


def rows(
    work: Work, case: Case, reference: float, samples: dict[str, list[Sample]], facts: dict[str, Facts]
) -> list[Row]:
    """Turn a race into rows. reference: GB/s of the three-stream add. GB/s are over the least bytes."""
    made = []
    for name, runs in samples.items():
        device = [sample.device for sample in runs]
        wall = [sample.wall for sample in runs]
        # The second part of a window is a later micro-batch like five others; what is not a window has one part.
        host = [sample.hosts[min(1, len(sample.hosts) - 1)] for sample in runs]
        made.append(
            Row(
                section=work.section,
                model=work.model,
                kind=work.kind,
                contender=name,
                title=case.title,
                numel=case.numel,
                tensors=len(case.shapes),
                least_bytes=work.least_bytes,
                device_min=min(device),
                device_median=statistics.median(device),
                wall_min=min(wall),
                wall_median=statistics.median(wall),
                host_min=min(host),
                host_median=statistics.median(host),
                gb_per_s=work.least_bytes * case.numel / min(device) * 1e-9,
                add_gb_per_s=reference,
                facts=facts.get(name, Facts()),
                samples=runs,
            )
        )
    return made


HEAD = "| contender | GPU ms min | median | wall ms min | median | host us | GB/s | of add | launches | extra B/param |"


def table(made: list[Row], clock: Clock) -> str:
    """One Markdown table: rows of one race. A dry run shows who ran and no number that was timed."""
    first = made[0]
    least = f"{first.numel:,} parameters in {first.tensors:,} tensors, at least {first.least_bytes} B each"
    reference = "CPU DRY RUN" if clock.dry else f"three-stream add {first.add_gb_per_s:.0f} GB/s"
    lines = [f"### {first.section}: {first.title}; {first.kind}", "", f"{least}; {reference}", "", HEAD]
    lines.append("|---" + "|---:" * (HEAD.count("|") - 2) + "|")
    for row in made:
        lines.append("| " + " | ".join([row.contender, *cells(row, clock)]) + " |")
    return "\n".join(lines)


def cells(row: Row, clock: Clock) -> list[str]:
    if clock.dry:
        return ["dry"] * 9
    extra = row.facts.extra_bytes
    times = (row.device_min, row.device_median, row.wall_min, row.wall_median)
    return [
        *(f"{seconds * 1e3:.3f}" for seconds in times),
        f"{row.host_median * 1e6:.0f}",
        f"{row.gb_per_s:.0f}",
        f"{row.share:.0%}",
        "?" if row.facts.launches is None else str(row.facts.launches),
        "?" if extra is None else f"{extra:.2f}",
    ]
