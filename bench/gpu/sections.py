"""The sections: fold, step, window, compile. Each builds a case, checks its contenders, races and prints them."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from bench import kernels, truth, window
from bench.cases import KINDS, Case, pieces
from bench.gpu import rivals
from bench.gpu.cases import MODELS, fold_bytes, make_case, step_bytes, window_bytes
from bench.gpu.clock import Clock
from bench.gpu.race import ThreeStreamAdd, race
from bench.gpu.table import Facts, Row, Work, rows, table
from bench.harness import Contender
from bench.sections import heats
from fusedaccum.flat_buffer import FlatBuffer

LEAST_SECONDS = 6.0  # a case is not begun with less time left
COMPILE_SECONDS = 40
MOST_COUNTED = 1000  # tensors of a rival whose launches are counted: the profiler takes its time over each


@dataclass
class Run:
    """What was asked for, and what came of it. deadline: on time.monotonic()'s clock."""

    device: torch.device
    clock: Clock
    models: list[str]
    backend: str
    box: float
    deadline: float
    save: Callable[[Run], None]
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def has_time(self, what: str, seconds: float = LEAST_SECONDS) -> bool:
        """Whether `seconds` are left; if not, `what` is noted as not measured."""
        if self.left < seconds:
            self.cut.append(what)
        return self.left >= seconds

    def cases(self, section: str, model: str, kind: str, plan: float, sets: int | None) -> Iterator[Case]:
        """The case, or none and a note where time or memory is not enough. All its memory is given back afterwards.

        plan: bytes per parameter that contenders will hold at once.
        """
        what = f"{section} {model} {kind}"
        if not self.has_time(what):
            return
        try:
            case = make_case(model, kind, self.device, plan, sets)
        except MemoryError as error:
            self.leave_out(what, str(error))
            return
        yield case
        case.forget()
        gc.collect()
        if case.device.type == "cuda":
            torch.cuda.empty_cache()

    def leave_out(self, name: str, reason: str) -> None:
        if self.absent.get(name) != reason:
            print(f"absent: {name} ({reason})", flush=True)
        self.absent[name] = reason

    def launches(self, contender: Contender, number: int, case: Case) -> int | None:
        """Of one part; the others are run too, or a window would not end where the next begins."""
        counted = None
        for k, (prepare, timed) in enumerate(contender.parts()):
            if k == number and (contender.name == kernels.OURS or len(case.shapes) <= MOST_COUNTED):
                counted = self.clock.launches((prepare, timed))
            else:
                prepare()
                timed()
        return counted

    def finish(self, work: Work, case: Case, contenders: list[Contender], facts: dict[str, Facts]) -> list[Row]:
        """Race what was checked, print its table and keep its rows."""
        reference = ThreeStreamAdd(case.numel, case.device)
        samples = race(self.clock, [*contenders, reference], self.box)
        made = rows(work, case, reference.gb_per_s(samples.pop(reference.name)), samples, facts)
        self.rows += made
        print(table(made, self.clock), end="\n\n", flush=True)
        self.save(self)
        return made


def admit(run: Run, name: str, make: Callable[[], Contender]) -> Contender | None:
    """What `make` builds and checks. A rival that cannot run or is wrong is named and left out; ours must not fail."""
    try:
        return make()
    except Exception as error:
        if name == kernels.OURS:
            raise
        run.leave_out(name, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return None


Maker = Callable[[str, list[Tensor], list[Tensor]], kernels.Kernel]


def fold_rivals(run: Run, case: Case) -> dict[str, Maker]:
    scaled = case.scale(0)
    makers: dict[str, Maker] = {
        "add_ per parameter": kernels.each_fold,
        "_foreach_add_": kernels.foreach_fold,
        "autograd into FP32 views": lambda stage, grads, sums: rivals.views_fold(stage, scaled, sums),
    }
    name, module = rivals.APEX_FOLD
    if (apex := load(run, name, module)) is not None:
        makers[name] = lambda *given: rivals.apex_fold(apex, *given)
    return makers


def load(run: Run, name: str, module: str) -> ModuleType | None:
    """A rival's module; None, and the reason noted, where it is not installed or cannot be imported."""
    try:
        found = rivals.installed(module)
    except Exception as error:
        run.leave_out(name, f"{module} cannot be imported: {error}")
        return None
    if found is None:
        run.leave_out(name, f"{module} is not installed")
    return found


def fold_stage(run: Run, work: Work, case: Case, stage: str, makers: dict[str, Maker]) -> list[Row]:
    """One stage of a fold. All contenders sum into the same memory, checked one after the other over zeros."""
    grads, contenders, facts = case.gradients[0], [], {}
    buffers: list[FlatBuffer] = []
    tables = run.clock.peak(lambda: buffers.append(kernels.buffer_for(case, run.backend))) / case.numel - 4
    buffer = buffers[0]
    sums = kernels.views(buffer)
    every: dict[str, Callable[[], kernels.Kernel]] = {kernels.OURS: lambda: kernels.our_fold(stage, grads, buffer)}
    every |= {name: lambda make=make: make(stage, grads, sums) for name, make in makers.items()}
    for name, make in every.items():

        def build_and_check(name: str = name, make: Callable[[], kernels.Kernel] = make) -> kernels.Kernel:
            buffer.flat.zero_()
            built: list[kernels.Kernel] = []

            def build() -> None:
                built.append(make())  # which adds once, but for a first touch
                if stage == "first":
                    built[0].prepare()
                    built[0].run()

            extra = run.clock.peak(build) / case.numel + (tables if name == kernels.OURS else 0)
            kernels.check_fold(stage, grads, built)
            facts[name] = Facts(run.launches(built[0], 0, case), extra)
            return built[0]

        if (kernel := admit(run, name, build_and_check)) is not None:
            contenders.append(kernel)
    return run.finish(work, case, contenders, facts)


def fold(run: Run) -> None:
    """A fold knows only the gradients' dtype."""
    for model in run.models:
        for kind, dtype in (("bf16", "bf16"), ("fp32", "FP32")):
            for case in run.cases("fold", model, kind, fold_bytes(KINDS[kind]), sets=1):
                makers = fold_rivals(run, case)
                for stage in kernels.STAGES:
                    least = kernels.least_fold_bytes(stage, case.kind.gradient_bytes)
                    fold_stage(run, Work(f"fold {stage}", model, f"{dtype} gradients", least), case, stage, makers)
                del makers


def step_case(run: Run, model: str, kind: str, case: Case) -> None:
    """One update. All contenders share parameters, moments and masters, put back before each is checked."""
    state = kernels.State.of(case)
    makes: dict[str, Callable[[], kernels.Kernel]] = {
        kernels.OURS: lambda: kernels.our_step(case, state, kernels.buffer_for(case, run.backend)),
        "AdamW(fused=True)": lambda: kernels.rival_step(case, state),
    }
    if case.kind.state_dtype == torch.float32:
        for name, module in rivals.ADAMS.items():
            if (found := load(run, name, module)) is not None:
                makes[name] = lambda name=name, found=found: kernels.rival_step(
                    case, state, name, rivals.adam_of(found)
                )
    contenders, facts = [], {}
    for name, make in makes.items():

        def build_and_check(name: str = name, make: Callable[[], kernels.Kernel] = make) -> kernels.Kernel:
            state.reset(case)
            kernel = make()
            kernels.check_step(case, [kernel])
            extra = run.clock.peak(lambda: (kernel.prepare(), kernel.run())) / case.numel
            facts[name] = Facts(run.launches(kernel, 0, case), extra)
            return kernel

        if (kernel := admit(run, name, build_and_check)) is not None:
            contenders.append(kernel)
    run.finish(Work("step AdamW", model, kind, case.kind.least_step_bytes), case, contenders, facts)


def step(run: Run) -> None:
    for model in run.models:
        for kind in MODELS[model].steps:
            for case in run.cases("step", model, kind, step_bytes(KINDS[kind]), sets=1):
                step_case(run, model, kind, case)


def merged(case: Case) -> Case:
    """The same values in fewer and larger tensors, for a comparison with float64 that would take minutes one by one."""
    start = list(pieces(case.start))
    whole = Case([tuple(piece.shape) for piece in start], case.kind, case.title, device=case.device)
    whole.__dict__["start"] = start
    whole.__dict__["gradients"] = [list(pieces(grads)) for grads in case.gradients]
    return whole


def checked_windows(run: Run, case: Case, classes: list[type[window.Window]]) -> tuple[list, dict[str, Facts]]:
    """Contenders that ran the windows which are compared with float64, and what each held beyond what all must."""
    case.make()
    case.scale(0)
    contenders, facts = [], {}
    for cls in classes:

        def build_and_run(cls: type[window.Window] = cls) -> window.Window:
            built: list[window.Window] = []

            def work() -> None:
                built.append(cls(case))
                for number in range(truth.WINDOWS):
                    for prepare, timed in built[0].parts(number):
                        prepare()
                        timed()

            extra = run.clock.peak(work) / case.numel - case.kind.state_bytes
            whole = merged(case)
            error = truth.errors(whole, {cls.name: list(pieces(built[0].params))})
            lossy = {window.StockSums.name} if case.kind.dtype != torch.float32 else set()
            truth.refuse_wrong(error, lossy)
            facts[cls.name] = Facts(run.launches(built[0], 1, case), extra, error[cls.name].relative)
            return built[0]

        if (contender := admit(run, cls.name, build_and_run)) is not None:
            contenders.append(contender)
    return contenders, facts


def windows(run: Run) -> None:
    ours = type("Ours", (window.Ours,), {"backend": run.backend})
    for model in run.models:
        for kind in MODELS[model].windows:
            work = Work("window of 8", model, kind, KINDS[kind].least_window_bytes)
            for case in run.cases("window", model, kind, window_bytes(KINDS[kind]), sets=None):
                memory = torch.cuda.mem_get_info(run.device)[0] if run.device.type == "cuda" else 12e9
                for heat in heats(case, list(rivals.WINDOWS[kind]), memory * 0.9e-9):
                    contenders, facts = checked_windows(run, case, [ours, *heat])
                    run.finish(work, case, contenders, facts)
                    del contenders


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """TimeoutError if the block takes longer. A compiler cannot be asked how long it will take."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"not ready after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def compiled(run: Run) -> None:
    """torch.compile against the same fold of GPT-2: last, because compiling takes the longest. 10,000 never end."""
    if "gpt2" not in run.models or not run.has_time("torch.compile", COMPILE_SECONDS + LEAST_SECONDS):
        return

    def maker(stage: str, grads: list[Tensor], sums: list[Tensor]) -> kernels.Kernel:
        with alarm(COMPILE_SECONDS):
            return rivals.compiled_fold(stage, grads, sums)

    for case in run.cases("compile", "gpt2", "bf16", fold_bytes(KINDS["bf16"]), sets=1):
        work = Work("fold later, compiled", "gpt2", "bf16 gradients", kernels.least_fold_bytes("later", 2))
        fold_stage(run, work, case, "later", {rivals.COMPILED: maker})


SECTIONS = {"fold": fold, "step": step, "window": windows, "compile": compiled}
