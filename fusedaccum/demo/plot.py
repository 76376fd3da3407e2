"""The demo as a picture. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .results import LABELS, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"fused": "#0b7a75", "bf16": "#d1495b", "fp32": "#b4b9c4"}
# The curves lie upon one another: from wide to narrow, each can be seen.
WIDTHS = {"fused": 1.0, "bf16": 2.2, "fp32": 4.5}
PARTS = {
    "parameters": "#27365e",
    "moments": "#5b6ea3",
    "masters": "#a3b0d6",
    "gradients": "#e9c46a",
    "FP32 gradients": "#ee8f4b",
    "activations": "#dcdfe5",
    "forward, backward": "#dcdfe5",
    "fold": "#ee8f4b",
    "step": "#27365e",
}
FAINT = "#e3e5ea"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "legend.frameon": False,
}


def draw(results: Results, path: Path) -> None:
    """Write a PNG. Raises ImportError where matplotlib is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    s = results.settings
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(2, 3, figsize=(14, 7.5), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
        figure.suptitle(
            f"Gradients of {s.steps} micro-batches: summed in FP32 (fusedaccum), in bf16, and as one large FP32 batch\n"
            f"GPT of {results.parameters:,} parameters, text of pydoc_data.topics, {s.updates} updates of AdamW",
            fontsize=11,
        )
        parts = (draw_losses, draw_gaps, draw_distances, draw_lengths, draw_bytes, draw_seconds)
        for part, ax in zip(parts, axes.flat, strict=True):
            part(ax, results)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def draw_losses(ax: Axes, results: Results) -> None:
    updates = range(1, results.settings.updates + 1)
    for name in reversed(LABELS):
        run = results.runs[name]
        ax.plot(updates, run.losses, color=COLOURS[name], label=LABELS[name], linewidth=WIDTHS[name])
        ax.plot(updates[-1], run.validation, "o", color=COLOURS[name], markersize=3 + 1.5 * WIDTHS[name])
    ax.set(title="Training loss (dots: held-out text)", xlabel="update", ylabel="loss (nats per token)")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(reverse=True)


def draw_gaps(ax: Axes, results: Results) -> None:
    for name in reversed(LABELS):
        gap = results.curve_gap(name)
        ax.plot(range(1, len(gap) + 1), gap, color=COLOURS[name], label=LABELS[name], linewidth=WIDTHS[name])
    ax.set(title="Training loss, distance from the FP32 batch", xlabel="update", ylabel="difference (nats per token)")
    ax.xaxis.get_major_locator().set_params(integer=True)
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.15 * (high - low))
    ax.legend(reverse=True, ncols=3, loc="upper center", columnspacing=1)


def draw_distances(ax: Axes, results: Results) -> None:
    for name in ("bf16", "fused"):
        updates, distances = zip(*results.runs[name].distances, strict=True)
        ax.plot(
            [update + 1 for update in updates], distances, "o-", color=COLOURS[name], label=LABELS[name], markersize=3
        )
    ax.set(title="Summed gradient, distance from its float64 sum", xlabel="update", ylabel="relative L2 distance")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_yscale("log", nonpositive="mask")
    ax.legend(loc="center right")


def draw_lengths(ax: Axes, results: Results) -> None:
    """A sum of one micro-batch is exact, and has no place on a logarithmic axis."""
    for name in ("bf16", "fused"):
        counts, distances = zip(*results.by_length[name][1:], strict=True)
        ax.plot(counts, distances, "o-", color=COLOURS[name], label=LABELS[name], markersize=3)
    ax.set(title="The same for longer windows", xlabel="micro-batches in the sum", ylabel="relative L2 distance")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:.0f}")
    ax.set_yscale("log", nonpositive="mask")
    ax.legend(loc="center right")


def draw_bytes(ax: Axes, results: Results) -> None:
    held = [results.runs[name].held["backward"] for name in LABELS]
    lengths = {kind: [kinds.get(kind, 0) / 1e6 for kinds in held] for kind in results.kinds()}
    draw_bars(ax, lengths, [f"{sum(kinds.values()) / 1e6:.0f} MB" for kinds in held])
    ax.set(title="Memory held during the backward", xlabel="megabytes")


def draw_seconds(ax: Axes, results: Results) -> None:
    runs = [results.runs[name] for name in LABELS]
    lengths = {phase: [1e3 * run.seconds.get(phase, 0.0) for run in runs] for phase in results.phases()}
    draw_bars(ax, lengths, [f"{1e3 * sum(run.seconds.values()):.0f} ms\n{run.overhead:.1%} fold, step" for run in runs])
    ax.set(title="Time per update", xlabel="milliseconds")


def draw_bars(ax: Axes, lengths: dict[str, list[float]], notes: list[str]) -> None:
    """A horizontal bar with its note for each run, put together from `lengths`: part -> its length in each bar."""
    ends = [0.0] * len(LABELS)
    for part, along in lengths.items():
        ax.barh(list(LABELS.values()), along, left=ends, color=PARTS[part], label=part, height=0.5)
        ends = [end + length for end, length in zip(ends, along, strict=True)]
    for index, (end, note) in enumerate(zip(ends, notes, strict=True)):
        ax.annotate(note, (end, index), xytext=(5, 0), textcoords="offset points", va="center")
    ax.invert_yaxis()
    ax.set_xlim(0, 1.4 * max(ends))
    ax.grid(visible=False, axis="y")
    ax.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.45, -0.16), columnspacing=1, handlelength=1)
