"""What changed between two files of the benchmark, and whether ours got slower by more than the noise.

The machine may have changed as well: a case's time is divided by that of the reference add in the same rounds where
the add differs by more than its own noise. The noise of a ratio is made of how far the medians of all that went into it
lie above their minima.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fusedaccum.benchmark.cases import OURS

Key = tuple[str, str, str, str]
SAME = ("cpu", "gpu", "cores", "threads", "torch", "backend", "isa")  # of the machine, or times do not compare


@dataclass
class Timing:
    """Seconds of one contender, and of the reference add beside it where they were kept."""

    samples: list[float]
    add_samples: list[float]
    add_minimum: float | None


@dataclass
class Change:
    """ratio: the time afterwards over the time before. add: the same of the reference, 1 where that is its noise."""

    key: Key
    before: float
    after: float
    ratio: float
    add: float
    noise: float

    @property
    def corrected(self) -> float:
        return self.ratio / self.add

    def verdict(self, threshold: float) -> str:
        limit = max(threshold, self.noise)
        if self.corrected > 1 + limit:
            return "slower"
        return "faster" if self.corrected < 1 / (1 + limit) else "same"


def spread(samples: list[float]) -> float:
    return statistics.median(samples) / min(samples) - 1 if samples else 0.0


def change(key: Key, before: Timing, after: Timing) -> Change:
    add = 1.0
    add_noise = math.hypot(spread(before.add_samples), spread(after.add_samples))
    if before.add_minimum and after.add_minimum:
        moved = after.add_minimum / before.add_minimum
        add = moved if max(moved, 1 / moved) > 1 + add_noise else 1.0
    first, last = min(before.samples), min(after.samples)
    noise = math.hypot(spread(before.samples), spread(after.samples), add_noise if add != 1.0 else 0.0)
    return Change(key, first, last, last / first, add, noise)


def load(path: Path) -> dict:
    """A file of the benchmark. Raises ValueError for anything else."""
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON file of the benchmark ({error}); --json writes them") from None
    if not isinstance(content, dict) or not {"machine", "rows"} <= set(content):
        raise ValueError(f"{path} is no file of the benchmark, as it has no machine and rows; --json writes them")
    try:
        dict(timings(content))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no file of this version's benchmark: {error!r} in a row") from None
    return content


def timings(content: dict) -> Iterator[tuple[Key, Timing]]:
    for row in content["rows"]:
        key = (row["section"], row["shapes"], row["kind"], row["contender"])
        # GB/s of 12 bytes an element
        add = 12e-9 * row["numel"] / row["add_gb_per_s"]
        yield key, Timing(row["samples"], row.get("add_samples", []), add)
    for axis in content.get("scaling", []):
        for point in axis["points"]:
            key = (f"scaling, {axis['name']}", point["label"], "masters", axis["contender"])
            yield key, Timing(point["samples"], [], point["add_minimum"])


def table(changes: list[Change], threshold: float) -> str:
    head = "| what | shapes | contender | before ms | after ms | time | reference | noise | |"
    lines = [head, "|---|---|---|---:|---:|---:|---:|---:|---|"]
    for each in changes:
        section, shapes, kind, contender = each.key
        cells = [f"{section}; {kind}", shapes, contender, f"{each.before * 1e3:.3f}", f"{each.after * 1e3:.3f}"]
        cells += [f"{each.ratio - 1:+.1%}", f"{each.add - 1:+.1%}", f"{each.noise:.1%}", each.verdict(threshold)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(before: dict, after: dict, threshold: float) -> tuple[str, list[Change]]:
    """What is printed, and which of ours got slower."""
    old, new = dict(timings(before)), dict(timings(after))
    changes = [change(key, old[key], new[key]) for key in old if key in new]
    lines = [table(changes, threshold)] if changes else ["nothing in common: no case and contender is in both files"]
    lines.append("")
    for name in SAME:
        values = before["machine"].get(name), after["machine"].get(name)
        if values[0] != values[1]:
            lines.append(f"OTHER MACHINE: {name} was {values[0]}, is {values[1]}; times do not compare")
    for name, content in (("before", before), ("after", after)):
        lines += [f"NOT QUIET, {name}: {line}" for line in content.get("noise", [])]
    lines += [f"only before: {', '.join(key)}" for key in old if key not in new]
    lines += [f"only after: {', '.join(key)}" for key in new if key not in old]
    slower = [each for each in changes if each.verdict(threshold) == "slower"]
    ours = [each for each in slower if each.key[3].startswith(OURS)]
    commits = (content["machine"].get("commit", "unknown") for content in (before, after))
    lines.append("commits: {} before, {} after".format(*commits))
    lines.append(
        f"{len(changes)} compared, {len(slower)} slower, {len(ours)} of them ours "
        f"(a change counts beyond {threshold:.1%} and beyond its noise, the reference's change taken out)"
    )
    return "\n".join(lines), ours


def main(before: dict, after: dict, threshold: float) -> int:
    """Print what changed; 1 if ours got slower, or nothing could be compared."""
    text, slower = report(before, after, threshold)
    print(text)
    return 1 if slower or not dict(timings(before)).keys() & dict(timings(after)).keys() else 0
