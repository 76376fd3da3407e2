"""steps=None: what can be asked of a wrapper, which calls mean something, and which are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from live_runs import Run, assert_same, run
from live_scripts_hooks import SCRIPTS
from torch.optim import SGD
from wrapper_helpers import (
    LOW_PRECISION,
    MAKERS,
    Toy,
    both_updates,
    refused,
    tidy,  # noqa: F401
    wrap,
)

from fusedaccum import FusedAccumOptimizer, passes

pytestmark = LOW_PRECISION


@both_updates
def test_what_can_be_read(update):
    p, q = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    w = wrap(SGD([p, q], lr=1.0), None, update=update)
    seen = []

    def look(*_):
        seen.append([w.master_grad(t).tolist() for t in (p, q)])

    w.register_step_pre_hook(look)
    assert "steps=None" in repr(w)
    assert (w.steps, w.pending, w.updates, w.updated, w.will_update, w.grad_norm) == (None, 0, 0, False, True, None)
    w.step()
    assert (w.pending, w.updates, w.updated, w.grad_norm, w.skipped_windows) == (0, 0, False, 0.0, 0)
    assert not seen, "no gradient, no update, no hook"
    (p * torch.tensor([3.0, 0.0])).sum().backward()
    (p * torch.tensor([0.0, 4.0])).sum().backward()
    assert (w.pending, w.will_update) == (0, True)
    assert w.master_grad(p).tolist() == [3.0, 4.0]
    assert w.master_grad(q).tolist() == [0.0, 0.0]
    w.step()
    assert seen == [[[3.0, 4.0], [0.0, 0.0]]]
    assert (w.pending, w.updates, w.updated, w.grad_norm) == (0, 1, True, 5.0)
    assert w.master_grad(p).tolist() == [3.0, 4.0], "until it is zeroed"
    w.zero_grad()
    assert w.master_grad(p).tolist() == [0.0, 0.0]
    w.step()
    assert (w.updates, w.updated, w.grad_norm) == (1, False, 0.0)
    with pytest.raises(ValueError, match="not a parameter"):
        w.master_grad(torch.zeros(2))


def test_the_norm_is_that_of_what_was_updated_with():
    """Case 6 and 43: of p.grad as it is, clipped by the caller or edited by a hook, before our own clipping."""
    p = torch.nn.Parameter(torch.zeros(2))
    w = wrap(SGD([p], lr=1.0), None, max_norm=1.0)
    (p * torch.tensor([3.0, 4.0])).sum().backward()
    w.step()
    assert w.grad_norm == 5.0
    assert p.grad.tolist() == [3.0, 4.0], "our clipping leaves p.grad"
    assert p.tolist() == pytest.approx([-0.6, -0.8])
    torch.nn.utils.clip_grad_norm_([p], 0.5)
    w.step()
    assert w.grad_norm == pytest.approx(0.5)
    handle = w.register_step_pre_hook(lambda *_: w.master_grad(p).mul_(4) is None or None)
    w.step()
    assert w.grad_norm == pytest.approx(2.0)
    handle.remove()


@both_updates
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_84_a_window_that_is_not_finite_is_skipped(make, update):
    done = Run(make=make, update=update, nonfinite="skip_window")
    done.window(0, 1)
    before = done.outcome()
    done.backward(2)
    (done.params[1] * float("nan")).sum().backward()
    done.opt.step()
    assert (done.opt.updates, done.opt.updated, done.opt.skipped_windows) == (1, False, 1)
    assert not done.opt.grad_norm < float("inf")
    assert done.params[1].grad.isnan().all(), "as natively, it is the caller's to zero"
    done.opt.zero_grad()
    assert {k: v for k, v in done.outcome().items() if k != "log"} == {k: v for k, v in before.items() if k != "log"}
    done.window(3)
    assert done.opt.updates == 2
    assert all(p.isfinite().all() for p in done.params)


def test_reset_gives_up_what_p_grad_holds():
    done = Run(update="wrapped")
    done.backward(0)
    done.params[0].grad = torch.ones(5)
    done.opt.reset()
    assert all(p.grad is None for p in done.params)
    done.window(1)
    native = Run(bare=True)
    native.window(1)
    assert_same(done, native)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduction": "sum"}, "reduction='sum' has no meaning with steps=None"),
        ({"fold": "backward"}, "fold='backward' has no meaning with steps=None"),
        ({"amp_scaling": True}, "amp_scaling=True has no meaning with steps=None"),
        ({"nonfinite": "skip_micro"}, "nonfinite='skip_micro'.*use nonfinite='skip_window'"),
        ({"nonfinite": "raise"}, "nonfinite='raise'.*use nonfinite='skip_window'"),
    ],
    ids=str,
)
def test_options_without_a_meaning_are_refused(options, words):
    p = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=words):
        FusedAccumOptimizer(SGD([p], lr=1.0), None, **options)
    assert not p._backward_hooks


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda w: w.flush(), RuntimeError, "flush.* has no meaning with steps=None"),
        (lambda w: w.micro_batch(mean_of=2), RuntimeError, "micro_batch.* has no meaning with steps=None"),
        (lambda w: w.step(mean_of=2), ValueError, "mean_of and sum_of have no meaning with steps=None"),
        (lambda w: w.step(sum_of=torch.tensor(2)), ValueError, "mean_of and sum_of have no meaning"),
        (lambda w: setattr(w, "steps", 4), ValueError, "steps=4 cannot follow steps=None"),
    ],
    ids=["flush", "micro_batch", "mean_of", "sum_of", "steps"],
)
def test_calls_without_a_meaning_are_refused(call, error, words):
    toy = Toy(None)
    toy.backward(1.0)
    with refused(toy.w, words):
        call(toy.w)
    with pytest.raises(error):
        call(toy.w)


def test_steps_none_cannot_be_set_later():
    toy = Toy(4)
    with refused(toy.w, "steps=None cannot follow steps=4"):
        toy.w.steps = None


def test_zero_grad_ahead_of_the_end_of_a_failed_backward(monkeypatch):
    """On a GPU the engine drops it in the thread of the device, when the caller may have caught the error already."""
    ends, make = [], passes._End.__init__

    def kept(end, *arguments):
        make(end, *arguments)
        ends.append(end)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError

    p, x = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    w = wrap(SGD([p], lr=1.0), None)
    p.sum().backward()
    monkeypatch.setattr(passes._End, "__init__", kept)
    with pytest.raises(ArithmeticError):
        torch.autograd.grad(Fails.apply(x) + p.sum(), [p, x])
    w.zero_grad()
    ends.clear()
    assert p.grad is None
    (p * 2).sum().backward()
    w.step()
    assert p.tolist() == [-2.0] * 4


def test_99_through_a_proxy_it_is_the_same_object():
    done = run(SCRIPTS["three_windows"])
    twin = copy.copy(done.opt)
    done.backward(4)
    twin.step()
    assert done.opt.updates == twin.updates == 4
