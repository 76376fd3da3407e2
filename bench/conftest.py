"""pytest-benchmark's half of the benchmark: a look at a kernel while working on it.

Contenders of a group run one after the other here, so compare with care: published numbers come from `python -m bench`.
"""

from __future__ import annotations

import functools

import pytest
import torch

from bench.cases import KINDS, SHAPE_LISTS, Case
from bench.harness import Contender, InPlaceAdd, run_once

ROUNDS = 7


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="small stand-ins, 2 rounds: shows that it runs, no more")
    parser.addoption("--threads", type=int, default=2, help="torch threads")


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.config.getoption("--threads"))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quick(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--quick")


@functools.lru_cache(maxsize=1)
def cached_case(shapes: str, kind: str, quick: bool) -> Case:
    listed = SHAPE_LISTS[shapes]
    return Case(listed.quick() if quick else listed.shapes(), KINDS[kind], listed.title)


@pytest.fixture
def make_case(quick: bool):
    """(shape list, kind) -> Case, small under --quick. The last one is kept: making one takes longer than timing it."""
    return lambda shapes, kind: cached_case(shapes, kind, quick)


@pytest.fixture
def measure(benchmark, quick: bool):
    """Time a contender, and note GB/s over the least bytes and their share of an in-place add's.

    A contender of several parts is timed with the handing over of gradients between them.
    """

    def run(contender: Contender, case: Case, least_bytes: int, group: str) -> None:
        rounds = 2 if quick else ROUNDS
        adder = InPlaceAdd(case.numel)
        add = min(run_once(adder) for _ in range(rounds + 1))
        (prepare, timed), *more = contender.parts()
        if more:
            prepare, timed = (lambda: None), (lambda: run_once(contender))

        def setup() -> None:
            prepare()

        benchmark.group = group
        benchmark.pedantic(timed, setup=setup, rounds=rounds, warmup_rounds=1)
        gb_per_s = least_bytes * case.numel / benchmark.stats.stats.min * 1e-9
        benchmark.extra_info["contender"] = contender.name
        benchmark.extra_info["gb_per_s"] = gb_per_s
        benchmark.extra_info["share_of_add"] = gb_per_s / (InPlaceAdd.BYTES * case.numel / add * 1e-9)

    return run
