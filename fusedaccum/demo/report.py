"""The demo in words: what is compared, a table of what was measured, and what it says."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence

from .results import LABELS, Results, Run

LABEL_WIDTH = 42
COLUMN_WIDTH = 14
# Runs whose losses are closer than this share are called equal: another seed moves them by more.
SAME_LOSS = 0.01


def introduction(results: Results) -> str:
    s, e, text = results.settings, results.environment, results.text
    return f"""\
fusedaccum {e["fusedaccum"]}, torch {e["torch"]}, Python {e["python"]}, threads {e["threads"]}, backend {e["backend"]}
text      pydoc_data.topics: {text["characters"]:,} characters, {text["train_tokens"]:,} tokens to train on, \
{text["validation_tokens"]:,} held out
model     GPT of {s.layers} layers and width {s.width}: {results.parameters:,} parameters
training  {s.updates} updates of {s.steps} micro-batches of {s.rows} x {s.context} tokens; AdamW, warm-up and cosine, \
clipping at {s.max_norm:g}

Three runs from the same initial weights on the same data in the same order, all with AdamW in FP32:
  {LABELS["fused"]:<12}bf16 model, gradients summed in FP32 by FusedAccumOptimizer(AdamW(...), steps={s.steps})
  {LABELS["bf16"]:<12}bf16 model, gradients summed in bf16 by autograd, FP32 masters and moments
  {LABELS["fp32"]:<12}FP32 model, the {s.steps} micro-batches as one large batch
"""


def table(results: Results) -> str:
    """One column for each run."""
    runs = [results.runs[name] for name in LABELS]
    gaps = [[abs(gap) for gap in results.curve_gap(name)] for name in LABELS]
    rows: list[tuple[str, Sequence[str]]] = [
        ("", list(LABELS.values())),
        ("Loss, nats per token", []),
        ("training, mean of the last tenth", [f"{run.final_loss:.4f}" for run in runs]),
        ("held-out text", [f"{run.validation:.4f}" for run in runs]),
        ("distance from the FP32 curve, mean", [number(statistics.mean(gap), ".4f") for gap in gaps]),
        ("distance from the FP32 curve, largest", [number(max(gap), ".4f") for gap in gaps]),
        (f"Relative distance of the summed gradient from its float64 sum, {len(runs[0].distances)} windows", []),
        ("median", [number(run.distance, ".1e") for run in runs]),
        ("largest", [number(max(distance for _, distance in run.distances), ".1e") for run in runs]),
        ("Megabytes held", []),
        *((kind, [number(most(run, kind) / 1e6, ".2f") for run in runs]) for kind in results.kinds()),
        ("all of it during the backward", [f"{sum(run.held['backward'].values()) / 1e6:.2f}" for run in runs]),
        ("all of it during the update", [f"{sum(run.held['update'].values()) / 1e6:.2f}" for run in runs]),
        ("Milliseconds per update", []),
        *((phase, [number(1e3 * run.seconds.get(phase, 0.0), ".2f") for run in runs]) for phase in results.phases()),
        ("share of folding and stepping", [f"{run.overhead:.1%}" for run in runs]),
    ]
    return "\n".join(row(label, cells) for label, cells in rows)


def most(run: Run, kind: str) -> int:
    return max(kinds.get(kind, 0) for kinds in run.held.values())


def number(value: float, form: str) -> str:
    return format(value, form) if value else "-"


def row(label: str, cells: Sequence[str]) -> str:
    """A heading where there are no cells."""
    if not cells:
        return label
    return f"  {label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)


def findings(results: Results) -> str:
    """What the numbers say, and where they say little."""
    lines = ["What it says"]
    for name, say in (("Gradients", gradients), ("Loss", loss), ("Memory", memory), ("Time", time)):
        first, rest = f"  {name:<11}", " " * 13
        lines.append(textwrap.fill(say(results), 110, initial_indent=first, subsequent_indent=rest))
    return "\n".join(lines)


def gradients(results: Results) -> str:
    fused, bf16 = results.runs["fused"], results.runs["bf16"]
    longest, far = results.by_length["bf16"][-1]
    _, near = results.by_length["fused"][-1]
    return (
        f"Summed in bf16 they are off by {bf16.distance:.2%}, summed in FP32 by {fused.distance:.0e}. "
        f"Over {longest} micro-batches it is {far:.2%} and {near:.0e}."
    )


def loss(results: Results) -> str:
    fused, bf16, fp32 = (results.runs[name] for name in ("fused", "bf16", "fp32"))
    gap = abs(fused.validation - bf16.validation) / fp32.validation
    apart = statistics.mean(abs(one - other) for one, other in zip(fused.losses, bf16.losses, strict=True))
    away = " and ".join(f"{statistics.mean(map(abs, results.curve_gap(name))):.4f}" for name in ("fused", "bf16"))
    text = (
        f"On the held-out text the two ways of summing end {gap:.2%} apart. Their training curves lie {apart:.4f} from "
        f"each other, and {away} from the FP32 batch. "
    )
    if gap < SAME_LOSS:
        return text + "That is too little to tell the sums apart: a run this short does not show them in the loss."
    lower = "FP32" if fused.validation < bf16.validation else "bf16"
    nearer = "FP32" if abs(fused.validation - fp32.validation) < abs(bf16.validation - fp32.validation) else "bf16"
    return text + f"Sums in {lower} end lower, sums in {nearer} nearer to the FP32 batch. One seed is no proof."


def memory(results: Results) -> str:
    def per_parameter(name: str) -> str:
        held = results.runs[name].held
        during = [sum(kinds.values()) - kinds.get("activations", 0) for kinds in held.values()]
        return " and ".join(f"{count / results.parameters:.1f}" for count in during)

    small, large = (results.runs[name].held["backward"]["activations"] / 1e6 for name in ("fused", "fp32"))
    return (
        f"Per parameter, during backward and update: {per_parameter('fused')} bytes; with bf16 sums "
        f"{per_parameter('bf16')}; with the FP32 batch {per_parameter('fp32')}. On top come the activations: "
        f"{small:.1f} MB for a micro-batch in bf16, {large:.1f} MB for the FP32 batch."
    )


def time(results: Results) -> str:
    fused, bf16 = results.runs["fused"], results.runs["bf16"]
    return (
        f"Folding and stepping took {fused.overhead:.1%} of our run. With bf16 sums stepping took {bf16.overhead:.1%}; "
        "the adding is inside the backward there. The runs come one after the other: what disturbed the machine "
        "during one of them is in its times."
    )
