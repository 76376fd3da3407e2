"""steps=None with every optimizer of torch and every option set of its own tests: equal to the bare one."""

from __future__ import annotations

import pytest
import torch
from optimizer_cases import REFUSED, STEPS, WINDOWS, bare_run, beyond_the_budget, cases, everything, exact_windows
from wrapper_helpers import (
    DTYPES,
    LOW_PRECISION,
    params_of,
    tidy,  # noqa: F401
    wrap,
)

pytestmark = LOW_PRECISION

WRAPPABLE = [case for case in cases() if case.name not in REFUSED]
COMPARABLE = [(case, dtype) for case in WRAPPABLE for dtype in DTYPES if not case.why_torch_cannot(dtype)]


def add(p, g):
    """A backward that hands `p` the gradient `g`. Where it takes none (differentiable=True) the caller adds in FP32."""
    if p.requires_grad:
        (p * g).sum().backward()
    elif p.grad is None:
        p.grad_dtype = None
        p.grad = g.float()
    else:
        p.grad = p.grad + g


def train(optimizer, case, dtype, to_none=True):
    """Micro-batches whose losses the caller divides; the sums are exact in FP32 and need rounding below."""
    for window in exact_windows(case, dtype):
        for grads in window:
            for p, g in zip(params_of(optimizer), grads, strict=True):
                add(p, (g.double() / STEPS).to(dtype))
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)


@pytest.mark.parametrize("case", WRAPPABLE, ids=str)
def test_float32_is_native_accumulation_bit_by_bit(case):
    ours, native = case.build(torch.float32), case.build(torch.float32)
    w = wrap(ours, None, update="wrapped")
    train(w, case, torch.float32, to_none=False)
    train(native, case, torch.float32, to_none=False)
    assert everything(ours) == everything(native)
    assert w.updates == WINDOWS


@pytest.mark.parametrize(("case", "dtype"), COMPARABLE, ids=str)
def test_the_wrapped_update_is_the_bare_optimizer_fed_the_rounded_sum(case, dtype):
    inner = case.build(dtype)
    train(wrap(inner, None, update="wrapped"), case, dtype)
    assert everything(inner) == everything(bare_run(case, dtype, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [case for case in WRAPPABLE if case.can_fuse], ids=str)
def test_the_fused_update_errs_no_more_than_torch(case, dtype):
    inner = case.build(dtype)
    train(wrap(inner, None, update="fused"), case, dtype)
    stock, truth = bare_run(case, dtype, dtype), bare_run(case, torch.float64, dtype)
    assert beyond_the_budget(inner, stock, truth) is None
