"""Saving and loading with fold="backward": a micro-batch that a backward has begun and no step() has counted."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from backward_runs import BYTE, give, gradients, held, sgd_pair, start_values
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    LOW_PRECISION,
    MAKERS,
    Toy,
    both_updates,
    let_go,
    recorded,
    refused,
    snapshot,
    tidy,  # noqa: F401
    wrap,
)

pytestmark = LOW_PRECISION
KEY = "fusedaccum"
both_folds = pytest.mark.parametrize("fold", ["backward", "step"])


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def fresh(dtype=torch.float32, steps=4, values=None, make=MAKERS["adamw"], **options):
    params = start_values(dtype)
    if values is not None:
        for p, value in zip(params, values, strict=True):
            p.data.copy_(value)
    return params, wrap(make(params), steps, **options)


COUNTS = {
    "plain": [{}] * 8,
    "mean_of": [{"mean_of": k + 1} for k in range(8)],
    "sum_of": [{"sum_of": k + 1} for k in range(8)],
    "on the device": [{"mean_of": torch.tensor(k + 1.0)} for k in range(8)],
}


@both_folds
@both_updates
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("saved_at", [0, 1, 3, 5])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_saved_between_backward_and_step(counts, saved_at, dtype, update, fold):
    """Two more backwards, or none, and what follows: bit-equal to no stop, whichever way the loading side folds."""
    options = {"update": update, "max_norm": 0.5, "state_dtype": torch.float32 if update == "fused" else None}
    params, w = fresh(dtype, fold="backward", bucket_mb=100 * BYTE, **options)
    for k in range(8):
        w.micro_batch(**counts[k])
        give(params, gradients(k, params))
        if k == saved_at:
            saved = through_a_file(w.state_dict())
            values = [p.detach().clone() for p in params]
            assert saved[KEY]["pending"] == k % 4
            other_params, other = fresh(dtype, fold=fold, values=values, **options)
            other.load_state_dict(saved)
            assert held(other, [p for p in other_params if p.numel()]) == held(w, [p for p in params if p.numel()])
        w.step()
        if k >= saved_at:
            if k > saved_at:
                if fold == "backward":
                    other.micro_batch(**counts[k])
                give(other_params, gradients(k, other_params))
            other.step(**(counts[k] if fold == "step" and k > saved_at else {}))
            assert (other.pending, other.updates) == (w.pending, w.updates)
    assert snapshot(other) == snapshot(w)


@both_folds
def test_more_of_the_same_micro_batch_after_loading(fold):
    """A second backward of it belongs to it, with its scale."""
    (a, b), w = sgd_pair(steps=2)
    w.micro_batch(mean_of=4)
    (a * 5 + b * 7).sum().backward()
    saved = copy.deepcopy(w.state_dict())
    params = [torch.nn.Parameter(p.detach().clone()) for p in (a, b)]
    other = wrap(SGD(params, lr=1.0), 2, fold=fold)
    other.load_state_dict(saved)
    (params[0] * 3).sum().backward()
    other.step()
    assert (held(other, params), other.pending) == ([32.0, 28.0], 1)
    assert other.flush()
    assert [p[0].item() for p in params] == [2.0 - 8.0, 3.0 - 7.0]


@both_folds
@pytest.mark.parametrize("count", [{}, {"sum_of": 5}], ids=str)
def test_flush_after_loading_counts_it(fold, count):
    toy = Toy(4, fold="backward")
    toy.micro(1, **count)
    toy.backward(3)
    other = Toy(4, fold=fold)
    other.w.load_state_dict(copy.deepcopy(toy.w.state_dict()))
    if count:
        other.w.step(sum_of=3)
    assert other.w.flush()
    assert other.value == (-0.5 if count else -2.0)


@both_folds
@pytest.mark.parametrize(("steps", "pending"), [(2, 0), (8, 0), (2, 3), (3, 3), (8, 2)])
def test_other_steps(steps, pending, fold):
    """One warning; the window closes at the new count, or at the next call, with the right mean."""
    toy = Toy(4, fold="backward")
    for k in range(pending):
        toy.micro(k + 1)
    toy.backward(pending + 1)
    saved = copy.deepcopy(toy.w.state_dict())
    other = Toy(steps, fold=fold)
    with pytest.warns(UserWarning, match=rf"steps=4 .*steps={steps}"):
        other.w.load_state_dict(saved)
    assert not other.w.updated
    other.w.step()
    calls = pending + 1
    while not other.w.updates:
        calls += 1
        other.micro(calls)
    assert calls == max(steps, pending + 1)
    assert other.value == pytest.approx(-(calls + 1) / 2, rel=1e-6)


@pytest.mark.parametrize("reductions", [("mean", "sum"), ("sum", "mean")])
@both_folds
def test_another_reduction(fold, reductions):
    toy = Toy(4, fold="backward", reduction=reductions[0])
    toy.micro(1)
    toy.backward(2)
    other = Toy(4, fold=fold, reduction=reductions[1])
    other.w.load_state_dict(copy.deepcopy(toy.w.state_dict()))
    other.w.step()
    other.run([3, 4])
    assert other.value == (-10.0 if reductions[1] == "sum" else -2.5)


def test_what_is_saved_of_it():
    """Nothing where nothing was begun; else what its gradients are scaled by and what it counts."""
    toy = Toy(4, fold="backward")
    assert toy.w.state_dict()[KEY]["begun"] == ()
    toy.backward(1)
    assert toy.w.state_dict()[KEY]["begun"] == (0.25, None, False)
    toy.w.step()
    assert toy.w.state_dict()[KEY]["begun"] == ()
    toy.w.reset()
    toy.w.micro_batch(sum_of=3)
    assert toy.w.state_dict()[KEY]["begun"] == ()
    toy.backward(1)
    assert toy.w.state_dict()[KEY]["begun"] == (1.0, 3.0, True)
    assert Toy(4).w.state_dict()[KEY]["begun"] == ()


def test_what_was_saved_by_an_earlier_release():
    toy = Toy(4, fold="backward")
    toy.micro(2)
    saved = copy.deepcopy(toy.w.state_dict())
    del saved[KEY]["begun"]
    other = Toy(4, fold="backward")
    other.w.load_state_dict(saved)
    other.run([2, 2, 2])
    assert other.value == -2.0


DAMAGED = {
    "no tuple": [0.25, None, False],
    "too short": (0.25, None),
    "too long": (0.25, None, False, 1),
    "text": ("0.25", None, False),
    "no scale": (None, None, False),
    "negative scale": (-0.25, None, False),
    "infinite scale": (float("inf"), None, False),
    "two scales": (torch.ones(2), None, False),
    "items of a plain one": (0.25, 3.0, False),
    "negative items": (1.0, -3.0, True),
    "items that are no number": (1.0, float("nan"), True),
    "no bool": (0.25, None, 0),
}


@both_folds
@pytest.mark.parametrize("begun", DAMAGED.values(), ids=DAMAGED)
def test_damaged(begun, fold):
    toy = Toy(4, fold="backward")
    toy.backward(1)
    saved = copy.deepcopy(toy.w.state_dict())
    saved[KEY]["begun"] = begun
    other = Toy(4, fold=fold)
    other.micro(5)
    with refused(other.w, "begun", "undamaged"):
        other.w.load_state_dict(saved)


@both_folds
@pytest.mark.parametrize("pending", [True, False])
def test_begun_in_a_window_of_another_kind(pending, fold):
    """A window holds plain micro-batches or weighted ones, the one that is begun included."""
    toy = Toy(4, fold="backward")
    if pending:
        toy.micro(1)
    toy.backward(1)
    saved = copy.deepcopy(toy.w.state_dict())
    saved[KEY]["begun"] = (1.0, 3.0, True)
    if pending:
        with refused(Toy(4, fold=fold).w, "plain"):
            Toy(4, fold=fold).w.load_state_dict(saved)
    with refused(other := Toy(4, fold=fold, reduction="sum").w, "reduction='sum'|plain"):
        other.load_state_dict(saved)


def test_sums_without_a_micro_batch():
    toy = Toy(4, fold="backward")
    toy.backward(1)
    saved = copy.deepcopy(toy.w.state_dict())
    saved[KEY]["begun"] = ()
    other = Toy(4, fold="backward")
    with refused(other.w, "some sums"):
        other.w.load_state_dict(saved)


def test_the_live_mode_refuses_it():
    """steps=None holds its sums in p.grad, and saves none."""
    toy = Toy(4, fold="backward")
    toy.backward(1)
    saved = copy.deepcopy(toy.w.state_dict())
    other = Toy(None)
    with pytest.raises(ValueError, match="steps=None"):
        other.w.load_state_dict(saved)


@pytest.mark.parametrize("what", ["itself", "another", "a bare optimizer's"])
def test_loading_over_a_micro_batch_that_is_begun(what):
    """It is gone, with its gradients; what was loaded holds."""
    toy, other = Toy(2, fold="backward"), Toy(2, fold="backward")
    toy.micro(4)
    toy.backward(8)
    other.backward(100)
    saved = {"itself": toy.w, "another": other.w, "a bare optimizer's": toy.inner}[what].state_dict()
    toy.w.load_state_dict(copy.deepcopy(saved))
    assert held(toy.w, [toy.p]) == [{"itself": 6.0, "another": 50.0, "a bare optimizer's": 0.0}[what]]
    assert toy.w.pending == (what == "itself")
    if what != "a bare optimizer's":
        toy.w.step()
    toy.run([2] * {"itself": 0, "another": 1, "a bare optimizer's": 2}[what])
    assert toy.value == {"itself": -6.0, "another": -51.0, "a bare optimizer's": -2.0}[what]


def test_the_dict_is_not_touched_by_what_follows():
    """Loading copies: neither the counts nor the sums of the dict change, nor do they change the window."""
    toy = Toy(2, fold="backward")
    toy.w.micro_batch(mean_of=torch.tensor(2.0))
    toy.backward(3)
    saved = copy.deepcopy(toy.w.state_dict())
    kept = copy.deepcopy(saved)
    other = Toy(2, fold="backward")
    other.w.load_state_dict(saved)
    scale, items, _ = saved[KEY]["begun"]
    for tensor in (scale, items, saved[KEY]["sums"][0]):
        tensor.fill_(99.0)
    other.backward(3)
    other.w.step()
    other.micro(1, sum_of=2)
    assert other.value == -(2 * 6 + 1) / 4
    again = Toy(2, fold="backward")
    again.w.load_state_dict(kept)
    again.w.step()
    again.w.flush()
    assert (again.value, float(kept[KEY]["begun"][0])) == (-3.0, 2.0)


def test_a_window_that_was_saved_needs_no_warning():
    toy = Toy(2, fold="backward")
    toy.backward(1)
    toy.w.state_dict()
    let_go(toy.w)
    with recorded() as caught:
        del toy.w
    assert not caught
    for more in (lambda toy: toy.w.step(), lambda toy: toy.backward(1)):
        toy = Toy(2, fold="backward")
        toy.backward(1)
        toy.w.state_dict()
        more(toy)
        let_go(toy.w)
        with recorded() as caught:
            del toy.w
        assert any("open window" in str(c.message) for c in caught)


def test_masters_and_stochastic_rounding_come_along():
    for options in ({"master_weights": True, "state_dtype": torch.float32}, {"rounding": "stochastic"}):
        params, w = fresh(torch.bfloat16, steps=2, fold="backward", **options)
        for k in range(3):
            give(params, gradients(k, params))
            if k < 2:
                w.step()
        saved, values = through_a_file(w.state_dict()), [p.detach().clone() for p in params]
        others, other = fresh(torch.bfloat16, steps=2, fold="backward", values=values, **options)
        other.load_state_dict(saved)
        for ps, o in ((params, w), (others, other)):
            o.step()
            give(ps, gradients(9, ps))
            o.step()
        assert snapshot(other) == snapshot(w)


def test_state_made_by_torch_distributed_checkpoint():
    """Its step() at rates of 0 and gradients of exact zeros makes the state, and is no micro-batch."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = torch.nn.Linear(3, 1)
    w = wrap(AdamW(model.parameters(), lr=0.1), 2, fold="backward")
    get_optimizer_state_dict(model, w)
    assert (w.pending, w.updates) == (0, 0)
    assert all("exp_avg" in w.state[p] for p in model.parameters())
    before = model.weight.detach().clone()
    for k in range(2):
        model(torch.ones(1, 3)).sum().backward()
        assert model.weight.grad is None
        w.step()
        assert torch.equal(before, model.weight) is (k == 0)
