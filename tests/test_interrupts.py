"""Ctrl-C, signals and refusals between a kernel and the counting of what it did: never lost in silence."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from wrapper_helpers import (
    LOW_PRECISION,
    Toy,
    bits,
    both_updates,
    state_bits,
    tidy,  # noqa: F401
    use_two_buffers,
    wrap,
)

from fusedaccum import live_grads
from fusedaccum.backends import compiled


def interrupt(monkeypatch, name, before=False, error=KeyboardInterrupt, calls=1):
    """Have call number `calls` of a kernel end (or begin) with `error`, as a signal that came while it ran does."""
    kernel, left = getattr(compiled, name), [calls]

    def interrupted(*arguments):
        left[0] -= 1
        if left[0] == 0 and before:
            raise error
        kernel(*arguments)
        if left[0] == 0:
            raise error

    monkeypatch.setattr(compiled, name, interrupted)


CALLS = {
    "step": lambda w: w.step(),
    "flush": lambda w: w.flush(),
    "micro_batch": lambda w: w.micro_batch(mean_of=3),
    "state_dict": lambda w: w.state_dict(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


def assert_refused(w):
    for call in CALLS.values():
        with pytest.raises(RuntimeError, match=r"interrupted half-way.*reset\(\).*load_state_dict\(\) after"):
            call(w)


@both_updates
@pytest.mark.parametrize("before", [True, False])
def test_in_the_fold(monkeypatch, update, before):
    toy = Toy(4, update=update).run([1])
    saved = copy.deepcopy(toy.w.state_dict())
    interrupt(monkeypatch, "fold", before)
    toy.backward(1)
    with pytest.raises(KeyboardInterrupt):
        toy.w.step()
    assert_refused(toy.w)
    toy.w.zero_grad()
    toy.w.load_state_dict(saved)
    toy.run([2, 3, 6])
    assert toy.value == -3


@both_updates
def test_reset_drops_what_was_interrupted(monkeypatch, update):
    toy = Toy(4, update=update).run([100])
    interrupt(monkeypatch, "fold")
    toy.backward(100)
    with pytest.raises(KeyboardInterrupt):
        toy.w.step()
    toy.w.reset()
    toy.w.zero_grad()
    toy.run([1, 2, 3, 6])
    assert (toy.value, toy.w.updates) == (-3, 1)


@pytest.mark.parametrize(("update", "kernel"), [("fused", "sgd"), ("wrapped", "emit"), ("fused", "close_window")])
def test_in_the_update(monkeypatch, update, kernel):
    toy = Toy(2, update=update).run([1])
    interrupt(monkeypatch, kernel)
    toy.backward(1)
    with pytest.raises(KeyboardInterrupt):
        toy.w.step()
    assert_refused(toy.w)
    before = toy.value  # -1 where the parameters hold it
    toy.w.reset()
    toy.w.zero_grad()
    toy.run([1, 3])
    assert toy.value == before - 2


def test_a_handler_that_raises_another_error(monkeypatch):
    toy = Toy(2)
    interrupt(monkeypatch, "fold", error=TimeoutError)
    toy.backward(1)
    with pytest.raises(TimeoutError):
        toy.w.step()
    assert_refused(toy.w)
    toy.w.reset()


@pytest.mark.parametrize("make", [AdamW, Adam, lambda p, lr: SGD(p, lr=lr, momentum=0.9, dampening=0.5)])
def test_an_update_that_is_refused_can_be_tried_again(monkeypatch, make):
    """Nothing was written: the step count is as it was, and flush() is the second try."""
    toy, twin = (Toy(2, n=3, make=make, lr=0.1, start=1.0, max_norm=1.0) for _ in range(2))
    for t in (toy, twin):
        t.run([1, 2, 3])
    name = "sgd" if isinstance(toy.inner, SGD) else "adam"
    interrupt(monkeypatch, name, before=True, error=RuntimeError("no"))
    before = state_bits(dict(toy.inner.state[toy.p]))
    toy.backward(4)
    with pytest.raises(RuntimeError, match="no"):
        toy.w.step()
    assert (toy.w.pending, toy.w.updates) == (2, 1)
    assert state_bits(dict(toy.inner.state[toy.p])) == before
    assert toy.w.flush()
    twin.micro(4)
    assert bits(toy.p) == bits(twin.p)
    assert state_bits(dict(toy.inner.state[toy.p])) == state_bits(dict(twin.inner.state[twin.p]))


def test_a_mean_that_a_hook_has_seen_is_a_sum_again(monkeypatch):
    toy = Toy(2)
    seen = []
    toy.w.register_step_pre_hook(lambda w, *_: seen.append(w.master_grad(toy.p).item()))
    interrupt(monkeypatch, "sgd", before=True, error=RuntimeError("no"))
    toy.micro(1, mean_of=10)
    toy.backward(2)
    with pytest.raises(RuntimeError, match="no"):
        toy.w.step(mean_of=1)
    assert toy.w.flush()
    assert seen == pytest.approx([12 / 11] * 2, rel=2e-7)
    assert toy.value == pytest.approx(-12 / 11, rel=2e-7)


@pytest.mark.parametrize(("kernel", "refuses"), [("fold", 1), ("fold", 2), ("sgd", 1), ("sgd", 2)])
def test_refused_on_the_first_or_the_second_of_two_devices(monkeypatch, kernel, refuses):
    use_two_buffers(monkeypatch)
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    w = wrap(SGD(params, lr=1.0), 1)
    interrupt(monkeypatch, kernel, before=True, error=RuntimeError("no"), calls=refuses)
    for p in params:
        p.grad = torch.ones(1)
    with pytest.raises(RuntimeError, match="no"):
        w.step()
    if refuses == 2:  # the first was written by then
        assert_refused(w)
        w.reset()
    else:
        w.flush() if kernel == "sgd" else w.step()
        assert [p.item() for p in params] == [-1, -1]


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("whose", ["inner", "global"])
@both_updates
def test_a_hook_may_save(when, whose, update):
    """Every hook of the optimizer inside runs while the boundary is being closed."""
    toy, saved = Toy(1, update=update), []
    register = {
        ("pre", "inner"): toy.inner.register_step_pre_hook,
        ("post", "inner"): toy.inner.register_step_post_hook,
        ("pre", "global"): register_optimizer_step_pre_hook,
        ("post", "global"): register_optimizer_step_post_hook,
    }
    handle = register[when, whose](lambda *_: saved.append(toy.w.state_dict()))
    try:
        toy.run([1, 2])
    finally:
        handle.remove()
    assert saved
    assert (toy.value, toy.w.updates, toy.w.pending) == (-3, 2, 0)


@both_updates
@pytest.mark.parametrize("error", [KeyError, AssertionError, RuntimeError])
def test_an_inner_pre_hook_that_raises(update, error):
    toy, fail = Toy(2, update=update), [True]

    def hook(*_):
        if fail:
            raise error("no")

    toy.inner.register_step_pre_hook(hook)
    toy.micro(1)
    toy.backward(3)
    with pytest.raises(error):
        toy.w.step()
    assert (toy.value, toy.w.pending, toy.w.updates) == (0, 2, 0)
    fail.clear()
    assert toy.w.flush()
    assert toy.value == -2


@both_updates
def test_memory_that_runs_out_at_the_boundary(monkeypatch, update):
    toy = Toy(2, make=AdamW, update=update)
    interrupt(monkeypatch, "square_total", before=True, error=torch.OutOfMemoryError("no"))
    toy.micro(1)
    toy.backward(1)
    with pytest.raises(torch.OutOfMemoryError):
        toy.w.step()
    assert toy.w.flush()
    assert (toy.w.updates, toy.inner.state[toy.p]["step"]) == (1, 1)


@both_updates
def test_a_hook_that_flushes_all_the_same(update):
    """The refusal is caught, and the sums that the hook had looked at are still means."""
    toy = Toy(1, update=update)

    def hook(w, *_):
        w.master_grad(toy.p)
        with contextlib.suppress(RuntimeError):
            w.flush()

    toy.w.register_step_pre_hook(hook)
    toy.micro(1, mean_of=4)
    assert (toy.value, toy.w.updates) == (-1, 1)


def test_a_hook_that_resets_and_steps_is_told():
    toy = Toy(1)

    def hook(w, *_):
        w.reset()
        toy.p.grad = torch.ones(1)
        w.step()

    toy.w.register_step_pre_hook(hook)
    toy.backward(1)
    with pytest.raises(RuntimeError, match="inside a step pre-hook"):
        toy.w.step()
    toy.w.reset()


@contextlib.contextmanager
def interrupt_at(line, module):
    """Raise KeyboardInterrupt ahead of line number `line` of what runs in `module`; yields whether it was reached."""
    left, reached = [line], []

    def trace(frame, event, _):
        if frame.f_code.co_filename != module.__file__:
            return None
        left[0] -= event == "line"
        if left[0] < 0 and not reached:
            reached.append(True)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield reached
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@LOW_PRECISION
def test_anywhere_in_a_backward_with_live_gradients(dtype):
    """The sum is what it was, with the new gradient or without it; or step() refuses it."""
    line, refused = 0, 0
    while True:
        params = [torch.nn.Parameter(torch.zeros(4, dtype=dtype)) for _ in range(2)]
        w = wrap(SGD(params, lr=1.0), None)
        sum(p.sum() for p in params).backward()
        with contextlib.suppress(KeyboardInterrupt), interrupt_at(line, live_grads) as reached:
            sum(p.sum() * 4 for p in params).backward()
        if not reached:
            break
        try:
            w.step()
            assert {p[0].item() for p in params} <= {-1.0, -5.0}
        except RuntimeError:
            refused += 1
        w.reset()
        line += 1
    assert 0 < refused < line / 4
