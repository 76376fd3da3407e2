"""Rows of the benchmark: how they are computed from samples, and how they are printed.

python -m bench.report FILE prints the table of a JSON file that pytest-benchmark wrote.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.cases import Case
from bench.harness import InPlaceAdd


@dataclass
class Row:
    """One contender in one case. Times in seconds; ratios over 1 mean that ours is faster."""

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
    gb_per_s: float
    share_of_add: float
    add_gb_per_s: float
    ratio_of_minima: float
    ratio_of_rounds: float
    extra_bytes_per_parameter: float | None = None
    error: float | None = None


@dataclass
class Work:
    """What was asked of the contenders. least_bytes: per parameter, what the work must move."""

    section: str
    kind: str
    least_bytes: int


def rows(work: Work, case: Case, ours: str, samples: dict[str, list[float]]) -> list[Row]:
    """Turn one race into rows. `samples` holds InPlaceAdd's too: the reference bandwidth of the same rounds.

    GB/s are over the least bytes, whoever moves more.
    """
    add = InPlaceAdd.BYTES * case.numel / min(samples[InPlaceAdd.name]) * 1e-9
    made = []
    for name, seconds in samples.items():
        if name == InPlaceAdd.name:
            continue
        gb_per_s = work.least_bytes * case.numel / min(seconds) * 1e-9
        made.append(
            Row(
                section=work.section,
                shapes=case.title,
                kind=work.kind,
                contender=name,
                numel=case.numel,
                tensors=len(case.shapes),
                least_bytes=work.least_bytes,
                minimum=min(seconds),
                median=statistics.median(seconds),
                samples=seconds,
                gb_per_s=gb_per_s,
                share_of_add=gb_per_s / add,
                add_gb_per_s=add,
                ratio_of_minima=min(seconds) / min(samples[ours]),
                ratio_of_rounds=statistics.median(a / b for a, b in zip(seconds, samples[ours], strict=True)),
            )
        )
    return made


HEAD = "| contender | min ms | median ms | GB/s | of add_ | times ours (min) | times ours (rounds) |"
MORE = " extra B/param | error |"


def table(made: list[Row]) -> str:
    """One Markdown table: rows of one section, one shape list and one kind."""
    first = made[0]
    title = f"{first.section}: {first.shapes}; {first.kind}"
    size = (
        f"{first.numel:,} parameters in {first.tensors:,} tensors; GB/s over {first.least_bytes} B per parameter; "
        f"a.add_(b) {first.add_gb_per_s:.1f} GB/s; {len(first.samples)} rounds"
    )
    more = first.error is not None
    head = HEAD + (MORE if more else "")
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
        ]
        if more:
            cells += [f"{row.extra_bytes_per_parameter:.2f}", f"{row.error:.1e}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(made: list[Row]) -> str:
    """One line per race: ours, and the best of its rivals."""
    head = "| what | shapes | ours ms | GB/s | of add_ | best rival | its time over ours |"
    lines = [head, "|---|---|---:|---:|---:|---|---:|"]
    races = itertools.groupby(made, lambda row: (row.section, row.shapes, row.kind))
    for (section, shapes, kind), group in races:
        ours, *rivals = group
        best = min(rivals, key=lambda row: row.ratio_of_minima)
        cells = [f"{section}; {kind}", shapes, f"{ours.minimum * 1e3:.2f}", f"{ours.gb_per_s:.1f}"]
        cells += [f"{ours.share_of_add:.0%}", best.contender, f"{best.ratio_of_minima:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


EXPLANATION = """
min, median: milliseconds of one run. GB/s: the least bytes the work must move, over the minimum. of add_: that,
against an in-place FP32 a.add_(b) as large as the case, timed in the same rounds. times ours: the contender's time
over ours, of the minima and as the median over rounds; where memory does not hold all contenders they run in several
heats, and each is compared with ours of its own heat (the table shows ours of the first). extra: peak of torch's CPU
allocations beyond gradients, parameters, masters and moments, in bytes per parameter. error: root mean square distance
of the parameters after two windows from float64, in units of the update's own (bf16 parameters: rounding them is most
of it).
""".strip()


def write_json(
    path: Path, machine: dict[str, object], noise: list[str], absent: dict[str, str], made: list[Row]
) -> None:
    """Everything behind the tables, samples included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine, "noise": noise, "absent": absent, "rows": [asdict(row) for row in made]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def pytest_table(path: Path) -> str:
    """What pytest-benchmark's own table does not show of its JSON: GB/s over the least bytes, and their share."""
    lines = ["| group | contender | min ms | median ms | GB/s | of add_ |", "|---|---|---:|---:|---:|---:|"]
    for bench in json.loads(path.read_text())["benchmarks"]:
        stats, extra = bench["stats"], bench["extra_info"]
        cells = [bench["group"], extra["contender"], f"{stats['min'] * 1e3:.2f}", f"{stats['median'] * 1e3:.2f}"]
        cells += [f"{extra['gb_per_s']:.1f}", f"{extra['share_of_add']:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(pytest_table(Path(sys.argv[1])))
