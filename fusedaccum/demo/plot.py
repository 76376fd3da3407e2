"""The demo as a picture. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .results import LABELS, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"fused": "#0b7a75", "bf16": "#d1495b", "fp32": "#30343f"}
# Parts of a stacked bar, from dark to light.
SHADES = ["#30343f", "#0b7a75", "#5fb49c", "#edae49", "#d1495b", "#c9cbd1"]
FAINT = "#d9dce1"


def draw(results: Results, path: Path) -> None:
    """Write a PNG. Raises ImportError where matplotlib is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(
        {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure, axes = pyplot.subplots(2, 3, figsize=(14, 7.5), layout="constrained")
        s = results.settings
        figure.suptitle(
            f"{s.steps} micro-batches per update: FP32 sums (fusedaccum), bf16 sums, one large FP32 batch\n"
            f"GPT with {results.parameters:,} parameters on pydoc_data.topics, {s.updates} updates of AdamW",
            fontsize=11,
        )
        draw_losses(axes[0, 0], results)
        draw_gaps(axes[0, 1], results)
        draw_distances(axes[0, 2], results)
        draw_lengths(axes[1, 0], results)
        draw_bytes(axes[1, 1], results)
        draw_seconds(axes[1, 2], results)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def draw_losses(ax: Axes, results: Results) -> None:
    updates = range(1, results.settings.updates + 1)
    for name in reversed(LABELS):
        run = results.runs[name]
        ax.plot(updates, run.losses, color=COLOURS[name], label=LABELS[name], linewidth=1.2)
        ax.plot(updates[-1], run.validation, "o", color=COLOURS[name], markersize=4, clip_on=False)
    label(ax, "Training loss (dots: held-out text at the end)", "update", "loss (nats per token)")
    ax.legend(frameon=False, reverse=True)


def draw_gaps(ax: Axes, results: Results) -> None:
    ax.axhline(0, color=COLOURS["fp32"], linewidth=1, label=LABELS["fp32"])
    for name in ("bf16", "fused"):
        gap = results.curve_gap(name)
        ax.plot(range(1, len(gap) + 1), gap, color=COLOURS[name], label=LABELS[name], linewidth=1)
    label(ax, "Distance from the FP32 batch's curve", "update", "loss minus FP32's (nats per token)")
    ax.legend(frameon=False, reverse=True)


def draw_distances(ax: Axes, results: Results) -> None:
    for name in ("bf16", "fused"):
        updates, distances = zip(*results.runs[name].distances, strict=True)
        ax.plot([u + 1 for u in updates], distances, "o-", color=COLOURS[name], label=LABELS[name], markersize=3)
    ax.set_yscale("log", nonpositive="mask")
    label(ax, "Summed gradient: distance from its float64 sum", "update", "relative L2 distance")
    ax.legend(frameon=False)


def draw_lengths(ax: Axes, results: Results) -> None:
    for name in ("bf16", "fused"):
        counts, distances = zip(*results.by_length[name][1:], strict=True)
        ax.plot(counts, distances, "o-", color=COLOURS[name], label=LABELS[name], markersize=3)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", nonpositive="mask")
    ax.axvline(results.settings.steps, color=FAINT, linewidth=1, zorder=0)
    label(ax, "The same in longer windows", "micro-batches in the sum", "relative L2 distance")
    ax.legend(frameon=False)


def draw_bytes(ax: Axes, results: Results) -> None:
    parts = {kind: [results.runs[name].held.get(kind, 0) / 1e6 for name in LABELS] for kind in results.kinds()}
    stack(ax, parts, "Memory held", "megabytes", "{:.0f} MB")


def draw_seconds(ax: Axes, results: Results) -> None:
    phases = results.phases()
    parts = {phase: [1e3 * results.runs[name].seconds.get(phase, 0.0) for name in LABELS] for phase in phases}
    stack(ax, parts, "Time per update", "milliseconds", "{:.0f} ms")


def stack(ax: Axes, parts: dict[str, list[float]], title: str, unit: str, form: str) -> None:
    """One horizontal bar for each run, made of `parts`: name -> one length for each run."""
    rows = list(LABELS.values())
    left = [0.0] * len(rows)
    for (name, lengths), shade in zip(parts.items(), SHADES, strict=False):
        ax.barh(rows, lengths, left=left, color=shade, label=name, height=0.55)
        left = [start + length for start, length in zip(left, lengths, strict=True)]
    for index, total in enumerate(left):
        ax.text(total, index, " " + form.format(total), va="center")
    ax.invert_yaxis()
    ax.set_xlim(0, 1.18 * max(left))
    label(ax, title, unit, "")
    ax.grid(visible=False, axis="y")
    ax.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.45, -0.17), columnspacing=1, handlelength=1)


def label(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(color=FAINT, linewidth=0.5)
    ax.set_axisbelow(True)
