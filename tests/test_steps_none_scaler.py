"""steps=None with `torch.amp.GradScaler` at the boundary, and with schedules."""

from __future__ import annotations

import pytest
import torch
from live_runs import Run, assert_same
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from wrapper_helpers import (
    DTYPES,
    LOW_PRECISION,
    Toy,
    both_updates,
    every_maker,
    recorded,
    tidy,  # noqa: F401
)

from fusedaccum import GatedScheduler

pytestmark = LOW_PRECISION
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
unscaled_or_not = pytest.mark.parametrize("unscale", [False, True], ids=["implicit", "unscale_"])


def scaler_of(scale=8.0, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


@both_updates
@every_dtype
@unscaled_or_not
@pytest.mark.parametrize("to_none", [True, False])
def test_33_scaler_at_the_boundary(update, dtype, unscale, to_none):
    """The caller divides the loss. float16 parameters, which torch refuses, have FP32 gradients here."""
    toy, scaler = Toy(None, dtype=dtype, update=update), scaler_of()
    for window in range(2):
        for g in (1, 3):
            scaler.scale((toy.p * g).sum() / 2).backward()
        assert toy.p.grad.dtype == torch.float32
        if unscale:
            scaler.unscale_(toy.w)
            assert toy.p.grad.tolist() == [2.0]
        scaler.step(toy.w)
        scaler.update()
        assert toy.p.grad.tolist() == [2.0]
        assert (toy.value, toy.w.updates) == (-2.0 * (window + 1), window + 1)
        toy.w.zero_grad(set_to_none=to_none)


def scaled_windows(done, scaler, max_norm=None, bad=()):
    """Windows with a scale that grows between them, some of which overflow."""
    for k in range(0, 12, 2):
        for i in (k, k + 1):
            scaler.scale(done.loss(i)).backward()
        if k in bad:
            scaler.scale(done.params[1].sum() * float("inf")).backward()
        if max_norm is not None:
            scaler.unscale_(done.opt)
            done.note(clip_grad_norm_(done.params, max_norm))
        scaler.step(done.opt)
        scaler.update()
        done.note(scaler.get_scale())
        done.opt.zero_grad()


@every_maker
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("bad", [(), (0,), (4, 6), (10,)], ids=str)
def test_scaled_windows_are_those_of_the_bare_optimizer(make, max_norm, bad):
    ours, native = Run(make=make, update="wrapped"), Run(make=make, bare=True)
    for done in (ours, native):
        scaled_windows(done, scaler_of(growth_interval=2), max_norm, bad)
    assert_same(ours, native)
    assert ours.opt.updates == 6 - len(bad)


@every_maker
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_with_a_scaler(make, dtype):
    """Scaled by powers of two: as without a scaler, and an overflow leaves no trace."""
    runs = [Run(dtype, make=make, master_weights=True, state_dtype=torch.float32) for _ in range(2)]
    scaled_windows(runs[0], scaler_of(growth_interval=2), bad=(4,))
    for k in (0, 2, 6, 8, 10):
        runs[1].backward(k, k + 1)
        runs[1].opt.step()
        runs[1].opt.zero_grad()
    for done in runs:
        done.log.clear()
    assert_same(*runs)


@unscaled_or_not
def test_38_an_overflow_never_reaches_the_optimizer(unscale):
    toy, scaler = Toy(None, start=1.0, lr=0.5), scaler_of()
    gated = GatedScheduler(StepLR(toy.w, step_size=1, gamma=0.5), toy.w)
    for g, value, rate, scale in ((float("inf"), 1.0, 0.5, 4.0), (1.0, 0.5, 0.25, 4.0)):
        scaler.scale((toy.p * g).sum()).backward()
        if unscale:
            scaler.unscale_(toy.w)
        scaler.step(toy.w)
        scaler.update()
        gated.step()
        assert (toy.value, toy.w.param_groups[0]["lr"], scaler.get_scale()) == (value, rate, scale)
        toy.w.zero_grad()
    assert toy.w.updates == 1


def test_40_a_scale_that_is_set_between_windows():
    toy, scaler = Toy(None), scaler_of()
    for new_scale in (4.0, 32.0, None):
        for _ in range(2):
            scaler.scale((toy.p * 1.0).sum() / 2).backward()
        scaler.step(toy.w)
        scaler.update(new_scale)
        toy.w.zero_grad()
    assert toy.value == -3.0


def test_the_wrapper_does_not_claim_to_unscale():
    """The wrapped AdamW(fused=True) does; a scaler must not take the wrapper for one that does."""
    toy = Toy(None, make=lambda params, lr: SGD(params, lr=lr, fused=True))
    assert not getattr(toy.w, "_step_supports_amp_scaling", False)
    scaler = scaler_of()
    scaler.scale((toy.p * 2).sum()).backward()
    scaler.step(toy.w)
    assert toy.value == -2.0


def test_a_window_without_gradients_is_refused_by_the_scaler_as_natively():
    toy, scaler = Toy(None), scaler_of()
    scaler.scale(torch.ones(1))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(toy.w)


# Schedules

SCHEDULES = {
    "StepLR": (lambda opt: StepLR(opt, step_size=1, gamma=0.5), ()),
    "CosineAnnealingLR": (lambda opt: CosineAnnealingLR(opt, 10), ()),
    "OneCycleLR": (lambda opt: OneCycleLR(opt, max_lr=0.1, total_steps=20), ()),
    "ReduceLROnPlateau": (lambda opt: ReduceLROnPlateau(opt, patience=0, factor=0.5), (1.0,)),
}


@pytest.mark.parametrize(("build", "metric"), SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("on", ["opt", "inner"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_schedule_is_stepped_once_a_window(build, metric, on, gated):
    """Built on either optimizer, gated or not: as with the bare one, and it warns of nothing."""

    def script(done, wraps=False):
        schedule = build(getattr(done, on))
        if gated and wraps:
            schedule = GatedScheduler(schedule, done.opt)
        for k in range(4):
            done.backward(k)
            done.opt.step()
            schedule.step(*metric)
            done.note(done.opt.param_groups[0]["lr"])
            done.opt.zero_grad()

    ours, native = Run(update="wrapped"), Run(bare=True)
    with recorded() as warned:
        script(ours, wraps=True)
    script(native)
    assert_same(ours, native)
    assert not warned


def test_a_gated_schedule_follows_updates_and_not_calls():
    toy = Toy(None, lr=1.0)
    gated = GatedScheduler(StepLR(toy.inner, step_size=1, gamma=0.5), toy.w)
    for g in (1.0, None, None, 1.0):
        if g is not None:
            toy.backward(g)
        toy.w.step()
        gated.step()
        gated.step()
        toy.w.zero_grad()
    assert (toy.w.param_groups[0]["lr"], toy.w.updates, toy.value) == (0.25, 2, -1.5)
