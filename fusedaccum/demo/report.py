"""The demo in words: what is compared, a table of what was measured, and what it says."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .results import LABELS, Results

LABEL_WIDTH = 42
COLUMN_WIDTH = 14
# Runs whose losses are closer than this share are called equal: another seed moves them by more.
SAME_LOSS = 0.01


def introduction(results: Results) -> str:
    s, e, text = results.settings, results.environment, results.text
    return f"""\
fusedaccum {e["fusedaccum"]}, torch {e["torch"]}, Python {e["python"]}, {e["threads"]} threads, backend {e["backend"]}
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
        ("median", [f"{run.distance:.1e}" for run in runs]),
        ("largest", [f"{max(distance for _, distance in run.distances):.1e}" for run in runs]),
        ("Megabytes held", []),
        *((kind, [number(run.held.get(kind, 0) / 1e6, ".2f") for run in runs]) for kind in results.kinds()),
        ("all of it", [f"{sum(run.held.values()) / 1e6:.2f}" for run in runs]),
        ("Milliseconds per update", []),
        *((phase, [number(1e3 * run.seconds.get(phase, 0.0), ".2f") for run in runs]) for phase in results.phases()),
        ("share of folding and stepping", [f"{run.overhead:.1%}" for run in runs]),
    ]
    return "\n".join(row(label, cells) for label, cells in rows)


def number(value: float, form: str) -> str:
    return format(value, form) if value else "-"


def row(label: str, cells: Sequence[str]) -> str:
    """A heading where there are no cells."""
    if not cells:
        return label
    return f"  {label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)


def findings(results: Results) -> str:
    """What the numbers say, and where they say little."""
    fused, bf16, fp32 = (results.runs[name] for name in ("fused", "bf16", "fp32"))
    longest, far = results.by_length["bf16"][-1]
    _, near = results.by_length["fused"][-1]
    gap = abs(fused.validation - bf16.validation) / fp32.validation
    lines = [
        f"Gradients: summing in bf16 puts them off by {bf16.distance:.2%}, summing in FP32 by {fused.distance:.0e}; "
        f"over {longest} micro-batches it is {far:.2%} and {near:.0e}.",
        f"Loss: the two ways of summing end {gap:.2%} apart on the held-out text. " + loss_finding(results, gap),
        memory_finding(results),
        f"Time: folding and stepping took {fused.overhead:.1%} of our run, stepping {bf16.overhead:.1%} of the bf16 one "
        "(its adding is inside the backward).",
    ]
    return "\n".join(lines)


def loss_finding(results: Results, gap: float) -> str:
    fused, bf16, fp32 = (results.runs[name].validation for name in ("fused", "bf16", "fp32"))
    if gap < SAME_LOSS:
        return (
            "That is too little to tell them apart: in a run this short the rounding of sums costs precision that the loss "
            "does not show."
        )
    better = "FP32" if fused < bf16 else "bf16"
    nearer = "FP32" if abs(fused - fp32) < abs(bf16 - fp32) else "bf16"
    return f"The sums in {better} end lower, those in {nearer} nearer to the FP32 batch; one seed is no proof."


def memory_finding(results: Results) -> str:
    fused, bf16, fp32 = (results.runs[name].held for name in ("fused", "bf16", "fp32"))
    parameters = results.parameters
    state = [sum(held.values()) - held["activations"] for held in (fused, bf16, fp32)]
    return (
        "Memory: {:.1f} bytes per parameter with fusedaccum, {:.1f} with bf16 sums, {:.1f} with the FP32 batch; activations "
        "{:.0f} MB per micro-batch against {:.0f} MB for the batch."
    ).format(*(count / parameters for count in state), fused["activations"] / 1e6, fp32["activations"] / 1e6)
