"""steps=None: whatever a loop does, what comes out is what the bare optimizer makes of it in FP32."""

from __future__ import annotations

import pytest
import torch
from live_runs import SHAPES, Run, assert_same, ours_are_views, run
from live_scripts_hooks import ROUNDS, SCRIPTS
from wrapper_helpers import (
    DTYPES,
    LOW_PRECISION,
    MAKERS,
    assert_within_budget,
    every_maker,
    tidy,  # noqa: F401
    use_two_buffers,
    wrap,
)

pytestmark = LOW_PRECISION

every_script = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
low = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@every_script
@every_maker
def test_wrapped_equals_the_bare_optimizer_bit_by_bit(script, make):
    ours = run(script, make=make, update="wrapped")
    assert_same(ours, run(script, make=make, bare=True))
    assert ours_are_views(ours)


@every_script
def test_on_two_buffers(script, monkeypatch):
    use_two_buffers(monkeypatch)
    ours = run(script, update="wrapped")
    assert len(ours.opt._window.buffers) in (0, 2)
    assert_same(ours, run(script, bare=True))


@every_script
@every_maker
def test_fused_errs_no_more_than_the_bare_optimizer(script, make):
    ours = run(script, make=make, update="fused")
    stock, truth = run(script, make=make, bare=True), run(script, torch.float64, make=make, bare=True)
    for p, q, exact in zip(ours.params, stock.params, truth.params, strict=True):
        assert_within_budget(p, q, exact)
    assert [value.shape for value in ours.log] == [value.shape for value in stock.log]
    for a, b in zip(ours.log, stock.log, strict=True):  # norms and gradients
        assert torch.allclose(a, b, rtol=2.0**-20, atol=0)
    assert ours_are_views(ours)


@low
@pytest.mark.parametrize("script", [s for name, s in SCRIPTS.items() if name not in ROUNDS])
@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_sums_of_low_precision_parameters_are_those_of_float32(script, dtype, update):
    """What is logged (sums, norms) is within roundings of float32 of the truth, where torch's own is not."""
    ours, truth = run(script, dtype, update=update), run(script, torch.float64, bare=True)
    assert [value.shape for value in ours.log] == [value.shape for value in truth.log]
    for seen, exact in zip(ours.log, truth.log, strict=True):
        size = exact.abs().max().item() if exact.numel() else 0.0
        assert torch.allclose(seen, exact, rtol=2.0**-19, atol=2.0**-19 * size)
    for p in ours.params:
        assert p.dtype == dtype
        assert p.grad is None or p.grad.dtype == torch.float32


@low
def test_torchs_own_sums_are_further_away(dtype):
    """The comparison above can tell them apart."""

    def worst(done):
        truth = run(SCRIPTS["three_windows"], torch.float64, bare=True)
        return max(float((a - b).abs().max()) for a, b in zip(done.log, truth.log, strict=True) if a.numel())

    script = SCRIPTS["three_windows"]
    ours, native = worst(run(script, dtype)), worst(run(script, dtype, bare=True))
    assert ours <= native * 2.0**-6
    assert native > 2.0**-11


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@low
def test_low_precision_training_is_nearer_to_the_truth(make, dtype):
    """FP32 sums and masters against what torch does with 16 bits."""

    def distance(done):
        truth = run(SCRIPTS["three_windows"], torch.float64, make=make, bare=True)
        pairs = zip(done.params, truth.params, strict=True)
        return sum(float((p.double() - q).detach().square().sum()) for p, q in pairs)

    ours = run(SCRIPTS["three_windows"], dtype, make=make, master_weights=True, state_dtype=torch.float32)
    assert distance(ours) < distance(run(SCRIPTS["three_windows"], dtype, make=make, bare=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_the_same_memory_over_100_windows(dtype, update):
    done, seen = Run(dtype, update=update), set()
    for k in range(100):
        done.backward(k, k + 1)
        if k % 7 == 3:
            done.params[1].grad = torch.ones_like(done.params[1])
        done.opt.step()
        seen.add(tuple(p.grad.data_ptr() for p in done.params))
        done.opt.zero_grad(set_to_none=k % 2 == 0)
    assert len(seen) == 1
    assert done.opt.updates == 100


def test_the_buffer_is_in_the_order_of_the_parameters():
    done = Run()
    done.backward(0)
    buffer = done.opt._window.buffers[0]
    assert [p.grad.data_ptr() - buffer.flat.data_ptr() for p in done.params] == (4 * buffer.segments[:, 0]).tolist()
    assert [p.grad.shape for p in done.params] == [torch.Size(s) for s in SHAPES]


def test_frozen_at_a_step_and_thawed():
    """A step() must not take its hooks from a parameter that is frozen then: bfloat16 would add 256 + 1 up to 256."""
    p, q = (torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)) for _ in range(2))
    w = wrap(torch.optim.SGD([p, q], lr=1.0), None)
    for frozen in (False, True):
        p.requires_grad_(not frozen)
        (p.sum() + q.sum()).backward()
        w.step()
        w.zero_grad()
    p.requires_grad_(True)
    for factor in (256, 1, 1, 1):
        ((p.sum() + q.sum()) * factor).backward()
    assert p.grad.tolist() == q.grad.tolist() == [259.0] * 4
