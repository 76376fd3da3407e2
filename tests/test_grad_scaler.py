"""GradScaler in every micro-batch of `steps=N`: scaled gradients are unscaled as they are folded."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    Toy,
    bits,
    tidy,  # noqa: F401
)

from fusedaccum import GatedScheduler


def scaled_micro(scaler, toy, g, unscale=False, new_scale=None):
    scaler.scale((toy.p * g).sum()).backward()
    if unscale:
        scaler.unscale_(toy.w)
    scaler.step(toy.w)
    scaler.update(new_scale)
    toy.w.zero_grad()


def scaler_of(scale):
    return torch.amp.GradScaler("cpu", init_scale=scale)


@pytest.mark.parametrize("unscale", [False, True], ids=["36-implicit", "36-unscale_"])
@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_33_scaler_in_every_micro_batch(update, unscale):
    toy, scaler = Toy(2, update=update), scaler_of(8.0)
    for g in (1, 3):
        scaled_micro(scaler, toy, g, unscale)
    assert (toy.value, toy.w.updates) == (-2.0, 1)


def test_36_unscaled_or_not_gives_the_same_bits():
    results = []
    for unscale in (False, True):
        toy, scaler = Toy(3, n=2, make=AdamW, lr=0.1, max_norm=1.0), scaler_of(8.0)
        for k in range(6):
            scaled_micro(scaler, toy, torch.tensor([0.3 + k, -1.7]), unscale)
        results.append(bits(toy.p))
    assert results[0] == results[1]


@pytest.mark.parametrize("options", [{"fused": True}, {}])
def test_38_an_overflow_never_reaches_the_window(options):
    toy = Toy(2, make=lambda params, lr: AdamW(params, lr=lr, **options), lr=0.5, start=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(toy.w, step_size=1, gamma=0.5)
    gated, scaler = GatedScheduler(schedule, toy.w), scaler_of(8.0)
    before = bits(toy.p)
    for g in (1.0, float("inf")):
        scaled_micro(scaler, toy, g)
        gated.step()
    assert (toy.w.updated, toy.w.updates, toy.w.pending) == (False, 0, 1)
    assert bits(toy.p) == before
    assert toy.w.param_groups[0]["lr"] == 0.5
    assert scaler.get_scale() == 4.0
    scaled_micro(scaler, toy, 1.0)
    gated.step()
    assert (toy.w.updated, toy.w.updates, toy.w.pending) == (True, 1, 0)
    assert toy.w.param_groups[0]["lr"] == 0.25
    assert torch.isfinite(toy.p).all()


def test_40_a_scale_that_changes_inside_a_window():
    toy, scaler = Toy(2), scaler_of(8.0)
    scaled_micro(scaler, toy, 1, new_scale=4.0)
    assert scaler.get_scale() == 4.0
    scaled_micro(scaler, toy, 1)
    assert toy.value == -1.0


def test_weights_said_before_the_backward_reach_the_fold():
    toy, scaler = Toy(2), scaler_of(8.0)
    for g, items in ((1, 10), (2, 1)):
        toy.w.micro_batch(mean_of=items)
        scaled_micro(scaler, toy, g)
    assert toy.value == pytest.approx(-12 / 11, rel=2e-7)


def test_the_weight_of_an_overflowed_micro_batch_is_forgotten():
    toy, scaler = Toy(2), scaler_of(8.0)
    for g, items in ((1, 10), (float("inf"), 1000), (2, 1)):
        toy.w.micro_batch(mean_of=items)
        scaled_micro(scaler, toy, g)
    assert toy.value == pytest.approx(-12 / 11, rel=2e-7)


@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_the_wrapper_does_not_claim_to_unscale(update):
    """AdamW(fused=True) takes the scale by itself; the wrapper around it does not, and GradScaler must see that."""
    toy = Toy(2, make=lambda params, lr: AdamW(params, lr=lr, fused=True), lr=0.1, update=update)
    assert not getattr(toy.w, "_step_supports_amp_scaling", False)
    sgd = Toy(2, make=lambda params, lr: SGD(params, lr=lr, fused=True), update=update)
    scaler = scaler_of(8.0)
    for g in (1, 3):
        scaled_micro(scaler, sgd, g)
    assert sgd.value == -2.0
