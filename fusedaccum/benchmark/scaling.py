"""What a window costs against parameters, tensors, micro-batches and threads: straight lines, and why not where not.

One thing is varied at a time, for windows of the public wrapper with FP32 masters and moments. The line is fitted to
the minima so that relative deviations are small (a point of 1 million parameters counts as much as one of 1 billion).
Where the cost bends the reason is looked for: what fits into a cache is not fitted but listed, and the reference add of
the same size shows whether the machine bends by itself.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from fusedaccum.benchmark import quiet, sections, truth, window
from fusedaccum.benchmark.cases import KINDS, MICRO_BATCHES, Case, Shapes
from fusedaccum.benchmark.harness import InPlaceAdd, Part, race
from fusedaccum.benchmark.report import span
from fusedaccum.benchmark.run import Options, Run, Task

KIND = KINDS["masters"]
# A point farther than this from its line is a bend, and gets its reason printed.
BEND = 0.10
# Up to this share of a cache a window is served by it: something else always needs some.
FITS = 0.5
# Compared with float64 up to this many parameters. Larger ones run the same code.
CHECKED = 1 << 22

PARAMETERS = (1, 2, 4, 10, 30, 100, 300, 1000)  # millions, in TENSORS_OF_PARAMETERS tensors
TENSORS_OF_PARAMETERS = 100
TENSORS = (10, 100, 500, 1000, 2000, 5000, 10_000, 20_000)  # of NUMEL parameters together
STEPS = (1, 2, 4, 8, 16, 32, 64)
NUMEL = 16_000_000  # more than caches hold, and quick enough to be repeated
QUICK = 400  # times smaller


@dataclass
class Point:
    """One setting: `at` on the axis. cached: the cache that holds all of a window, if one does."""

    at: float
    label: str
    bytes_held: int
    minimum: float
    samples: list[float]
    add_minimum: float
    cached: str | None = None
    fitted: float | None = None

    @property
    def deviation(self) -> float | None:
        """From the line, as a share of it."""
        return None if self.fitted is None else self.minimum / self.fitted - 1


@dataclass
class Axis:
    """One thing that was varied. The line: seconds = fixed + slope * at, through the points that no cache holds.

    bytes_each: the least that one more `unit` must move, where that is what it costs.
    """

    name: str
    contender: str
    unit: str
    points: list[Point] = field(default_factory=list)
    bytes_each: float | None = None
    fixed: float = 0.0
    slope: float = 0.0
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        content = asdict(self)
        for point, made in zip(content["points"], self.points, strict=True):
            point["deviation"] = made.deviation
        return content


class Setting:
    """A contender at one point. threads: torch's, set before each part."""

    def __init__(self, name: str, contender: window.Window | InPlaceAdd, threads: int | None = None) -> None:
        self.name, self.contender, self.threads = name, contender, threads

    def parts(self) -> Iterable[Part]:
        for prepare, timed in self.contender.parts():
            if self.threads is None:
                yield prepare, timed
            else:
                yield partial(self._with_threads, prepare), timed

    def _with_threads(self, prepare: object) -> None:
        prepare()
        torch.set_num_threads(self.threads)


# Lines


def straight_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """(fixed, slope) with the least sum of squared relative deviations. One point, or equal ones: slope 0."""
    weights = [1 / y**2 for y in ys]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    if spread == 0:
        return mean_y, 0.0
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True)) / spread
    return mean_y - slope * mean_x, slope


def fit(axis: Axis) -> None:
    """Fit the line to the points out of every cache, or to all where fewer than three are, and note each bend."""
    outside = [point for point in axis.points if point.cached is None]
    inside = [point for point in axis.points if point.cached is not None]
    fitted = outside if len(outside) >= 3 else axis.points
    axis.fixed, axis.slope = straight_line([p.at for p in fitted], [p.minimum for p in fitted])
    for point in axis.points:
        point.fitted = axis.fixed + axis.slope * point.at
    if axis.bytes_each and axis.slope > 0:
        axis.notes.append(f"the slope is {axis.bytes_each / axis.slope * 1e-9:.1f} GB/s over the least bytes")
    if len(axis.points) < 3:
        axis.notes.append("fewer than three points: any line fits them")
    if inside:
        names = ", ".join(f"{point.label} ({point.cached})" for point in inside)
        what = "in the line, as fewer than three points are not" if fitted is axis.points else "left out of the line"
        axis.notes.append(f"held by a cache, and {what}: {names}")
    for point in axis.points:
        if abs(point.deviation) > BEND:
            reason = why(point, axis, point in fitted)
            axis.notes.append(f"{point.label}: {point.deviation:+.0%} from the line; {reason}")


def why(point: Point, axis: Axis, in_line: bool) -> str:
    """What explains a point off its line."""
    if not in_line:
        return f"its {point.bytes_held / 2**20:,.1f} MiB lie in the {point.cached} cache"
    spread = statistics.median(point.samples) / point.minimum - 1
    if spread > abs(point.deviation):
        return f"no more than noise: its own median is {spread:.0%} over its minimum"
    if axis.name == "parameters":
        adds = [p for p in axis.points if (p.cached is None) == (point.cached is None)]
        fixed, slope = straight_line([p.at for p in adds], [p.add_minimum for p in adds])
        off = point.add_minimum / (fixed + slope * point.at) - 1
        if off * point.deviation > 0 and abs(off) > BEND / 2:
            return f"the reference add of this size is {off:+.0%} from its own line: the machine's memory bends"
        return f"not explained: the reference add of this size is {off:+.0%} from its own line"
    return f"not explained: its median is {spread:.0%} over its minimum"


def cache_for(bytes_held: int, caches: dict[str, int]) -> str | None:
    """The smallest cache that holds so much, with room for what else is going on."""
    fitting = [name for name, size in caches.items() if bytes_held <= FITS * size]
    return min(fitting, key=caches.__getitem__, default=None)


# Axes


def held(case: Case) -> int:
    """Bytes that a window of ours goes through: states, sums and a set of gradients."""
    return (case.kind.state_bytes + 4 + case.kind.gradient_bytes * len(case.gradients)) * case.numel


def make_case(numel: int, tensors: int, run: Run, micro_batches: int = MICRO_BATCHES) -> Case:
    """`numel` parameters, about, in tensors of equal size. One set of gradients: cold enough where it matters."""
    shapes: Shapes = [(max(1, numel // tensors),)] * tensors
    options = run.options
    return Case(shapes, KIND, "scaling", device=options.device, sets=1, micro_batches=micro_batches, clip=options.clip)


def measure(run: Run, axis: Axis, made: list[tuple[float, str, Case, int | None]], cls: type[window.Ours]) -> None:
    """Add a point for each (at, label, case, threads). They take turns as far as memory holds them together."""
    groups: list[list[tuple[float, str, Case, int | None]]] = [[]]
    room = run.options.memory_gb * 1e9
    for entry in made:
        need = point_bytes(entry[2])
        if need > run.options.memory_gb * 1e9:
            axis.left_out[entry[1]] = f"needs {need / 1e9:.0f} GB of {run.options.memory_gb:.0f}; see --memory-gb"
            continue
        if need > room:
            groups.append([])
            room = run.options.memory_gb * 1e9
        groups[-1].append(entry)
        room -= need
    for group in groups:
        if group:
            axis.points += race_points(run, group, cls)
            gc.collect()


def point_bytes(case: Case) -> int:
    """What a point holds while it is measured: start, gradients, states and sums, and the reference's two tensors."""
    return (2 * case.kind.gradient_bytes + case.kind.state_bytes + 4 + 8) * case.numel


def race_points(run: Run, group: list[tuple[float, str, Case, int | None]], cls: type[window.Ours]) -> list[Point]:
    settings: list[Setting] = []
    for _, label, case, threads in group:
        run.progress.note(f"building {label}")
        contender = cls(case)
        if case.numel <= CHECKED:
            sections.run_windows(contender)
            truth.refuse_wrong(truth.errors(case, {contender.name: contender.params}), set())
        settings.append(Setting(label, contender, threads))
        settings.append(Setting(f"add, {label}", InPlaceAdd(case.numel), threads))
    largest = max(case.numel for _, _, case, _ in group)
    rounds = run.rounds(largest, max(len(case.shapes) for _, _, case, _ in group))
    run.progress.expect(len(settings) * (rounds + 1))
    samples = race(settings, rounds, tick=run.progress.tick)
    torch.set_num_threads(run.options.threads)
    caches = quiet.caches()
    points = []
    for at, label, case, _ in group:
        taken = samples[label]
        size, add = held(case), min(samples[f"add, {label}"])
        points.append(Point(at, label, size, min(taken), taken, add, cache_for(size, caches)))
        case.forget()
    return points


def smaller(run: Run, numel: int) -> int:
    return numel // QUICK if run.options.quick else numel


def parameters(run: Run, cls: type[window.Ours]) -> Axis:
    axis = Axis("parameters", cls.name, "parameter")
    axis.bytes_each = KIND.least_window_bytes(cls.fold_every, run.options.clip)
    made = []
    for millions in PARAMETERS[: 5 if run.options.quick else None]:
        case = make_case(smaller(run, millions * 1_000_000), TENSORS_OF_PARAMETERS, run)
        made.append((float(case.numel), f"{case.numel / 1e6:g} M", case, None))
    measure(run, axis, made, cls)
    return axis


def tensors(run: Run, cls: type[window.Ours]) -> Axis:
    axis = Axis("tensors", cls.name, "tensor")
    numel = smaller(run, NUMEL)
    counts = [count for count in TENSORS if count <= numel // 16]
    made = [(float(count), f"{count:,} tensors", make_case(numel, count, run), None) for count in counts]
    measure(run, axis, made, cls)
    return axis


def steps(run: Run, cls: type[window.Ours]) -> Axis:
    axis = Axis("steps", cls.name, "micro-batch")
    made = [
        (
            float(count),
            f"{count} step{'s' * (count > 1)}",
            make_case(smaller(run, NUMEL), TENSORS_OF_PARAMETERS, run, count),
            None,
        )
        for count in STEPS
    ]
    measure(run, axis, made, cls)
    axis.bytes_each = (KIND.gradient_bytes + 8 / cls.fold_every) * smaller(run, NUMEL)
    if cls.fold_every > 1:
        axis.notes.append(f"a pass for every {cls.fold_every} micro-batches begun: stairs, not a line")
    return axis


def threads(run: Run, cls: type[window.Ours]) -> Axis:
    """Against 1 / threads: what does not get faster with threads is the line's fixed part."""
    axis = Axis("threads", cls.name, "1 / threads")
    counts = sorted(
        {1, *(count for count in (2, 4, 8, 16, 32, 64) if count < run.options.threads), run.options.threads}
    )
    made = []
    for count in counts:
        case = make_case(smaller(run, NUMEL), TENSORS_OF_PARAMETERS, run)
        made.append((1 / count, f"{count} thread{'s' * (count > 1)}", case, count))
    measure(run, axis, made, cls)
    one, most = axis.points[0], axis.points[-1]
    axis.notes.append(
        f"{most.label}: {one.minimum / most.minimum:.2f} times as fast as one; the reference add, which is limited by "
        f"memory alone, {one.add_minimum / most.add_minimum:.2f} times"
    )
    return axis


AXES = {"parameters": parameters, "tensors": tensors, "steps": steps, "threads": threads}


# Reporting


def table(axis: Axis) -> str:
    title = f"### scaling, {axis.name}: {axis.contender}; window with {KIND.title}"
    lines = [
        title,
        "",
        "| point | min ms | line ms | off | reference add ms | cache |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for p in axis.points:
        cells = [p.label, f"{p.minimum * 1e3:.3f}", f"{p.fitted * 1e3:.3f}", f"{p.deviation:+.1%}"]
        cells += [f"{p.add_minimum * 1e3:.3f}", p.cached or "-"]
        lines.append("| " + " | ".join(cells) + " |")
    line = f"line: {span(axis.fixed)} + {span(axis.slope)} per {axis.unit}"
    if axis.name == "tensors":
        line += f", {span(axis.slope / MICRO_BATCHES)} per tensor and micro-batch"
    outside = [p for p in axis.points if p.cached is None] or axis.points
    worst = max(outside, key=lambda p: abs(p.deviation))
    lines += ["", f"{line}; farthest from it {worst.deviation:+.1%} ({worst.label})"]
    lines += [f"- {note}" for note in axis.notes]
    lines += [f"- left out: {label}: {reason}" for label, reason in axis.left_out.items()]
    return "\n".join(lines)


def one_axis(name: str, fold_every: int, run: Run) -> None:
    if reason := window.why_not_folded_together(fold_every):
        run.leave_out("scaling", f"{name}, fold_every={fold_every}", reason)
        return
    axis = AXES[name](run, window.ours_every(fold_every))
    if not axis.points:
        for label, reason in axis.left_out.items():
            run.leave_out(f"scaling, {name}", label, reason)
        return
    fit(axis)
    run.say(table(axis) + "\n")
    run.scaling.append(axis.as_dict())


def scaling_tasks(options: Options) -> list[Task]:
    """Threads, and what is timed by the host's clock, are the CPU's: on a GPU there is none of this."""
    if options.device.type != "cpu":
        return []
    return [
        (f"scaling: {name}, fold_every={every}", partial(one_axis, name, every)) for every in (1, 2) for name in AXES
    ]
