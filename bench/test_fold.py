"""One fold at a time: a first touch, a later one, the last one with its norm."""

from __future__ import annotations

import functools

import pytest

from bench import kernels
from bench.cases import Case


@functools.lru_cache(maxsize=1)
def checked(case: Case, stage: str) -> dict[str, kernels.Kernel]:
    return {kernel.name: kernel for kernel in kernels.folds(case, stage)}


@pytest.mark.parametrize("shapes", ["gpt2", "400x10486"])
@pytest.mark.parametrize("kind", ["masters", "fp32"])
@pytest.mark.parametrize("stage", kernels.STAGES)
@pytest.mark.parametrize("contender", ["fusedaccum", "add_ per parameter", "_foreach_add_"])
def test_fold(shapes, kind, stage, contender, make_case, measure):
    case = make_case(shapes, kind)
    least = kernels.least_fold_bytes(stage, case.kind.gradient_bytes)
    measure(checked(case, stage)[contender], case, least, f"fold {stage}, {shapes}, {case.kind.dtype}")
