"""A run of the benchmark: what was asked for, what came of it, and how a race is held."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from fusedaccum.benchmark import harness, report
from fusedaccum.benchmark.cases import CPU, KINDS, SHAPE_LISTS, Case, fitting
from fusedaccum.benchmark.clock import Clock, Sample, clock_for
from fusedaccum.benchmark.progress import Progress

SMALL = 1 << 23  # fewer parameters than this make short runs, of which more are wanted,
MANY = 1000  # unless it is more tensors than this that take the time
MORE_ROUNDS = 5


@dataclass
class Options:
    """What the command line asks for. kinds: None for a choice that ends before a machine stops being quiet."""

    shapes: list[str] = field(default_factory=lambda: list(SHAPE_LISTS))
    kinds: list[str] | None = None
    rounds: int = 9
    threads: int = 2
    memory_gb: float = 12.0
    compiled: bool = True
    clip: bool = True
    quick: bool = False
    device: torch.device = CPU

    @property
    def kinds_or_all(self) -> list[str]:
        return self.kinds or list(KINDS)


@dataclass
class Run:
    options: Options
    progress: Progress
    rows: list[report.Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    scaling: list[dict[str, object]] = field(default_factory=list)
    said: set[str] = field(default_factory=set)
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = clock_for(self.options.device)

    def say(self, text: str) -> None:
        self.progress.clear()
        print(text, flush=True)

    def add(self, made: list[report.Row]) -> None:
        self.say(report.table(made, self.options.device) + "\n")
        self.rows += made

    def leave_out(self, where: str, name: str, reason: str) -> None:
        """Name who is not measured, and why: for each case in the file, the first time on the screen."""
        line = f"absent: {name} ({reason})"
        if line not in self.said:
            self.say(line)
            self.said.add(line)
        self.absent[f"{where}; {name}"] = reason

    def case(self, shapes: str, kind: str, plan: float, sets: int | None) -> Iterator[Case]:
        """The case, or none and a note where memory is not enough. Its memory is given back afterwards.

        plan: bytes per parameter that contenders will hold at once.
        """
        listed, options = SHAPE_LISTS[shapes], self.options
        if options.quick:
            title, sizes = listed.title + " (quick stand-in)", listed.quick()
        else:
            try:
                title, sizes = fitting(listed, plan, options.memory_gb * 1e9)
            except MemoryError as error:
                self.leave_out(f"{listed.title}; {kind}", listed.title, f"{error}; see --memory-gb")
                return
        case = Case(sizes, KINDS[kind], title, device=options.device, sets=sets, clip=options.clip)
        yield case
        case.forget()
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()

    def race(self, case: Case, contenders: list) -> dict[str, list[Sample]]:
        """Samples by name, those of the reference bandwidth among them (`report.rows` knows which)."""
        rounds = self.rounds(case.numel, len(case.shapes))
        racing = [*contenders, harness.reference_for(case.numel, case.device)]
        self.progress.expect(len(racing) * (rounds + 1))
        return harness.race(racing, rounds, self.clock.sample, self.progress.tick)

    def rounds(self, numel: int, tensors: int) -> int:
        short = numel < SMALL and tensors <= MANY
        return self.options.rounds * (MORE_ROUNDS if short and not self.options.quick else 1)

    def launches(self, contender: harness.Contender) -> int | None:
        """Kernels of one run on a GPU, operator calls on a CPU; None where they cannot be counted."""
        counts = [self.clock.launches(part) for part in contender.parts()]
        return None if None in counts else sum(counts)


Task = tuple[str, Callable[[Run], None]]
