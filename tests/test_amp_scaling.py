"""amp_scaling=True: the scale and the overflow flag of a GradScaler are taken into the fold, and nothing waits."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    LOW_PRECISION,
    Toy,
    bits,
    both_updates,
    every_maker,
    snapshot,
    state_bits,
    tidy,  # noqa: F401
    use_two_buffers,
    wrap,
)

from fusedaccum import FusedAccumOptimizer, GatedScheduler

pytestmark = LOW_PRECISION
INF = float("inf")


def scaler_of(scale):
    return torch.amp.GradScaler("cpu", init_scale=scale)


def scaled_micro(scaler, toy, g, unscale=False, **update):
    scaler.scale((toy.p * torch.as_tensor(g, dtype=toy.p.dtype)).sum()).backward()
    if unscale:
        scaler.unscale_(toy.w)
    scaler.step(toy.w)
    scaler.update(**update)
    toy.w.zero_grad()


def train(toy, gradients, scale=8.0, **options):
    scaler = scaler_of(scale)
    for g in gradients:
        scaled_micro(scaler, toy, g, **options)
    return toy


@both_updates
def test_42_a_float16_parameter(update):
    toy = train(Toy(1, lr=0.1, start=1.0, dtype=torch.float16, amp_scaling=True, update=update), [1])
    assert toy.p.item() == torch.tensor(1 - 0.1).half().item()
    assert round(toy.p.item(), 4) == 0.8999
    assert toy.w.updated


@both_updates
def test_without_it_float16_gradients_cannot_be_unscaled(update):
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        train(Toy(1, dtype=torch.float16, update=update), [1])


@both_updates
@pytest.mark.parametrize("unscale", [False, True])
def test_33_unscaled_in_the_fold(update, unscale):
    toy = train(Toy(2, amp_scaling=True, update=update), [1, 3], unscale=unscale)
    assert (toy.value, toy.w.updates) == (-2, 1)


@both_updates
def test_40_a_scale_that_changes_inside_a_window(update):
    toy, scaler = Toy(2, amp_scaling=True, update=update), scaler_of(8.0)
    scaled_micro(scaler, toy, 1, new_scale=4.0)
    scaled_micro(scaler, toy, 1)
    assert toy.value == -1


@pytest.mark.parametrize("scale", [3.0, 65535.0, 1e-3])
def test_a_scale_that_is_no_power_of_two_is_divided_by_once(scale):
    toy = train(Toy(1, amp_scaling=True), [1], scale)
    factor = torch.tensor(1 / torch.tensor(scale).double().item(), dtype=torch.float32)
    assert toy.value == -(factor * torch.tensor(scale)).item()


@both_updates
def test_an_overflow_is_left_out_of_the_mean(update):
    toy, scaler = Toy(4, amp_scaling=True, update=update), scaler_of(8.0)
    for g in (1, INF, 3, 5):
        scaled_micro(scaler, toy, g)
    assert scaler.get_scale() == 4
    assert toy.value == -3
    assert (toy.w.updates, toy.w.skipped_micro_batches, toy.w.skipped_windows, toy.w.pending) == (1, 1, 0, 0)
    assert toy.w.grad_norm == 3


@both_updates
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_overflow_first_leaves_nothing_behind(update, reduction):
    toy = Toy(2, amp_scaling=True, update=update, reduction=reduction)
    train(toy, [5, 5])
    before = toy.value
    train(toy, [INF, 7])
    assert toy.value == before - 7


@both_updates
@every_maker
def test_a_window_of_overflows_changes_nothing(update, make):
    p = torch.nn.Parameter(torch.ones(3))
    w = wrap(make([p]), 2, amp_scaling=True, update=update)
    schedule = GatedScheduler(torch.optim.lr_scheduler.StepLR(w, 1, gamma=0.5), w)
    scaler = scaler_of(8.0)

    def window(*gradients):
        for g in gradients:
            scaler.scale((p * g).sum()).backward()
            scaler.step(w)
            scaler.update()
        schedule.step()

    window(1, 2)
    before, rate = snapshot(w, norm=False), w.param_groups[0]["lr"]
    window(INF, float("nan"))
    after = snapshot(w, norm=False)
    assert (after["params"], after["state"], w.param_groups[0]["lr"]) == (before["params"], before["state"], rate)
    assert (w.updated, w.updates, w.skipped_windows, w.skipped_micro_batches) == (False, 1, 1, 2)
    window(1, 2)
    assert (w.updated, w.updates) == (True, 2)
    assert torch.isfinite(p).all()
    assert w.param_groups[0]["lr"] == rate / 2


def test_a_wrapped_optimizer_is_not_called_for_a_window_of_overflows():
    called = []
    toy = Toy(2, amp_scaling=True, update="wrapped", make=AdamW)
    toy.w.register_step_post_hook(lambda *_: called.append("hook"))
    toy.inner.register_step_post_hook(lambda *_: called.append("step"))
    train(toy, [INF, INF])
    assert called == []
    assert not toy.inner.state


@both_updates
@pytest.mark.parametrize("as_tensor", [False, True])
def test_item_counts_of_what_overflowed_do_not_count(update, as_tensor):
    toy, scaler = Toy(3, amp_scaling=True, update=update), scaler_of(8.0)
    for g, items in ((1, 10), (INF, 1000), (2, 1)):
        toy.w.micro_batch(mean_of=torch.tensor(items) if as_tensor else items)
        scaled_micro(scaler, toy, g)
    assert toy.value == pytest.approx(-12 / 11, rel=2e-7)


@pytest.mark.parametrize("policy", ["propagate", "skip_window", "skip_micro"])
@both_updates
def test_every_policy_leaves_overflows_to_the_scaler(policy, update):
    toy = train(Toy(3, amp_scaling=True, update=update, nonfinite=policy), [1, INF, 3])
    assert (toy.value, toy.w.updates, toy.w.skipped_micro_batches) == (-2, 1, 1)


@both_updates
def test_an_overflow_in_one_of_two_buffers_leaves_out_both(monkeypatch, update):
    use_two_buffers(monkeypatch)
    p, q = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    w, scaler = wrap(SGD([p, q], lr=1.0), 2, amp_scaling=True, update=update), scaler_of(8.0)
    for g, h in ((1, 2), (3, INF)):
        scaler.scale((p * g + q * h).sum()).backward()
        scaler.step(w)
        scaler.update()
    assert (p.item(), q.item()) == (-1, -2)


@both_updates
def test_an_unscaled_loop_needs_no_scaler(update):
    toy = Toy(2, amp_scaling=True, update=update).run([1, 3])
    assert (toy.value, toy.w.updates, toy.w.skipped_micro_batches) == (-2, 1, 0)


@both_updates
@pytest.mark.parametrize("amp_scaling", [False, True])
def test_a_scaler_that_is_switched_off(update, amp_scaling):
    toy, scaler = Toy(2, amp_scaling=amp_scaling, update=update), torch.amp.GradScaler("cpu", enabled=False)
    for g in (1, 3):
        scaled_micro(scaler, toy, g)
    assert toy.value == -2


def test_a_flushed_window_divides_by_what_was_kept():
    toy = train(Toy(8, amp_scaling=True), [1, INF, 5])
    assert toy.w.flush()
    assert toy.value == -3


def test_the_scale_of_one_step_is_forgotten_by_the_next():
    toy = train(Toy(2, amp_scaling=True), [1])
    toy.micro(3)
    assert toy.value == -2


@both_updates
def test_clipping_acts_on_the_unscaled_mean(update):
    toy = Toy(2, n=2, amp_scaling=True, update=update, max_norm=1.0)
    scaler = scaler_of(8.0)
    for g in ((2.0, 0.0), (0.0, 2.0)):
        scaled_micro(scaler, toy, torch.tensor(g))
    assert toy.value == pytest.approx([-0.70711] * 2, abs=1e-5)
    assert toy.w.grad_norm == pytest.approx(2**0.5, rel=1e-6)


@pytest.mark.parametrize("master_weights", [False, True])
def test_float16_as_if_it_had_never_been_scaled(master_weights):
    options = {"make": AdamW, "dtype": torch.float16, "n": 5, "lr": 0.1, "master_weights": master_weights}
    scaled, plain = Toy(2, amp_scaling=True, **options), Toy(2, **options)
    gradients = [torch.tensor([0.5, -2, 3, 1, 0.25]) * k for k in (1, 2, 3, 4)]
    train(scaled, gradients, 1024.0)
    plain.run(gradients)
    assert bits(scaled.p) == bits(plain.p)
    assert state_bits(dict(scaled.inner.state[scaled.p])) == state_bits(dict(plain.inner.state[plain.p]))


@both_updates
def test_9_a_micro_batch_without_any_gradient(update):
    toy, other, scaler = Toy(3, amp_scaling=True, update=update), Toy(1), scaler_of(8.0)
    for g in (1, None, 5):
        if g is not None:
            scaler.scale(toy.p * g).sum().backward()
        scaler.scale(other.p).sum().backward()
        scaler.step(toy.w)
        scaler.step(other.w)  # without any gradient the scaler refuses to update
        scaler.update()
    assert (toy.value, toy.w.updates) == (-2, 1)


DUPLICATES = [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))]


@pytest.mark.parametrize("duplicate", DUPLICATES)
def test_a_copy_still_takes_the_scale(duplicate):
    toy = train(Toy(3, amp_scaling=True), [1, INF])
    twin = duplicate(toy.w)
    (p,) = twin.param_groups[0]["params"]
    scaler = scaler_of(8.0)
    scaler.scale((p * 5).sum()).backward()
    scaler.step(twin)
    assert (p.item(), twin.updates) == (-3, 1)


def test_a_saved_window_knows_what_was_left_out():
    toy = train(Toy(3, amp_scaling=True), [1, INF])
    again = Toy(3, amp_scaling=True)
    again.w.load_state_dict(toy.w.state_dict())
    assert (again.w.pending, again.w.skipped_micro_batches) == (2, 1)
    for t in (toy, again):
        train(t, [5])
        assert t.value == -3


def test_it_is_off_by_default_and_seen_by_frameworks():
    assert not getattr(Toy(2).w, "_step_supports_amp_scaling", False)
    assert Toy(2, amp_scaling=True).w._step_supports_amp_scaling


def test_raise_would_never_raise():
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="nonfinite='raise' with amp_scaling=True"):
        FusedAccumOptimizer(optimizer, 2, amp_scaling=True, nonfinite="raise")
    FusedAccumOptimizer(optimizer, 2, amp_scaling=True)  # nothing was wrapped before


def test_a_refused_gradient_can_be_tried_again():
    toy, scaler = Toy(1, amp_scaling=True), scaler_of(8.0)
    scaler.scale((toy.p * 1).sum()).backward()
    toy.w.micro_batch(mean_of=3)
    with pytest.raises(ValueError, match="in one place"):
        scaler.step(toy.w, sum_of=3)
    scaler.step(toy.w)
    assert toy.value == -1
