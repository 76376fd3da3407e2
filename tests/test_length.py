"""`steps` as a function of the update that is to come: when it is asked, what it may say, and what is saved of it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.optim import SGD
from wrapper_helpers import (
    Toy,
    both_updates,
    recorded,
    tidy,  # noqa: F401
    wrap,
)

from fusedaccum import GatedScheduler


class Schedule:
    """1, 2, 3, ... micro-batches; remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, update):
        self.asked.append(update)
        return update + 1


def doubling(update):
    return 2**update


@both_updates
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_windows_grow(update, reduction):
    toy = Toy(doubling, update=update, reduction=reduction)
    ends = []
    for k in range(15):
        toy.micro(k)
        if toy.w.updated:
            ends.append(k)
    means = [0, (1 + 2) / 2, (3 + 4 + 5 + 6) / 4, sum(range(7, 15)) / 8]
    sums = [0, 3, 18, 84]
    assert ends == [0, 2, 6, 14]
    assert toy.value == -sum(means if reduction == "mean" else sums)
    assert (toy.w.updates, toy.w.pending) == (4, 0)


def test_it_is_asked_once_a_window_and_only_when_one_begins():
    schedule = Schedule()
    toy = Toy(schedule)
    assert schedule.asked == []
    for _ in range(6):
        _ = toy.w.will_update
        toy.micro(1)
        _ = toy.w.will_update
    # The last look was for a window that has not begun.
    assert schedule.asked == [0, 1, 2, 3]


def test_will_update():
    toy = Toy(Schedule())
    seen = []
    for _ in range(6):
        seen.append(toy.w.will_update)
        toy.micro(1)
    assert seen == [True, False, True, False, False, True]


@pytest.mark.parametrize("policy", ["skip_window", "skip_micro"])
@both_updates
def test_a_skipped_window_is_asked_again_with_the_same_index(policy, update):
    schedule = Schedule()
    toy = Toy(schedule, update=update, nonfinite=policy)
    for g in (1, float("nan"), float("nan"), 1, 1):
        toy.micro(g)
    # Two of index 1: the second window was skipped.
    assert (schedule.asked, toy.w.updates, toy.w.skipped_windows) == ([0, 1, 1], 2, 1)
    assert toy.value == -2


def test_a_dropped_window_is_asked_again():
    schedule = Schedule()
    toy = Toy(schedule).run([1, 1])
    toy.w.reset()
    toy.run([1, 1])
    assert (schedule.asked, toy.w.updates) == ([0, 1, 1], 2)


def test_a_flushed_window_counts():
    schedule = Schedule()
    toy = Toy(schedule).run([1, 1])
    assert toy.w.flush()
    toy.micro(1)
    assert schedule.asked == [0, 1, 2]


@pytest.mark.parametrize(
    ("answer", "words"),
    [(0, ["0", "at least 1"]), (-2, ["-2"]), (1.5, ["1.5", "float"]), (True, ["True", "bool"]), (None, ["None"])],
)
def test_what_it_may_not_say(answer, words):
    toy = Toy(lambda update: answer if update == 1 else 1).run([1])
    toy.backward(5)
    with pytest.raises((TypeError, ValueError)) as raised:
        toy.w.step()
    assert all(word in str(raised.value) for word in ("steps(1) returned", *words))
    assert (toy.value, toy.w.updates, toy.w.pending, toy.p.grad.item()) == (-1, 1, 0, 5)
    toy.w.steps = 1
    toy.w.step()  # the gradient is still there
    assert toy.value == -6


def test_what_it_raises_comes_through():
    toy = Toy([2, 1].__getitem__).run([1, 1, 1])
    toy.backward(1)
    with pytest.raises(IndexError):
        toy.w.step()
    assert (toy.value, toy.w.updates, toy.w.pending, toy.p.grad.item()) == (-2, 2, 0, 1)


def test_a_finished_schedule_can_be_saved():
    toy = Toy([2, 1].__getitem__).run([1, 1, 1])
    saved = toy.w.state_dict()
    again = Toy([2, 1, 3].__getitem__)
    again.w.load_state_dict(saved)
    again.run([1, 1, 1])
    assert (again.w.updates, again.value) == (3, -1)


def test_numbers_and_functions_can_be_exchanged():
    toy = Toy(2).run([1, 1])
    toy.w.steps = doubling
    assert toy.w.steps is doubling
    toy.run([4, 4])
    assert toy.value == -5
    toy.micro(8)
    toy.w.steps = 1  # from the next window on
    assert not toy.w.will_update
    toy.run([8, 8, 8])
    assert toy.value == -13
    toy.micro(1)
    assert toy.value == -14


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "8", [2]])
def test_20_what_steps_cannot_be(steps):
    with pytest.raises((TypeError, ValueError), match=r"at least 1.*a function"):
        wrap(SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), steps)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_a_copy_goes_on_with_the_schedule(duplicate):
    toy = Toy(doubling).run([1, 2])
    twin = duplicate(toy.w)
    (p,) = twin.param_groups[0]["params"]
    for w, q in ((toy.w, toy.p), (twin, p)):
        for g in (2, 4, 4, 4, 4):
            (q * g).sum().backward()
            w.step()
        assert (w.updates, w.pending, q.item()) == (3, 0, -7)
    twin.close()


def test_a_saved_window_keeps_its_place():
    toy = Toy(doubling).run([1, 2, 2, 8])
    again = Toy(doubling)
    with torch.no_grad():
        again.p.copy_(toy.p)
    with recorded() as caught:
        again.w.load_state_dict(toy.w.state_dict())
    assert not caught
    again.run([0, 0, 0])
    assert (again.w.updates, again.value) == (3, -5)


def test_a_saved_window_of_another_length():
    toy = Toy(doubling).run([1, 2, 2, 8])  # one of the four of update 2
    again = Toy(lambda update: 2)
    with pytest.warns(UserWarning, match="begun with steps=4 and this wrapper has steps=2"):
        again.w.load_state_dict(toy.w.state_dict())
    again.micro(4)
    assert (again.w.updates, again.value) == (3, -6)


def test_a_schedule_that_says_nonsense_loads_nothing():
    toy = Toy(2).run([1])
    again = Toy(lambda update: 0)
    again.p.grad = torch.ones(1)
    with pytest.raises(ValueError, match=r"steps\(0\) returned 0"):
        again.w.load_state_dict(toy.w.state_dict())
    assert (again.w.pending, again.p.grad.item()) == (0, 1)


def test_the_learning_rate_follows_updates():
    toy = Toy(doubling)
    schedule = GatedScheduler(torch.optim.lr_scheduler.StepLR(toy.w, step_size=1, gamma=0.5), toy.w)
    for _ in range(7):
        toy.micro(1)
        schedule.step()
    assert toy.w.param_groups[0]["lr"] == 0.125


def test_repr_says_it():
    assert "steps=<function doubling" in repr(Toy(doubling).w)
