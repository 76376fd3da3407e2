"""Inputs and their right values, numbered: scale and weights, windows, precision, parameters and hooks."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    Toy,
    bits,
    let_go,
    recorded,
    tidy,  # noqa: F401
    wrap,
)

WEIGHT_KINDS = {
    "number": float,
    "integer": int,
    "tensor": torch.tensor,
    "one element": lambda n: torch.tensor([n]),
    "float tensor": lambda n: torch.tensor(float(n)),
}

# id: (steps, options, gradients, then, value)
TABLE = {
    "1-four": (4, {}, [1, 2, 3, 4], None, -2.5),
    "1-eight": (8, {}, [3] * 8, None, -3.0),
    "1-sum": (4, {"reduction": "sum"}, [1] * 4, None, -4.0),
    "1-not-yet": (4, {}, [1, 2, 3], None, 0.0),
    "5-short-window": (4, {}, [1] * 6, "flush", -2.0),
    "5-short-window-sum": (4, {"reduction": "sum"}, [1] * 6, "flush", -6.0),
    "12-first": (4, {}, [4, 0, 0, 0], None, -1.0),
    "12-last": (4, {}, [0, 0, 0, 4], None, -1.0),
    "19-flush": (4, {}, [1] * 6, "flush", -2.0),
    "19-reset": (4, {}, [1] * 6, "reset", -1.0),
    "19-nothing": (4, {}, [1] * 6 + [3, 3], None, -3.0),
    "56-twice": (2, {}, [1, 3, 1, 3], None, -4.0),
}


@pytest.mark.parametrize("update", ["fused", "wrapped"])
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(("steps", "options", "gradients", "then", "value"), TABLE.values(), ids=TABLE)
def test_value_after(steps, options, gradients, then, value, backend, update):
    toy = Toy(steps, backend=backend, update=update, **options).run(gradients)
    if then:
        getattr(toy.w, then)()
    assert toy.value == value


def test_1_nothing_moves_before_the_boundary():
    toy = Toy(4)
    toy.p.data.fill_(0.1)
    before = bits(toy.p)
    for g in (1, 2, 3):
        toy.micro(g)
        assert bits(toy.p) == before


@pytest.mark.parametrize("said", ["step", "micro_batch"])
@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize("word", ["mean_of", "sum_of"])
def test_2_mean_per_item(word, kind, said):
    toy = Toy(2)
    for g, items in ((1, 10), (2, 1)) if word == "mean_of" else ((10, 10), (2, 1)):
        weight = {word: WEIGHT_KINDS[kind](items)}
        if said == "step":
            toy.micro(g, **weight)
        else:
            toy.w.micro_batch(**weight)
            toy.micro(g)
    assert toy.value == pytest.approx(-12 / 11, rel=2e-7)


def test_2_a_mean_and_a_sum_in_one_window():
    toy = Toy(2)
    toy.micro(1, mean_of=10)
    toy.micro(2, sum_of=1)
    assert toy.value == pytest.approx(-12 / 11, rel=2e-7)


def test_2_the_last_word_before_the_backward_holds():
    toy = Toy(2)
    for g, items in ((1, 10), (2, 1)):
        toy.w.micro_batch(mean_of=99)
        toy.w.micro_batch(mean_of=items)
        toy.micro(g)
    assert toy.value == pytest.approx(-12 / 11, rel=2e-7)


def test_2_a_flushed_weighted_window():
    toy = Toy(8)
    toy.micro(1, mean_of=10)
    toy.micro(2, mean_of=1)
    assert toy.w.flush()
    assert toy.value == pytest.approx(-12 / 11, rel=2e-7)


@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_6_norm_of_the_mean(update):
    toy = Toy(2, n=2, update=update).run([(2, 0), (0, 2)])
    assert float(toy.w.grad_norm) == pytest.approx(math.sqrt(2), rel=1e-6)


@pytest.mark.parametrize("zero", [0, 0.0, "tensor"])
@pytest.mark.parametrize("make", [SGD, AdamW])
@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_8_all_weights_zero(make, zero, update):
    toy = Toy(2, make=make, lr=0.5, update=update, start=1.0)
    before = bits(toy.p)
    for _ in range(2):
        toy.micro(3, mean_of=torch.tensor(0.0) if zero == "tensor" else zero)
    assert bits(toy.p) == before
    assert (toy.w.pending, toy.w.updates, toy.w.updated, toy.w.skipped_windows) == (0, 0, False, 1)
    for value in toy.w.state[toy.p].values():
        assert not value.any()
    toy.run([1, 3])
    assert toy.w.updates == 1
    assert toy.value < 1.0
    if make is SGD:
        assert toy.value == 0.0


@pytest.mark.parametrize("zero", [0, "tensor"])
def test_8_a_weight_of_zero_takes_nothing_from_its_micro_batch(zero):
    toy = Toy(2)
    toy.micro(float("nan"), sum_of=torch.tensor(0) if zero == "tensor" else 0)
    toy.micro(6, sum_of=4)
    assert toy.value == -1.5


@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_9_micro_batch_without_a_backward(update):
    toy = Toy(4, update=update).run([2, 2])
    toy.w.step()
    assert toy.w.pending == 3
    toy.micro(4)
    assert (toy.value, toy.w.pending, toy.w.updates) == (-2.0, 0, 1)


def test_13_the_loss_is_left_alone():
    toy = Toy(4)

    def closure():
        toy.w.zero_grad()
        loss = (toy.p * 3 + 5).sum()
        loss.backward()
        losses.append((loss, loss.item()))
        return loss

    losses = []
    for _ in range(4):
        returned = toy.w.step(closure)
        assert returned is losses[-1][0]
    assert all(loss.item() == seen for loss, seen in losses)
    assert toy.value == -3.0


def test_16_epochs_that_do_not_divide():
    toy = Toy(8).run([1] * 9)
    assert (toy.w.updates, toy.w.pending) == (1, 1)


def test_17_pending():
    assert Toy(4).run([1] * 6).w.pending == 2


def test_18_dropping_an_open_window_warns_once():
    toy = Toy(4).run([1])
    let_go(toy.w)
    with recorded() as caught:
        del toy.w
        gc.collect()
    assert len(caught) == 1, [str(c.message) for c in caught]
    assert "flush" in str(caught[0].message)


def test_18_closing_an_open_window_warns_once():
    toy = Toy(4).run([1])
    let_go(toy.w)
    with recorded() as caught:
        toy.w.close()
        del toy.w
        gc.collect()
    assert len(caught) == 1, [str(c.message) for c in caught]
    assert toy.value == 0.0


@pytest.mark.parametrize("end", ["del", "close"])
def test_18_flush_first_keeps_the_sum_and_says_nothing(end):
    toy = Toy(4).run([3])
    let_go(toy.w)
    with recorded() as caught:
        toy.w.flush()
        if end == "close":
            toy.w.close()
        del toy.w
        gc.collect()
    assert not caught, [str(c.message) for c in caught]
    assert toy.value == -3.0


def test_23_flush_between_windows():
    toy = Toy(8).run([1] * 3)
    toy.w.flush()
    assert toy.run([1] * 8).w.updates == 2


@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_25_updates_counted_by_a_post_hook(update):
    toy = Toy(4, update=update)
    fired = []
    toy.w.register_step_post_hook(lambda *_: fired.append("wrapper"))
    toy.inner.register_step_post_hook(lambda *_: fired.append("inner"))
    toy.run([1] * 17)
    assert (fired.count("wrapper"), fired.count("inner")) == (4, 4)


@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_29_step_count_of_adamw(update):
    toy = Toy(4, make=AdamW, lr=0.1, update=update).run([1] * 8)
    assert toy.w.state[toy.p]["step"].item() == 2


def test_32_param_groups_are_those_of_the_wrapped_optimizer():
    toy = Toy(4)
    assert toy.w.param_groups is toy.inner.param_groups
    toy.w.load_state_dict(toy.w.state_dict())
    assert toy.w.param_groups is toy.inner.param_groups
    assert toy.w.state is toy.inner.state
    toy.w.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert toy.w.param_groups is toy.inner.param_groups
    assert len(toy.inner.param_groups) == 2


@pytest.mark.parametrize("update", ["fused", "wrapped"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_43_clipping_acts_on_the_window(update, reduction):
    toy = Toy(2, n=2, update=update, max_norm=1.0, reduction=reduction).run([(2, 0), (0, 2)])
    assert toy.value == pytest.approx([-math.sqrt(0.5)] * 2, rel=2e-6)
    norm = math.sqrt(2) if reduction == "mean" else 2 * math.sqrt(2)
    assert float(toy.w.grad_norm) == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("word", ["mean_of", "sum_of"])
@pytest.mark.parametrize("zero", [0, torch.tensor(0), torch.tensor([0.0])], ids=["number", "tensor", "float tensor"])
@pytest.mark.parametrize("update", ["fused", "wrapped"])
@pytest.mark.parametrize("first", [True, False])
def test_8_what_only_a_count_of_zero_touched_is_left_alone(zero, update, word, first):
    """A number or a tensor that only the device reads: weight decay and step count see no gradient."""
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    w = wrap(AdamW([p, q], lr=0.1, weight_decay=0.5), 2, update=update)
    micro = [(q, zero), (p, 3)] if first else [(p, 3), (q, zero)]
    for param, count in micro:
        param.grad = torch.ones(3)
        w.step(**{word: count})
    assert q.tolist() == [1, 1, 1]
    assert not any(bool(value.any()) for value in w.state[q].values())
    assert w.state[p]["step"] == 1
    for _ in range(2):  # and no trace of it in the next window
        for param in (p, q):
            param.grad = torch.ones(3)
        w.step(**{word: torch.tensor(2)})
    assert (w.state[p]["step"], w.state[q]["step"]) == (2, 1)


@pytest.mark.parametrize("zero", [0, torch.tensor(0)], ids=["number", "tensor"])
@pytest.mark.parametrize("policy", ["propagate", "skip_window", "skip_micro", "raise"])
@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_8_what_counts_zero_may_hold_anything(zero, policy, update):
    """The mean over 0 items is 0/0: not a number, and nobody's fault."""
    toy = Toy(2, nonfinite=policy, update=update)
    toy.micro(float("nan"), mean_of=zero)
    toy.micro(4, mean_of=3)
    assert (toy.value, toy.w.updates, toy.w.skipped_windows, toy.w.skipped_micro_batches) == (-4, 1, 0, 0)


@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_8_gradients_that_are_not_finite_and_counted_are_still_found(update):
    toy = Toy(2, nonfinite="raise", update=update)
    toy.backward(float("nan"))
    with pytest.raises(FloatingPointError):
        toy.w.step(mean_of=torch.tensor(3))
    toy.w.zero_grad()
    toy.w.reset()
    toy = Toy(2, nonfinite="skip_micro", update=update)
    toy.micro(float("nan"), mean_of=torch.tensor(3))
    toy.micro(4, mean_of=torch.tensor(1))
    assert (toy.value, toy.w.skipped_micro_batches) == (-4, 1)


@pytest.mark.parametrize("how", ["at once", "saved and loaded", "group added"])
@pytest.mark.parametrize("zero", [0, torch.tensor(0)], ids=["number", "tensor"])
@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_8_a_window_of_which_nothing_is_left_is_a_skipped_one(zero, how, update):
    """Its gradients counted 0, and what counted had no gradient."""
    toy = Toy(2, make=AdamW, update=update)
    toy.micro(1, mean_of=zero)
    if how == "saved and loaded":
        toy.w.load_state_dict(copy.deepcopy(toy.w.state_dict()))
    elif how == "group added":
        toy.w.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    toy.w.step(mean_of=torch.tensor(1))
    assert (toy.w.updates, toy.w.skipped_windows, toy.w.pending, toy.value) == (0, 1, 0, 0)
    toy.w.step(mean_of=1)
    toy.w.step(mean_of=1)
    assert (toy.w.updates, toy.w.skipped_windows) == (0, 1)  # one that got no gradient is neither
