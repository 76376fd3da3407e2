"""What is to be reached on an H200, judged from the rows, and a summary of a screen's length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.gpu.rivals import MEGATRON
from bench.gpu.table import Row
from bench.kernels import OURS

LARGE = ("gpt2", "1.3b", "8b")
SHARE = 0.9
HOST_SECONDS = 120e-6
ONE_LAUNCH = 4000
# How many times faster than one add_ per parameter, from an idle device to the end of the work.
AGAINST_ADD = {"10000x64": 3.0, "gpt2": 1.5, "1.3b": 1.0, "8b": 1.0}
ADD = "add_ per parameter"


@dataclass
class Verdict:
    """passed: None where nothing was measured that it could be judged by."""

    goal: str
    passed: bool | None
    detail: str


def ours(rows: Iterable[Row], section: str) -> list[Row]:
    return [row for row in rows if row.contender == OURS and row.section.startswith(section)]


def bandwidth(rows: list[Row], section: str) -> Verdict:
    """The worst share of all three sizes; each of them must have been measured."""
    found = [row for row in ours(rows, section) if row.model in LARGE]
    goal = f"{section}: at least {SHARE:.0%} of the three-stream add"
    if missing := [model for model in LARGE if all(row.model != model for row in found)]:
        return Verdict(goal, None, f"not measured: {', '.join(missing)}")
    worst = min(found, key=lambda row: row.share)
    return Verdict(goal, worst.share >= SHARE, f"worst {worst.share:.0%}: {worst.section}, {worst.model}, {worst.kind}")


def against_add(rows: list[Row], model: str) -> Verdict:
    """The later fold, gradients of both dtypes; for models that must only not be slower, every stage."""
    wanted = AGAINST_ADD[model]
    goal = f"fold {model}: {wanted:g} times as fast as add_ per parameter"
    stages = ("fold later",) if wanted > 1 else ("fold first", "fold later", "fold last")
    ratios = {}
    for row in rows:
        if row.contender == OURS and row.model == model and row.section in stages:
            for rival in rows:
                same = (rival.section, rival.model, rival.kind) == (row.section, row.model, row.kind)
                if same and rival.contender == ADD:
                    ratios[f"{row.section}, {row.kind}"] = rival.wall_min / row.wall_min
    if len(ratios) < 2 * len(stages):
        return Verdict(goal, None, f"not measured: {len(ratios)} of {2 * len(stages)} races")
    worst = min(ratios, key=ratios.__getitem__)
    return Verdict(goal, ratios[worst] >= wanted, f"worst {ratios[worst]:.2f}: {worst}")


def one_launch(rows: list[Row]) -> Verdict:
    """Without the norm: its second stage is the boundary's."""
    goal = f"one launch per fold up to {ONE_LAUNCH:,} tensors"
    found = [row for row in ours(rows, "fold") if row.section in ("fold first", "fold later")]
    small = [row for row in found if row.tensors <= ONE_LAUNCH]
    if not small or any(row.facts.launches is None for row in small):
        return Verdict(goal, None, "not counted")
    most = max(small, key=lambda row: row.facts.launches)
    counted = {row.model: row.facts.launches for row in found}
    return Verdict(goal, most.facts.launches == 1, ", ".join(f"{model} {count}" for model, count in counted.items()))


def host_time(rows: list[Row]) -> Verdict:
    """step() and zero_grad() of the wrapper, in a micro-batch that is neither the first nor the last."""
    goal = f"under {HOST_SECONDS * 1e6:.0f} us of host time per micro-batch of GPT-2"
    found = [row for row in ours(rows, "window") if row.model == "gpt2"]
    if not found:
        return Verdict(goal, None, "not measured")
    worst = max(found, key=lambda row: row.host_median)
    detail = f"median {worst.host_median * 1e6:.0f} us, minimum {worst.host_min * 1e6:.0f} us ({worst.kind})"
    return Verdict(goal, worst.host_median < HOST_SECONDS, detail)


def judge(rows: list[Row]) -> list[Verdict]:
    verdicts = [bandwidth(rows, "fold"), bandwidth(rows, "step")]
    verdicts += [against_add(rows, model) for model in AGAINST_ADD]
    return [*verdicts, one_launch(rows), host_time(rows)]


def results(rows: list[Row]) -> list[str]:
    """Ours, and the fastest of its rivals: a line for each model, folds by dtype with their stages, updates by kind."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in ours(rows, ""):
        section, _, stage = row.section.partition(" ")
        key, part = ((section, row.model, row.kind), stage) if section == "fold" else ((section, row.model), row.kind)
        best = min((r.wall_min for r in rows if same_race(r, row) and r.contender != OURS), default=None)
        against = "" if best is None else f", best rival {best / row.wall_min:.2f}x"
        said = f"{part} {row.device_min * 1e3:.3f} ms {row.gb_per_s:.0f} GB/s {row.share:.0%}{against}"
        lines.setdefault(key, []).append(said)
    return [f"{' '.join(key)}: {'; '.join(said)}" for key, said in lines.items()]


def same_race(row: Row, other: Row) -> bool:
    return (row.section, row.model, row.kind) == (other.section, other.model, other.kind)


def summary(rows: list[Row], absent: dict[str, str], cut: list[str], dry: bool) -> tuple[list[str], bool]:
    """The lines, and whether every goal was reached. A dry run has neither numbers nor verdicts."""
    if dry:
        races = sorted({row.section for row in rows})
        lines = [f"skip  goals: CPU DRY RUN of {len(rows)} rows, nothing was measured ({', '.join(races)})"]
        passed = True
    else:
        words = {True: "pass", False: "FAIL", None: "FAIL"}
        verdicts = judge(rows)
        lines = [f"{words[verdict.passed]}  {verdict.goal}: {verdict.detail}" for verdict in verdicts]
        lines += results(rows)
        passed = all(verdict.passed for verdict in verdicts)
    if cut:
        lines.append(f"no time left for: {', '.join(cut)}")
    reasons: dict[str, list[str]] = {}
    for name, reason in absent.items():
        reasons.setdefault("not installed" if reason.endswith("is not installed") else reason, []).append(name)
    lines += [f"absent ({reason}): {', '.join(names)}" for reason, names in reasons.items()]
    return [*lines, MEGATRON], passed
