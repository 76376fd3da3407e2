"""The tables as a picture. Needs matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from fusedaccum.benchmark.cases import OURS
from fusedaccum.benchmark.report import Row, races, span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 3
MINE, THEIRS, FAINT, INK = "#0b7a75", "#b4b9c4", "#e3e5ea", "#27365e"
STYLE = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "legend.frameon": False,
}


def draw(
    rows: list[Row], scaling: list[dict[str, object]], machine: dict[str, object], noise: list[str], path: Path
) -> None:
    """Write a PNG: a panel for each race, and one for each scaling axis. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    raced = races(rows)
    panels = len(raced) + len(scaling)
    if not panels:
        return
    lines = math.ceil(panels / COLUMNS)
    with pyplot.rc_context(STYLE):
        size = (17, 2.6 * lines + 0.8)
        figure, axes = pyplot.subplots(lines, COLUMNS, figsize=size, layout="constrained", squeeze=False)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        quiet = "; NOT QUIET, do not publish" if noise else ""
        what = f"{machine['gpu'] or machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}"
        figure.suptitle(f"fusedaccum {machine['fusedaccum']} ({machine['commit']}), {what}{quiet}", fontsize=10)
        spots = iter(axes.flat)
        for race in raced:
            draw_race(next(spots), race)
        for axis in scaling:
            draw_axis(next(spots), axis)
        for spot in spots:
            spot.set_axis_off()
        figure.savefig(path, dpi=100)
        pyplot.close(figure)


def draw_race(ax: Axes, race: list[Row]) -> None:
    """A bar for each contender to its minimum, a stroke at its median."""
    names = [row.contender for row in race]
    minima = [row.minimum * 1e3 for row in race]
    colours = [MINE if name.startswith(OURS) else THEIRS for name in names]
    ax.barh(names, minima, color=colours, height=0.6)
    for index, row in enumerate(race):
        median = row.median * 1e3
        ax.plot([median, median], [index - 0.3, index + 0.3], color=INK, linewidth=1)
        text = f"{row.minimum * 1e3:.3g} ms, {row.gb_per_s:.3g} GB/s, {row.share_of_add:.0%}"
        end = max(median, row.minimum * 1e3)
        ax.annotate(text, (end, index), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.6 * max(row.median * 1e3 for row in race))
    ax.set_title(f"{race[0].section}\n{race[0].shapes[:60]}; {race[0].kind}")
    ax.set_xlabel("ms; GB/s over the least bytes, and their share of the reference add's")


def draw_axis(ax: Axes, axis: dict[str, object]) -> None:
    """Points and their line; hollow where a cache holds a window."""
    points = axis["points"]
    for cached, style in ((False, {"color": MINE}), (True, {"markerfacecolor": "white", "color": MINE})):
        chosen = [point for point in points if bool(point["cached"]) == cached]
        if chosen:
            label = "in a cache" if cached else "measured"
            ats, minima = [p["at"] for p in chosen], [p["minimum"] * 1e3 for p in chosen]
            ax.plot(ats, minima, "o", markersize=5, label=label, **style)
    line = sorted((point["at"], point["fitted"] * 1e3) for point in points)
    formula = f"{span(axis['fixed'])} + {span(axis['slope'])} per {axis['unit']}"
    ax.plot(*zip(*line, strict=True), color=INK, linewidth=1, label=formula)
    adds = sorted((point["at"], point["add_minimum"] * 1e3) for point in points)
    ax.plot(*zip(*adds, strict=True), ":", color=THEIRS, label="reference add")
    if axis["name"] != "threads":
        ax.set_xscale("log")
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    ax.grid(visible=True)
    ax.set(title=f"scaling, {axis['name']}: {axis['contender']}", xlabel=axis["unit"], ylabel="ms per window")
    ax.legend(fontsize=7)
