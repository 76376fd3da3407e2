"""Times contenders round-robin in one process.

Why not pytest-benchmark for the numbers that are published: it finishes one contender before it starts the next, and
on a shared or a warm machine the minutes between them change the result by more than the contenders differ. Here each
round runs every contender once, in an order that rotates, and a rival is compared with ours of the same rounds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch

# What is made ready without being timed (the backward's work, a reset) and what is timed after it.
Part = tuple[Callable[[], object], Callable[[], object]]
Taken = TypeVar("Taken")


class Contender(Protocol):
    name: str

    def parts(self) -> Iterable[Part]:
        """The parts of one run, in order. A run's time is the sum of its timed halves."""
        ...


def run_once(contender: Contender) -> float:
    """Seconds of one run."""
    total = 0
    for prepare, timed in contender.parts():
        prepare()
        begin = time.perf_counter_ns()
        timed()
        total += time.perf_counter_ns() - begin
    return total * 1e-9


def race(
    contenders: list[Contender],
    rounds: int,
    sample: Callable[[Contender], Taken] = run_once,
    tick: Callable[[int, str], object] = lambda done, name: None,
) -> dict[str, list[Taken]]:
    """Samples of every run by name. One round before the counted ones warms up.

    tick(runs that are done, who is next): called before each run.
    """
    samples: dict[str, list[Taken]] = {contender.name: [] for contender in contenders}
    done = 0
    gc.collect()
    gc.disable()
    try:
        for turn in range(-1, rounds):
            first = max(turn, 0) % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                tick(done, contender.name)
                taken = sample(contender)
                if turn >= 0:
                    samples[contender.name].append(taken)
                done += 1
    finally:
        gc.enable()
    return samples


class InPlaceAdd:
    """The bandwidth that everything on a CPU is compared with: a.add_(b) in FP32, 12 bytes an element.

    As large as the case. In place, because out of place pays a read of the destination first and makes anything look
    good.
    """

    name = "a.add_(b), FP32 in place"
    BYTES = 12

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.a, self.b = torch.ones(numel), torch.ones(numel)

    def parts(self) -> Iterable[Part]:
        yield (lambda: None, lambda: self.a.add_(self.b))


class ThreeStreamAdd:
    """The same for a GPU: torch.add(a, b, out=c) in FP32, 12 bytes an element.

    As large as the case, up to 2^28 elements: beyond, it gets no faster and takes memory that the case needs.
    """

    name = "torch.add(a, b, out=c)"
    BYTES = 12
    MOST = 1 << 28

    def __init__(self, numel: int, device: torch.device) -> None:
        self.numel = min(numel, self.MOST)
        self.a, self.b, self.c = (torch.rand(self.numel, device=device) for _ in range(3))

    def parts(self) -> Iterable[Part]:
        yield (lambda: None, lambda: torch.add(self.a, self.b, out=self.c))


def reference_for(numel: int, device: torch.device) -> InPlaceAdd | ThreeStreamAdd:
    return InPlaceAdd(numel) if device.type == "cpu" else ThreeStreamAdd(numel, device)
