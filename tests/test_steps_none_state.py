"""steps=None: what is saved, copied, read, refused and given back."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from live_runs import Run, assert_same
from live_scripts_hooks import SCRIPTS
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    DTYPES,
    LOW_PRECISION,
    Toy,
    both_updates,
    every_maker,
    extra_key,
    let_go,
    params_of,
    recorded,
    refused,
    snapshot,
    state_bits,
    tidy,  # noqa: F401
    update_in_use,
    wrap,
)

from fusedaccum import FusedAccumOptimizer

pytestmark = LOW_PRECISION
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def finish(done):
    for k in (10, 12):
        done.window(k, k + 1)
    return done


# Saving and loading


@every_maker
@both_updates
@every_dtype
def test_saved_and_loaded_is_never_stopped(make, update, dtype):
    options = {"update": update}
    if update == "fused" and dtype != torch.float32:
        options |= {"master_weights": True, "state_dtype": torch.float32}
    one, other = (Run(dtype, make=make, **options) for _ in range(2))
    SCRIPTS["three_windows"](one)
    saved = through_a_file(one.opt.state_dict())
    assert not any(t is not None for t in saved[extra_key(saved)]["sums"])
    for p, q in zip(other.params, one.params, strict=True):
        p.data.copy_(q.data)
    other.opt.load_state_dict(saved)
    assert other.opt.updates == one.opt.updates == 3
    one.log.clear()
    assert_same(finish(other), finish(one))


def test_the_sums_are_not_saved_and_stay_as_p_grad():
    """As with a bare optimizer: state_dict() and load_state_dict() leave p.grad alone."""
    done = Run(update="wrapped")
    done.backward(0)
    before = [p.grad.clone() for p in done.params]
    with recorded() as warned:
        saved = through_a_file(done.opt.state_dict())
        done.opt.load_state_dict(saved)
    assert not warned
    assert saved[extra_key(saved)]["pending"] == 0
    assert all(torch.equal(p.grad, g) for p, g in zip(done.params, before, strict=True))
    done.window(1)
    native = Run(bare=True)
    native.window(0, 1)
    assert_same(done, native)


@both_updates
def test_to_and_from_a_bare_optimizer(update):
    ours, native = Run(update=update), Run(bare=True)
    for done in (ours, native):
        SCRIPTS["three_windows"](done)
    theirs = through_a_file(native.opt.state_dict())
    mine = through_a_file(ours.opt.state_dict())
    mine.pop(extra_key(mine))
    for a, b in ((ours, native), (native, ours)):
        for p, q in zip(a.params, b.params, strict=True):
            p.data.copy_(q.detach().clone())
        break
    ours.opt.load_state_dict(theirs)
    one, two = Run(update="wrapped"), Run(bare=True)
    for done, source in ((one, ours), (two, native)):
        for p, q in zip(done.params, source.params, strict=True):
            p.data.copy_(q.data)
    one.opt.load_state_dict(theirs)
    two.opt.load_state_dict(theirs)
    assert_same(finish(one), finish(two))
    bare = Run(bare=True)
    bare.opt.load_state_dict(mine)
    assert state_bits(bare.inner.state_dict()["state"]) == state_bits(mine["state"])


def windows_of(steps, micro_batches):
    toy = Toy(steps, make=AdamW, lr=0.5)
    return toy.run(range(1, micro_batches + 1))


def test_a_closed_window_goes_over_to_steps_none_and_back():
    counted, live = windows_of(4, 4), Toy(None, make=AdamW, lr=0.5)
    live.w.load_state_dict(through_a_file(counted.w.state_dict()))
    live.p.data.copy_(counted.p.data)
    assert (live.w.updates, live.w.pending) == (1, 0)
    for g in (2.0, 4.0):
        live.backward(g / 2)
    live.w.step()
    back = windows_of(2, 0)
    back.w.load_state_dict(through_a_file(live.w.state_dict()))
    counted.w.steps = 2
    counted.run([2, 4])
    assert counted.value == live.value
    assert back.w.updates == 2
    assert state_bits(back.inner.state[back.p]) == state_bits(counted.inner.state[counted.p])


def test_an_open_window_is_refused():
    counted, live = windows_of(4, 3), Toy(None, make=AdamW, lr=0.5)
    live.backward(1.0)
    saved = counted.w.state_dict()
    with refused(live.w, "3 of 4", "steps=4", extra_key(saved)):
        live.w.load_state_dict(saved)
    live.w.load_state_dict({k: v for k, v in saved.items() if k != extra_key(saved)})
    assert live.p.grad.tolist() == [1.0]


# Copies


@pytest.mark.parametrize("how", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))], ids=["deepcopy", "pickle"])
@both_updates
@every_dtype
def test_copies_go_on_by_themselves(how, update, dtype):
    """Without the gradients, as torch copies parameters."""
    done = Run(dtype, update=update)
    SCRIPTS["three_windows"](done)
    done.backward(9)
    before = snapshot(done.opt)
    with recorded() as warned:
        other = how(done.opt)
    assert not warned
    assert snapshot(done.opt) == before
    twin = Run(dtype, update=update)
    twin.params, twin.inner, twin.opt = params_of(other), other.optimizer, other
    assert (other.steps, other.updates, update_in_use(other)) == (None, 3, update)
    assert all(p.grad is None for p in twin.params)
    assert other.grad_norm == done.opt.grad_norm
    done.opt.zero_grad()
    done.log.clear()
    assert_same(finish(twin), finish(done))
    other.close()


def test_a_model_is_copied_and_saved_as_without_us():
    model = torch.nn.Linear(3, 2)
    w = wrap(SGD(model.parameters(), lr=0.1), None)
    model(torch.ones(1, 3)).sum().backward()
    with recorded() as warned:
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        through_a_file(model.state_dict())
    assert not warned
    for other in (twin, again):
        other(torch.ones(1, 3)).sum().backward()
        other(torch.ones(1, 3)).sum().backward()
        assert torch.equal(other.weight.grad, torch.full((2, 3), 2.0))
    assert torch.equal(model.weight.grad, torch.ones(2, 3))
    w.step()


# torch.distributed.checkpoint


class Model(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2, dtype=dtype)


@every_dtype
def test_94_dcp_creates_state_without_a_step(dtype):
    model = Model(dtype)
    w = wrap(AdamW(model.parameters(), lr=0.1, eps=1e-3), None)
    before = [p.detach().clone() for p in model.parameters()]
    state = get_optimizer_state_dict(model, w)
    assert len(state["state"]) == 2
    assert (w.updates, w.updated, w.grad_norm) == (0, False, None)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    model.layer(torch.ones(1, 3, dtype=dtype)).sum().backward()
    w.step()
    assert w.updates == 1
    state = get_optimizer_state_dict(model, w)  # state and gradients are there: nothing is stepped
    assert w.updates == 1
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    fresh = Model(dtype)
    fresh.load_state_dict(model.state_dict())
    other = wrap(AdamW(fresh.parameters(), lr=0.1, eps=1e-3), None)
    set_optimizer_state_dict(fresh, other, copy.deepcopy(state))
    for m, opt in ((model, w), (fresh, other)):
        opt.zero_grad()
        m.layer(torch.ones(1, 3, dtype=dtype)).sum().backward()
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))


def test_a_wrapper_is_stateful_for_dcp(tmp_path):
    one, two = Run(torch.bfloat16, master_weights=True), Run(torch.bfloat16, master_weights=True)
    for done in (one, two):
        done.window(0, 1)
    one.window(2)
    dcp.save({"optimizer": one.opt, "model": one.module}, checkpoint_id=tmp_path)
    two.backward(3)
    dcp.load({"optimizer": two.opt, "model": two.module}, checkpoint_id=tmp_path)
    assert all(p.grad is not None for p in two.params)
    two.opt.zero_grad()
    one.log.clear()
    two.log.clear()
    assert two.opt.updates == 2
    assert_same(finish(two), finish(one))


# close(), and what the garbage collector takes


@every_dtype
@both_updates
def test_close_gives_everything_back(dtype, update):
    done = Run(dtype, update=update)
    done.window(0, 1)
    done.backward(2)
    done.opt.step()
    flats = [weakref.ref(buffer.flat) for buffer in done.opt._window.buffers]
    with recorded() as warned:
        done.opt.close()
    assert not warned
    gc.collect()
    assert not any(flat() is not None for flat in flats)
    for p in done.params:
        assert p.grad is None
        assert p.grad_dtype == dtype
        assert not p._post_accumulate_grad_hooks
        assert not p._backward_hooks
    done.backward(3)
    assert all(p.grad.dtype == dtype for p in done.params)
    done.inner.step()
    for call in (done.opt.step, done.opt.flush, done.opt.micro_batch, lambda: done.opt.load_state_dict({})):
        with pytest.raises(RuntimeError, match=r"close\(\) was called"):
            call()
    assert FusedAccumOptimizer(done.inner, None).updates == 0  # it can be wrapped again


def test_close_goes_on_as_the_bare_optimizer():
    ours, native = Run(update="wrapped"), Run(bare=True)
    for done in (ours, native):
        done.window(0, 1)
    ours.opt.close()
    ours.opt = ours.inner
    assert_same(finish(ours), finish(native))


def test_close_warns_of_gradients_that_no_step_has_used():
    toy = Toy(None)
    toy.backward(1.0)
    with pytest.warns(UserWarning, match=r"1 parameters that no step\(\) has used.*call step\(\) before close\(\)"):
        toy.w.close()
    assert toy.p.grad is None
    with recorded() as warned:
        toy.w.close()
        other = Toy(None)
        other.backward(1.0)
        other.w.zero_grad()
        other.w.close()
    assert not warned


def test_a_grad_dtype_that_was_asked_for_comes_back():
    for asked in (torch.float32, None):
        p = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        p.grad_dtype = asked
        w = wrap(SGD([p], lr=1.0), None)
        for _ in range(2):
            p.sum().backward()
        w.step()
        w.close()
        assert p.grad_dtype == asked


def test_close_leaves_gradients_that_are_not_ours():
    toy = Toy(None)
    toy.p.grad = torch.ones(1)
    toy.w.close()
    assert toy.p.grad.tolist() == [1.0]


@every_dtype
def test_a_wrapper_is_collected(dtype):
    done = Run(dtype)
    done.window(0)
    window = weakref.ref(done.opt._window)
    flat = weakref.ref(done.opt._window.buffers[0].flat)
    let_go(done.opt)
    with recorded() as warned:
        done.opt = None
        gc.collect()
    assert window() is None
    assert flat() is None
    assert not warned
