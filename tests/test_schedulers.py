"""Schedulers on the wrapper, and on the wrapped optimizer: gated ones advance once per update, without warnings."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch.optim import SGD, AdamW, lr_scheduler
from wrapper_helpers import (
    Toy,
    set_grads,
    tidy,  # noqa: F401
    wrap,
)

from fusedaccum import GatedScheduler

pytestmark = pytest.mark.filterwarnings("error")

UPDATES = 6
SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=UPDATES + 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=3),
}
PLACES = ("on the wrapper", "on the inner before", "on the inner after")


def placed(make, place, steps=4, cls=AdamW, update="auto"):
    """(wrapper, scheduler, parameter), with the scheduler built on one of the two objects."""
    p = torch.nn.Parameter(torch.ones(2))
    inner = cls([p], lr=0.1)
    if place == "on the inner before":
        schedule = make(inner)
        return wrap(inner, steps, update=update), schedule, p
    w = wrap(inner, steps, update=update)
    return w, make(w if place == "on the wrapper" else inner), p


def micro(w, p):
    set_grads([p], [torch.ones(2)])
    w.step()
    w.zero_grad()


def hyper(optimizer):
    group = optimizer.param_groups[0]
    return {key: group[key] for key in ("lr", "betas", "momentum") if key in group}


def bare_run(make, cls=AdamW):
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = cls([p], lr=0.1)
    schedule, seen = make(optimizer), []
    for _ in range(UPDATES):
        set_grads([p], [torch.ones(2)])
        optimizer.step()
        schedule.step()
        seen.append(hyper(optimizer))
    return seen, p


@pytest.mark.parametrize("update", ["fused", "wrapped"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_30_gated_schedules_are_those_of_the_bare_optimizer(make, place, update):
    w, schedule, p = placed(make, place, update=update)
    gated, seen = GatedScheduler(schedule, w), []
    for k in range(4 * UPDATES):
        before = hyper(w)
        micro(w, p)
        gated.step()
        if w.updated:
            seen.append(hyper(w))
        else:
            assert hyper(w) == before, f"the schedule moved at micro-batch {k}"
    expected, q = bare_run(make)
    assert seen == expected
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("place", PLACES)
def test_30_sequential_schedulers(place):
    def make(o):
        parts = [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
        return lr_scheduler.SequentialLR(o, parts, milestones=[2])

    w, schedule, p = placed(make, place)
    gated, seen = GatedScheduler(schedule, w), []
    for _ in range(4 * UPDATES):
        micro(w, p)
        gated.step()
        if w.updated:
            seen.append(hyper(w))
    assert seen == bare_run(make)[0]


@pytest.mark.parametrize("update", ["fused", "wrapped"])
@pytest.mark.parametrize("place", PLACES)
def test_30_a_schedule_stepped_by_hand(place, update):
    w, schedule, p = placed(SCHEDULERS["StepLR"], place, update=update)
    for _ in range(16):
        micro(w, p)
        if w.updated:
            schedule.step()
    assert w.param_groups[0]["lr"] == 0.1 * 0.25


def test_26_step_lr():
    toy = Toy(4)
    gated = GatedScheduler(lr_scheduler.StepLR(toy.w, step_size=1, gamma=0.5), toy.w)
    for _ in range(8):
        toy.micro(1)
        gated.step()
    assert toy.w.param_groups[0]["lr"] == 0.25
    assert gated.get_last_lr() == [0.25]


@pytest.mark.parametrize("place", PLACES)
def test_reduce_lr_on_plateau(place):
    w, schedule, p = placed(lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0), place)
    gated, seen = GatedScheduler(schedule, w), []
    for loss in (5.0, 5.0, 5.0, 4.0, 9.0, 9.0, 9.0, 3.0, 1.0, 1.0, 1.0, 2.0):
        micro(w, p)
        gated.step(loss)
        seen.append(w.param_groups[0]["lr"])
    assert seen == [0.1] * 12
    for _ in range(4):
        micro(w, p)
        gated.step(8.0)
    assert w.param_groups[0]["lr"] == 0.05


def test_a_gated_schedule_advances_once_per_update():
    toy = Toy(2)
    gated = GatedScheduler(lr_scheduler.StepLR(toy.w, step_size=1, gamma=0.5), toy.w)
    toy.run([1, 1])
    for _ in range(5):
        gated.step()
    assert toy.w.param_groups[0]["lr"] == 0.5
    toy.micro(1)
    gated.step()
    toy.w.reset()
    gated.step()
    assert toy.w.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("place", PLACES)
def test_a_gated_schedule_after_flush(place):
    w, schedule, p = placed(SCHEDULERS["StepLR"], place, steps=8)
    gated = GatedScheduler(schedule, w)
    for _ in range(2):
        micro(w, p)
        w.flush()
        gated.step()
        w.flush()
        gated.step()
    assert w.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("place", PLACES)
def test_a_gated_schedule_before_the_first_update(place):
    w, schedule, p = placed(SCHEDULERS["StepLR"], place)
    gated = GatedScheduler(schedule, w)
    gated.step()
    micro(w, p)
    gated.step()
    assert w.param_groups[0]["lr"] == 0.1


def saved_run(updates_before):
    """An optimizer and its gated schedule after some updates and one micro-batch."""
    w, schedule, p = placed(lambda o: lr_scheduler.ExponentialLR(o, 0.5), "on the wrapper", steps=2)
    gated = GatedScheduler(schedule, w)
    for _ in range(2 * updates_before + 1):
        micro(w, p)
        gated.step()
    return w, gated, p


@pytest.mark.parametrize("order", ["optimizer first", "schedule first"])
def test_state_of_a_gated_schedule(order):
    w, gated, p = saved_run(3)
    saved = copy.deepcopy(gated.state_dict()), copy.deepcopy(w.state_dict())
    new_w, new_gated, q = saved_run(0)
    loads = [lambda: new_w.load_state_dict(saved[1]), lambda: new_gated.load_state_dict(saved[0])]
    for load in loads if order == "optimizer first" else reversed(loads):
        load()
    new_gated.step()
    assert new_w.param_groups[0]["lr"] == w.param_groups[0]["lr"] == 0.1 * 0.5**3
    assert new_gated.get_last_lr() == gated.get_last_lr()
    for one, schedule, param in ((w, gated, p), (new_w, new_gated, q)):
        micro(one, param)
        schedule.step()
    assert new_w.param_groups[0]["lr"] == w.param_groups[0]["lr"] == 0.1 * 0.5**4
    assert new_gated.state_dict() == gated.state_dict()


def test_state_of_a_gated_schedule_is_plain(tmp_path):
    _, gated, _ = saved_run(1)
    torch.save(gated.state_dict(), tmp_path / "schedule.pt")
    assert torch.load(tmp_path / "schedule.pt", weights_only=True) == gated.state_dict()


def test_a_gated_schedule_around_a_used_wrapper_starts_at_the_next_update():
    """Updates that happened before the gate existed are not its to count."""
    toy = Toy(2).run([1] * 4)
    gated = GatedScheduler(lr_scheduler.StepLR(toy.w, step_size=1, gamma=0.5), toy.w)
    gated.step()
    assert toy.w.param_groups[0]["lr"] == 1.0
    toy.run([1] * 2)
    gated.step()
    assert toy.w.param_groups[0]["lr"] == 0.5


def test_torch_still_warns_where_a_schedule_is_stepped_first():
    """The wrapper silences nothing: a bare scheduler before any step() warns as with a bare optimizer."""
    p = torch.nn.Parameter(torch.zeros(1))
    w = wrap(SGD([p], lr=1.0), 4)
    schedule = lr_scheduler.StepLR(w, step_size=1)
    with pytest.warns(UserWarning, match="before"):
        schedule.step()


def test_stepping_an_ungated_schedule_every_micro_batch_says_nothing():
    toy = Toy(2)
    schedule = lr_scheduler.StepLR(toy.w, step_size=1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            toy.micro(1)
            schedule.step()
    assert toy.w.param_groups[0]["lr"] == 0.5**4


def test_a_count_of_updates_that_begins_anew():
    """A bare optimizer's dict has no count: the gate follows the new one, and nothing is stepped for the old."""
    toy = Toy(1, lr=1.0)
    gated = GatedScheduler(torch.optim.lr_scheduler.StepLR(toy.w, 1, gamma=0.5), toy.w)
    for _ in range(2):
        toy.micro(1)
        gated.step()
    saved = gated.state_dict()
    again = Toy(1, lr=0.25)
    other = GatedScheduler(torch.optim.lr_scheduler.StepLR(again.w, 1, gamma=0.5), again.w)
    other.load_state_dict(saved)
    other.step()
    assert again.w.param_groups[0]["lr"] == 0.25
    again.micro(1)
    other.step()
    assert again.w.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("done", [1, 3])
def test_an_optimizer_that_goes_back_alone(done):
    """The schedule goes on: every update after the loading is a new one."""
    toy = Toy(1, lr=1.0)
    gated = GatedScheduler(torch.optim.lr_scheduler.StepLR(toy.w, 1, gamma=0.5), toy.w)
    saved = copy.deepcopy(toy.w.state_dict())
    for _ in range(done):
        toy.micro(1)
        gated.step()
    toy.w.load_state_dict(saved)
    for _ in range(2):
        toy.micro(1)
        gated.step()
    assert gated.last_epoch == done + 2


@pytest.mark.parametrize("how", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_follows_the_updates_since_an_optimizer_went_back_alone(how):
    """Loading an older state is no update; the one that comes after it is, on the copy too."""
    p = torch.nn.Parameter(torch.zeros(1))
    w = wrap(SGD([p], lr=1.0), 1)
    gate = GatedScheduler(lr_scheduler.StepLR(w.optimizer, step_size=1, gamma=0.5), w)
    saved = copy.deepcopy(w.state_dict())
    for _ in range(2):
        set_grads([p], [torch.ones(1)])
        w.step()
        gate.step()
    w.load_state_dict(saved)
    set_grads([p], [torch.ones(1)])
    w.step()
    (_, other, other_gate), rate = how((p, w, gate)), w.param_groups[0]["lr"]
    for optimizer, schedule in ((other, other_gate), (w, gate)):
        for _ in range(2):
            schedule.step()
            assert optimizer.param_groups[0]["lr"] == rate / 2
