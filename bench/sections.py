"""The three sections of the benchmark: fold, step, window. Each builds a case, checks, races and prints it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from bench import harness, kernels, report, truth, window
from bench.cases import KINDS, SHAPE_LISTS, Case
from bench.memory import peak_allocated

SMALL = 1 << 23  # fewer parameters than this make short runs, of which more are wanted
MORE_ROUNDS = 5


@dataclass
class Options:
    """What the command line asks for."""

    shapes: list[str]
    kinds: list[str]
    all_kinds_by_default: bool
    rounds: int
    memory_gb: float
    compiled: bool
    quick: bool


@dataclass
class Result:
    rows: list[report.Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, made: list[report.Row]) -> None:
        print(report.table(made), end="\n\n", flush=True)
        self.rows += made


def cases(options: Options, kinds: list[str]) -> Iterator[tuple[str, str, Case]]:
    """The cases asked for, with the names of their shape list and kind. Its tensors go when the next one comes."""
    for shapes in options.shapes:
        listed = SHAPE_LISTS[shapes]
        for kind in kinds:
            title = listed.title + (" (quick stand-in)" if options.quick else "")
            sizes = listed.quick() if options.quick else listed.shapes()
            case = Case(sizes, KINDS[kind], title)
            yield shapes, kind, case
            case.forget()


def race(case: Case, contenders: list, options: Options) -> dict[str, list[float]]:
    rounds = options.rounds * (MORE_ROUNDS if case.numel < SMALL and not options.quick else 1)
    return harness.race([*contenders, harness.InPlaceAdd(case.numel)], rounds)


def fold(options: Options, result: Result) -> None:
    """A fold knows only the gradients' dtype: two kinds with the same one are one case."""
    by_dtype: dict[torch.dtype, str] = {}
    for kind in options.kinds:
        by_dtype.setdefault(KINDS[kind].dtype, kind)
    for _, _, case in cases(options, list(by_dtype.values())):
        for stage in kernels.STAGES:
            samples = race(case, kernels.folds(case, stage), options)
            work = report.Work(
                f"fold, {stage} micro-batch",
                f"{str(case.kind.dtype).removeprefix('torch.')} gradients into FP32 sums",
                kernels.least_fold_bytes(stage, case.kind.gradient_bytes),
            )
            result.add(report.rows(work, case, kernels.OURS, samples))


def step(options: Options, result: Result) -> None:
    for _, _, case in cases(options, options.kinds):
        samples = race(case, kernels.steps(case), options)
        work = report.Work("step, AdamW with a clip coefficient", case.kind.title, case.kind.least_step_bytes)
        result.add(report.rows(work, case, kernels.OURS, samples))


def heats(case: Case, rivals: list[type[window.Rival]], memory_gb: float) -> list[list[type[window.Rival]]]:
    """Rivals in groups that fit into memory together with ours, which runs in every group."""
    each = (case.kind.state_bytes + 8) * case.numel
    shared = (2 * 4 + case.kind.gradient_bytes * (len(case.gradients) + 1)) * case.numel
    fit = max(1, int((memory_gb * 1e9 - shared) / each) - 1)
    return [rivals[begin : begin + fit] for begin in range(0, len(rivals), fit)]


def build_and_check(case: Case, classes: list[type[window.Window]]) -> tuple[list[window.Window], dict, dict]:
    """Build contenders and let each run the windows that are compared with float64.

    Returns them, their errors, and the bytes per parameter that each held at its peak beyond what all must hold.
    """
    case.make()  # or the first contender would be charged with the case's own tensors
    built: list[window.Window] = []
    extra: dict[str, float] = {}

    def build_and_run(cls: type[window.Window]) -> None:
        contender = cls(case)
        built.append(contender)
        for number in range(truth.WINDOWS):
            for prepare, timed in contender.parts(number):
                prepare()
                timed()

    for cls in classes:
        extra[cls.name] = peak_allocated(lambda cls=cls: build_and_run(cls)) / case.numel - case.kind.state_bytes
    errors = truth.errors(case, {contender.name: contender.params for contender in built})
    lossy = {window.StockSums.name} if case.kind.dtype != torch.float32 else set()
    truth.refuse_wrong(errors, lossy)
    return built, errors, extra


def one_heat(case: Case, rivals: list[type[window.Rival]], work: report.Work, options: Options) -> list[report.Row]:
    """Check ours and these rivals, then race them."""
    torch.compiler.reset()  # dynamo stops compiling a function that it has seen with many lists of shapes
    contenders, errors, extra = build_and_check(case, [window.Ours, *rivals])
    made = report.rows(work, case, window.Ours.name, race(case, contenders, options))
    for row in made:
        row.error, row.extra_bytes_per_parameter = errors[row.contender].relative, extra[row.contender]
    return made


def one_window(kind: str, case: Case, options: Options, result: Result) -> None:
    rivals, absent = window.contenders(kind, len(case.shapes), options.compiled)
    work = report.Work("window of 8 micro-batches", case.kind.title, case.kind.least_window_bytes)
    made: list[report.Row] = []
    for heat in heats(case, rivals, options.memory_gb):
        # Ours runs in every heat; the table shows it once.
        made += one_heat(case, heat, work, options)[1 if made else 0 :]
    result.add(made)
    for name, reason in absent.items():
        print(f"absent: {name} ({reason})", flush=True)
        result.absent[f"{case.title}; {kind}; {name}"] = reason
    print(flush=True)


# Where windows are run for every kind without being asked: a full run is to end before the machine stops being quiet.
ALL_KINDS_FOR = ("gpt2", "400x10486")


def windows(options: Options, result: Result) -> None:
    for shapes, kind, case in cases(options, options.kinds):
        if options.all_kinds_by_default and kind != "masters" and shapes not in ALL_KINDS_FOR:
            continue
        one_window(kind, case, options, result)


SECTIONS = {"fold": fold, "step": step, "window": windows}
