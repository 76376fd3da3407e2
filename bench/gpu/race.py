"""Contenders take turns for as long as their time lasts, in an order that rotates."""

from __future__ import annotations

import gc
import time

from fusedaccum.benchmark.clock import Clock, Sample
from fusedaccum.benchmark.harness import Contender

LEAST_ROUNDS, MOST_ROUNDS = 3, 30


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
