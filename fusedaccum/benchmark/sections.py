"""What is raced: fold, step, window. Each task builds a case, checks who runs in it, races and prints them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from fusedaccum.benchmark import kernels, report, rivals, truth, window
from fusedaccum.benchmark.cases import KINDS, SHAPE_LISTS, Case, Kind
from fusedaccum.benchmark.clock import CpuClock
from fusedaccum.benchmark.run import Options, Run, Task

# Where all kinds are run without being asked: a full run is to end before the machine stops being quiet.
ALL_KINDS_FOR = ("gpt2", "400x10486")
HOST_RUNS = 3
REFERENCE = 12  # bytes per parameter of the add that gives the reference bandwidth


# Fold and step: kernels by themselves


def fold_plan(kind: Kind) -> float:
    """Bytes per parameter: gradients, sums of ours and two rivals, what one of them converts into, the reference."""
    return kind.gradient_bytes + 3 * 4 + (4 if kind.gradient_bytes < 4 else 0) + REFERENCE


def fold(shapes: str, kind: str, run: Run) -> None:
    for case in run.case(shapes, kind, fold_plan(KINDS[kind]), sets=1):
        dtype = str(case.kind.dtype).removeprefix("torch.")
        for stage in kernels.STAGES:
            folds = kernels.folds(case, stage)
            least = kernels.least_fold_bytes(stage, case.kind.gradient_bytes)
            work = report.Work(f"fold, {stage} micro-batch", f"{dtype} gradients into FP32 sums", least)
            run.add(raced(run, work, case, folds))
            del folds


def step_plan(kind: Kind) -> float:
    """Bytes per parameter: start and gradient, two states, our sums, a rival's gradients and their source."""
    return (
        2 * kind.gradient_bytes
        + 2 * kind.state_bytes
        + 4
        + 2 * (4 if kind.masters else kind.gradient_bytes)
        + REFERENCE
    )


def step(shapes: str, kind: str, run: Run) -> None:
    for case in run.case(shapes, kind, step_plan(KINDS[kind]), sets=1):
        work = report.Work("step, AdamW with a clip coefficient", case.kind.title, case.kind.least_step_bytes)
        run.add(raced(run, work, case, kernels.steps(case)))


def raced(run: Run, work: report.Work, case: Case, contenders: list[kernels.Kernel]) -> list[report.Row]:
    made = report.rows(work, case, kernels.OURS, run.race(case, contenders))
    for row, kernel in zip(made, contenders, strict=True):
        row.launches, row.error = run.launches(kernel), kernel.error
        row.extra_bytes_per_parameter = run.clock.peak(kernel.call) / case.numel
        if case.device.type == "cuda":
            row.host_us = min(sample.hosts[0] for sample in row.runs) * 1e6 / len(case.shapes)
    return made


# Windows


@dataclass
class Checked:
    """Contenders that did what they were asked to, and what is known of each by name; and why others are refused."""

    contenders: list[window.Window] = field(default_factory=list)
    errors: dict[str, truth.Error] = field(default_factory=dict)
    extra: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def window_plan(kind: Kind) -> float:
    """Bytes per parameter: start and two sets of gradients, ours with one rival, the reference."""
    return 3 * kind.gradient_bytes + 2 * (kind.state_bytes + 8) + REFERENCE


def heats(case: Case, rivals: list[type[window.Window]], memory_gb: float) -> list[list[type[window.Window]]]:
    """Rivals in groups that fit into memory together with ours, which runs in every group."""
    each = (case.kind.state_bytes + 8) * case.numel
    shared = (REFERENCE + case.kind.gradient_bytes * (len(case.gradients) + 1)) * case.numel
    fit = max(1, int((memory_gb * 1e9 - shared) / each) - 1)
    return [rivals[begin : begin + fit] for begin in range(0, len(rivals), fit)] or [[]]


def run_windows(contender: window.Window) -> None:
    """The windows that are compared with float64."""
    for number in range(truth.WINDOWS):
        for prepare, timed in contender.parts(number):
            prepare()
            timed()


def build_and_check(case: Case, classes: list[type[window.Window]], clock: CpuClock | None = None) -> Checked:
    """Build contenders, and let each run the windows that are compared with float64.

    extra: bytes per parameter that each held at its peak beyond what all must hold, the gradients of one micro-batch
    among that. A contender that cannot be built, or does other work, is refused; ours has to run: RuntimeError.
    """
    case.make()  # or the first contender would be charged with the case's own tensors
    clock, checked = clock or CpuClock(), Checked()
    for cls in classes:
        built: list[window.Window] = []

        def build_and_run(cls: type[window.Window] = cls, built: list[window.Window] = built) -> None:
            built.append(cls(case))
            run_windows(built[0])

        case.kept = False  # gradients are memory now
        try:
            peak = clock.peak(build_and_run) / case.numel
        except Exception as error:
            if issubclass(cls, window.Ours):
                raise
            checked.refused[cls.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        finally:
            case.kept = True
        gradients = case.kind.gradient_bytes if cls.takes_gradients else 0
        checked.extra[cls.name] = peak - case.kind.state_bytes - gradients
        checked.contenders += built
    checked.errors = truth.errors(case, {contender.name: contender.params for contender in checked.contenders})
    lossy = {window.StockSums.name} if case.kind.dtype != torch.float32 else set()
    refused = truth.refused(checked.errors, lossy)
    checked.refused |= refused
    checked.contenders = [contender for contender in checked.contenders if contender.name not in refused]
    return checked


def host_us(case: Case, cls: type[window.Window]) -> float | None:
    """Microseconds per tensor that a later micro-batch costs the host on a CPU, letting go of its gradients included.

    Measured with as many tensors of one element, where nothing else costs anything. Not for what has to be compiled,
    which would take minutes once more.
    """
    if issubclass(cls, window.CompiledSums):
        return None
    tiny = cls(Case([(1,)] * len(case.shapes), case.kind, "host", clip=case.clip))
    clock = CpuClock()
    clock.sample(tiny)  # makes buffers and states
    # Behind the first micro-batch and before the last one, whose call can be the update.
    later = slice(1, case.micro_batches - 1)
    means = [sum(hosts) / len(hosts) for _ in range(HOST_RUNS) if (hosts := clock.sample(tiny).hosts[later])]
    return min(means) * 1e6 / len(case.shapes)


def launches(run: Run, contender: window.Window) -> int | None:
    """As `Run.launches`. A rival's later micro-batches are alike, and only one is counted: counting takes its time."""
    if not isinstance(contender, window.Rival):
        return run.launches(contender)
    counts = []
    for number, (prepare, timed) in enumerate(contender.parts()):
        if number in (0, 1, contender.case.micro_batches):
            counts.append(run.clock.launches((prepare, timed)))
        else:
            prepare()
            timed()
    if None in counts:
        return None
    first, later, update = counts
    return first + (contender.case.micro_batches - 1) * later + update


def one_heat(run: Run, case: Case, rivals: list[type[window.Window]], work: report.Work) -> list[report.Row]:
    """Check ours and these rivals, then race them."""
    torch.compiler.reset()  # dynamo stops compiling a function that it has seen with many lists of shapes
    run.progress.note("building, and comparing with float64")
    checked = build_and_check(case, [window.Ours, *rivals], run.clock)
    for name, reason in checked.refused.items():
        if name.startswith(window.Ours.name):
            raise RuntimeError(f"{name}: {reason}")
        run.leave_out(f"{case.title}; {work.kind}", name, f"refused: {reason}")
    made = report.rows(work, case, window.Ours.name, run.race(case, checked.contenders))
    run.progress.note("counting calls and host time")
    for row, contender in zip(made, checked.contenders, strict=True):
        cls = type(contender)
        if (every := getattr(cls, "fold_every", 1)) > 1:
            row.least_bytes = case.least_window_bytes(every)
            row.rate()
        row.error, row.extra_bytes_per_parameter = checked.errors[row.contender].relative, checked.extra[row.contender]
        row.launches = launches(run, contender)
        if case.device.type == "cuda":
            row.host_us = min(sample.hosts[1] for sample in row.runs) * 1e6 / len(case.shapes)
        else:
            row.host_us = host_us(case, cls)
    return made


def one_window(shapes: str, kind: str, run: Run) -> None:
    options = run.options
    for case in run.case(shapes, kind, window_plan(KINDS[kind]), sets=None):
        present, absent = rivals.contenders(kind, case, options.compiled)
        clip = "" if case.clip else ", no clipping"
        work = report.Work(
            f"window of {case.micro_batches} micro-batches{clip}", case.kind.title, case.least_window_bytes()
        )
        made: list[report.Row] = []
        for heat in heats(case, present, options.memory_gb):
            # Ours runs in every heat; the table shows it once.
            made += one_heat(run, case, heat, work)[1 if made else 0 :]
        run.add(made)
        for name, reason in absent.items():
            run.leave_out(f"{case.title}; {kind}", name, reason)


# What there is to do


def fold_tasks(options: Options) -> list[Task]:
    """A fold knows only the gradients' dtype: two kinds with the same one are one case."""
    by_dtype: dict[torch.dtype, str] = {}
    for kind in options.kinds_or_all:
        by_dtype.setdefault(KINDS[kind].dtype, kind)
    return tasks("fold", fold, options, list(by_dtype.values()))


def step_tasks(options: Options) -> list[Task]:
    return tasks("step", step, options, options.kinds_or_all)


def window_tasks(options: Options) -> list[Task]:
    every = options.kinds is not None
    all_kinds = [shapes for shapes in options.shapes if every or shapes in ALL_KINDS_FOR]
    made = []
    for shapes in options.shapes:
        kinds = options.kinds_or_all if shapes in all_kinds else ["masters"]
        made += [(f"window: {SHAPE_LISTS[shapes].title}, {kind}", partial(one_window, shapes, kind)) for kind in kinds]
    return made


def tasks(name: str, section: object, options: Options, kinds: list[str]) -> list[Task]:
    return [
        (f"{name}: {SHAPE_LISTS[shapes].title}, {kind}", partial(section, shapes, kind))
        for shapes in options.shapes
        for kind in kinds
    ]
