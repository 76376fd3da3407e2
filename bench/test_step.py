"""One AdamW step at a time, for each way to hold a model."""

from __future__ import annotations

import functools

import pytest

from bench import kernels
from bench.cases import KINDS, Case


@functools.lru_cache(maxsize=1)
def checked(case: Case) -> dict[str, kernels.Kernel]:
    return {kernel.name: kernel for kernel in kernels.steps(case)}


@pytest.mark.parametrize("shapes", ["gpt2", "400x10486"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contender", ["fusedaccum", "AdamW(fused=True)"])
def test_step(shapes, kind, contender, make_case, measure):
    case = make_case(shapes, kind)
    measure(checked(case)[contender], case, case.kind.least_step_bytes, f"step, {shapes}, {kind}")
