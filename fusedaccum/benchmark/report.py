"""Rows of the benchmark: how they are computed from samples, how they are printed, and the file behind the tables."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from fusedaccum.benchmark.cases import OURS, Case
from fusedaccum.benchmark.clock import Sample
from fusedaccum.benchmark.harness import InPlaceAdd, ThreeStreamAdd

REFERENCES = (InPlaceAdd.name, ThreeStreamAdd.name)


@dataclass
class Row:
    """One contender in one case. Times in seconds, on a GPU the device's; ratios over 1 mean that ours is faster.

    least_bytes: per parameter, what the work must move; with `fold_every` it is less. add: the reference bandwidth of
    the same rounds. launches: of one run, kernels on a GPU and operator calls on a CPU. host_us: per tensor and
    micro-batch. error: root mean square distance from float64, in units of the update's own.
    """

    section: str
    shapes: str
    kind: str
    contender: str
    numel: int
    tensors: int
    least_bytes: int
    minimum: float
    median: float
    samples: list[float]
    wall_minimum: float
    add_gb_per_s: float
    add_samples: list[float]
    ratio_of_minima: float
    ratio_of_rounds: float
    gb_per_s: float = 0.0
    share_of_add: float = 0.0
    extra_bytes_per_parameter: float | None = None
    error: float | None = None
    launches: int | None = None
    host_us: float | None = None
    runs: list[Sample] = field(default_factory=list, repr=False)

    def rate(self) -> None:
        """GB/s are over the least bytes, whoever moves more."""
        self.gb_per_s = self.least_bytes * self.numel / self.minimum * 1e-9
        self.share_of_add = self.gb_per_s / self.add_gb_per_s


@dataclass
class Work:
    """What was asked of the contenders. least_bytes: per parameter, what the work must move."""

    section: str
    kind: str
    least_bytes: int


def rows(work: Work, case: Case, ours: str, samples: dict[str, list[Sample]]) -> list[Row]:
    """Turn one race into rows. `samples` holds the reference's too."""
    seconds = {name: [sample.device for sample in taken] for name, taken in samples.items()}
    reference = next(name for name in REFERENCES if name in seconds)
    add_samples = seconds.pop(reference)
    # On a GPU the reference stops growing at some size.
    add_numel = case.numel if reference == InPlaceAdd.name else min(case.numel, ThreeStreamAdd.MOST)
    add = InPlaceAdd.BYTES * add_numel / min(add_samples) * 1e-9
    made = []
    for name, taken in seconds.items():
        row = Row(
            section=work.section,
            shapes=case.title,
            kind=work.kind,
            contender=name,
            numel=case.numel,
            tensors=len(case.shapes),
            least_bytes=work.least_bytes,
            minimum=min(taken),
            median=statistics.median(taken),
            samples=taken,
            wall_minimum=min(sample.wall for sample in samples[name]),
            add_gb_per_s=add,
            add_samples=add_samples,
            ratio_of_minima=min(taken) / min(seconds[ours]),
            ratio_of_rounds=statistics.median(a / b for a, b in zip(taken, seconds[ours], strict=True)),
            runs=samples[name],
        )
        row.rate()
        made.append(row)
    return made


HEAD = "| contender | min ms | median ms | GB/s | of add | times ours (min) | times ours (rounds) | {calls} "
HEAD += "| host us | extra B/param | error |"


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def span(seconds: float) -> str:
    """In the largest unit in which it is at least 1; ns otherwise."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3f} {unit}"
    return f"{seconds * 1e9:.3f} ns"


def table(made: list[Row], device: torch.device) -> str:
    """One Markdown table: rows of one section, one shape list and one kind."""
    first = made[0]
    title = f"{first.section}: {first.shapes}; {first.kind}"
    least = " or ".join(f"{least}" for least in dict.fromkeys(row.least_bytes for row in made))
    reference = InPlaceAdd.name if device.type == "cpu" else ThreeStreamAdd.name
    size = (
        f"{first.numel:,} parameters in {first.tensors:,} tensors; GB/s over {least} B per parameter; "
        f"{reference}: {first.add_gb_per_s:.1f} GB/s; {len(first.samples)} rounds"
    )
    head = HEAD.format(calls="calls" if device.type == "cpu" else "launches")
    lines = [f"### {title}", "", size, "", head, "|---" + "|---:" * (head.count("|") - 2) + "|"]
    for row in made:
        cells = [
            row.contender,
            f"{row.minimum * 1e3:.2f}",
            f"{row.median * 1e3:.2f}",
            f"{row.gb_per_s:.1f}",
            f"{row.share_of_add:.0%}",
            f"{row.ratio_of_minima:.2f}",
            f"{row.ratio_of_rounds:.2f}",
            shown(row.launches, ",d"),
            shown(row.host_us, ".2f"),
            shown(row.extra_bytes_per_parameter, ".2f"),
            shown(row.error, ".1e"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def races(made: list[Row]) -> list[list[Row]]:
    """Rows of the same work, in the order in which they were raced."""
    return [list(group) for _, group in itertools.groupby(made, lambda row: (row.section, row.shapes, row.kind))]


def summary(made: list[Row]) -> str:
    """A line for each of our contenders in each race, against the best of the rivals."""
    head = "| what | shapes | ours | ms | GB/s | of add | best rival | its time over ours |"
    lines = [head, "|---|---|---|---:|---:|---:|---|---:|"]
    for race in races(made):
        rivals = [row for row in race if not row.contender.startswith(OURS)]
        best = min(rivals, key=lambda row: row.ratio_of_minima, default=None)
        for ours in race:
            if ours in rivals:
                continue
            cells = [f"{ours.section}; {ours.kind}", ours.shapes, ours.contender, f"{ours.minimum * 1e3:.2f}"]
            cells += [f"{ours.gb_per_s:.1f}", f"{ours.share_of_add:.0%}", best.contender if best else "-"]
            cells.append(f"{best.ratio_of_minima / ours.ratio_of_minima:.2f}" if best else "-")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


EXPLANATION = """
min, median: milliseconds of one run (on a GPU, of the device). GB/s: the least bytes the work must move, over the
minimum; rivals are given those of one pass per micro-batch, fold_every=K those of K micro-batches in one pass. of add:
that, against an FP32 add as large as the case, timed in the same rounds (in place on a CPU, out of place on a GPU).
times ours: the contender's time over that of fusedaccum with fold_every=1, of the minima and as the median over rounds;
where memory does not hold all contenders they run in several heats, and each is compared with ours of its own heat (the
table shows ours of the first). calls: operators called in one run (launches: kernels). host: what a later micro-batch
costs the host, in microseconds per tensor, the dropping of gradients included; on a CPU measured with tensors of one
element. extra: peak of torch's allocations beyond parameters, masters, moments and one micro-batch's gradients, in
bytes per parameter (of a fold or step alone: what it allocates for the time of the call). error: root mean square
distance from float64: of sums, in units of them; of parameters after two windows or a step, in units of the update's
own (bf16 parameters: rounding them is most of it). -: not measured.
""".strip()


def write_json(
    path: Path,
    machine: dict[str, object],
    noise: list[str],
    absent: dict[str, str],
    made: list[Row],
    scaling: list[dict[str, object]],
) -> None:
    """Everything behind the tables, samples included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = [{name: value for name, value in asdict(row).items() if name != "runs"} for row in made]
    content = {"machine": machine, "noise": noise, "absent": absent, "rows": plain, "scaling": scaling}
    path.write_text(json.dumps(content, indent=1) + "\n")
