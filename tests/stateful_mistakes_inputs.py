"""More mistakes that the machine must find: in what is made of sparse and of scaled gradients, and in rounding."""

from __future__ import annotations

import contextlib

import torch
from stateful_mistakes import MISTAKES, after, mistake, mistake_where

from fusedaccum import FusedAccumOptimizer, amp, flat_buffer
from fusedaccum.flat_buffer import FlatBuffer
from fusedaccum.nonfinite import NonFinite
from fusedaccum.rounding import Rounding
from fusedaccum.update import FusedUpdate

__all__ = ["MISTAKES"]

# Sparse gradients


@mistake
def entries_of_a_sparse_gradient_are_added_up_in_its_dtype(monkeypatch):
    monkeypatch.setattr(flat_buffer, "densified", lambda grad: grad.detach().to_dense())


@mistake
def of_the_entries_of_one_index_the_last_is_taken(monkeypatch):
    def densified(grad):
        dense = torch.zeros(grad.shape)
        dense[grad._indices()[0]] = grad._values().float()
        return dense

    monkeypatch.setattr(flat_buffer, "densified", densified)


@mistake
def a_policy_does_not_look_at_sparse_gradients(monkeypatch):
    def found_inf(buffer, grads):
        return was(buffer, [None if g is not None and g.is_sparse else g for g in grads])

    was = FlatBuffer.found_inf
    monkeypatch.setattr(FlatBuffer, "found_inf", found_inf)


# GradScaler


def _verdict(monkeypatch, change):
    """change: what is made of a wrapper, grad_scale and found_inf."""
    was = amp.verdict

    @contextlib.contextmanager
    def verdict(optimizer, wanted):
        with was(optimizer, wanted) as given:
            yield change(optimizer, *given) if given else given

    monkeypatch.setattr(amp, "verdict", verdict)


@mistake_where(scaling="amp_scaling")
def a_scale_is_not_taken_out(monkeypatch):
    _verdict(monkeypatch, lambda _, scale, found_inf: (None, found_inf))


@mistake_where(scaling="amp_scaling")
def an_overflow_is_folded(monkeypatch):
    _verdict(monkeypatch, lambda _, scale, found_inf: (scale, None))


@mistake_where(scaling="amp_scaling")
def a_scale_holds_for_ever(monkeypatch):
    def first(optimizer, scale, found_inf):
        if scale is not None:
            scale = vars(optimizer).setdefault("_first_scale", scale.clone())
        return scale, found_inf

    _verdict(monkeypatch, first)


@mistake_where(scaling="amp_scaling", policy="propagate", reduction="mean")
def an_overflow_counts_in_the_mean(monkeypatch):
    def count(policy, kept):
        if policy.policy != "skip_micro":
            policy.kept += 1 - kept

    after(monkeypatch, NonFinite, "count", count)


@mistake
def a_scaler_is_told_that_steps_unscale(monkeypatch):
    monkeypatch.setattr(FusedAccumOptimizer, "_step_supports_amp_scaling", True, raising=False)


# Stochastic rounding


def _bits_of_rounded(monkeypatch, change):
    def apply(update, buffers):
        for buffer in buffers:
            for k in buffer.touched_segments() if update.rounding is not None and not buffer.scalars[1] else ():
                change(buffer.params[k].data)

    after(monkeypatch, FusedUpdate, "apply", apply)


@mistake_where(precision=("fused", "stochastic"))
def stochastic_rounding_takes_the_neighbour_after_the_next(monkeypatch):
    def away(values):
        if values.dtype == torch.bfloat16:
            values.view(torch.int16).add_(1)

    _bits_of_rounded(monkeypatch, away)


@mistake_where(precision=("fused", "stochastic"))
def stochastic_rounding_rounds_float32_too(monkeypatch):
    _bits_of_rounded(monkeypatch, lambda values: values.copy_(values.bfloat16()))


@mistake_where(precision=("fused", "stochastic"))
def random_numbers_begin_anew_after_loading(monkeypatch):
    monkeypatch.setattr(Rounding, "load", lambda rounding, saved: None)


@mistake_where(precision=("fused", "stochastic"))
def random_numbers_are_those_of_the_last_update(monkeypatch):
    monkeypatch.setattr(Rounding, "advance", lambda rounding: None)
