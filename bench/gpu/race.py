"""Contenders take turns for as long as their time lasts, in an order that rotates."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

import torch

from bench.gpu.clock import Clock, Sample
from bench.harness import Contender, Part

LEAST_ROUNDS, MOST_ROUNDS = 3, 30


class ThreeStreamAdd:
    """The bandwidth that everything is compared with: torch.add(a, b, out=c) in FP32, 12 bytes an element.

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

    def gb_per_s(self, samples: list[Sample]) -> float:
        return self.BYTES * self.numel / min(sample.device for sample in samples) * 1e-9


def race(clock: Clock, contenders: list[Contender], box: float) -> dict[str, list[Sample]]:
    """Samples by name. box: seconds after which a contender stops; it has at least LEAST_ROUNDS runs before that.

    One round before the counted ones warms up.
    """
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    spent = dict.fromkeys(samples, 0.0)
    gc.collect()
    gc.disable()
    try:
        for contender in contenders:
            clock.sample(contender)
        for turn in range(MOST_ROUNDS):
            racing = [c for c in contenders if spent[c.name] < box or len(samples[c.name]) < LEAST_ROUNDS]
            first = turn % len(racing) if racing else 0
            for contender in racing[first:] + racing[:first]:
                begin = time.monotonic()
                samples[contender.name].append(clock.sample(contender))
                spent[contender.name] += time.monotonic() - begin
    finally:
        gc.enable()
    return samples
