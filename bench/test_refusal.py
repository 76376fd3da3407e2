"""A contender that does less work, or other work, than it was asked to is not timed."""

from __future__ import annotations

import gc

import pytest
import torch

from bench import kernels, truth, window
from bench.cases import KINDS, Case
from bench.memory import peak_allocated
from bench.sections import build_and_check

SHAPES = [(3, 50), (1_025,), (64,)]


class ForgetsToZero(window.ForeachSums):
    def zero(self):
        pass


class ForgetsToClip(window.ForeachSums):
    def close(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_, **__: None)
            super().close()


class ForgetsWeightDecay(window.ForeachSums):
    def make_optimizer(self):
        optimizer = super().make_optimizer()
        optimizer.param_groups[0]["weight_decay"] = 0.0
        return optimizer


class ForgetsATensor(window.ForeachSums):
    def collect(self):
        grads = super().collect()
        return [*grads[:-1], torch.zeros_like(grads[-1])]


class ForgetsToCopyBack(window.ForeachSums):
    def close(self):
        before = [param.detach().clone() for param in self.params]
        super().close()
        with torch.no_grad():
            torch._foreach_copy_(self.params, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "saboteur", [ForgetsToZero, ForgetsToClip, ForgetsWeightDecay, ForgetsATensor, ForgetsToCopyBack]
)
def test_a_contender_that_skips_work_is_refused(saboteur, kind):
    with pytest.raises(RuntimeError, match="not timed"):
        build_and_check(Case(SHAPES, KINDS[kind], "refusal"), [saboteur])


@pytest.mark.parametrize("kind", KINDS)
def test_all_contenders_agree_with_float64(kind):
    rivals, _ = window.contenders(kind, len(SHAPES), compiled=False)
    contenders, errors, _ = build_and_check(Case(SHAPES, KINDS[kind], "agreement"), [window.Ours, *rivals])
    assert {contender.name for contender in contenders} == set(errors)
    assert all(error.outside == 0 for name, error in errors.items() if name != window.StockSums.name)


@pytest.mark.parametrize("stage", kernels.STAGES)
def test_a_fold_that_scales_wrongly_is_refused(stage):
    case = Case(SHAPES, KINDS["masters"], "refusal")
    folds = kernels.folds(case, stage)
    shifted = [grad * 1.01 for grad in case.gradients[0]]
    with pytest.raises(RuntimeError, match="not timed"):
        kernels.check_fold(stage, shifted, folds)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_lost_its_weight_decay_is_refused(kind, monkeypatch):
    case = Case(SHAPES, KINDS[kind], "refusal")
    kernels.steps(case)
    monkeypatch.setattr(window, "WEIGHT_DECAY", 0.0)
    lossy = kernels.rival_step(case, kernels.State.of(case))
    with pytest.raises(RuntimeError, match="not timed"):
        kernels.check_step(case, [lossy])


def test_float64_windows_have_different_sums():
    for count in (2, 8):
        case = Case(SHAPES, KINDS["bf16"], "sums")
        case.gradients = case.gradients[:count]
        assert not torch.allclose(truth.mean_gradients(case, 0, 0), truth.mean_gradients(case, 0, 1), atol=0.01)


def test_peak_memory_counts_temporaries_inside_an_operator():
    total, grad = torch.zeros(1 << 16), torch.ones(1 << 16, dtype=torch.bfloat16)
    assert peak_allocated(lambda: total.add_(grad)) == 4 * (1 << 16)  # the FP32 copy of the gradient
    assert peak_allocated(lambda: total.mul_(total)) == 0


def test_peak_memory_leaves_out_what_was_garbage_before():
    class Cycle:
        def __init__(self):
            self.itself, self.tensor = self, torch.zeros(1 << 16)

    def work():
        gc.collect()
        return torch.zeros(1 << 15)

    gc.disable()  # the cycle is to live until somebody collects it
    try:
        assert peak_allocated(Cycle) == 4 * (1 << 16)
        assert peak_allocated(work) == 4 * (1 << 15)
    finally:
        gc.enable()
