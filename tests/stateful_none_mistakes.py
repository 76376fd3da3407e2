"""Mistakes that the machine for steps=None must find, each planted into the package by a few changed lines."""

from __future__ import annotations

import torch
from stateful_mistakes import after, before

from fusedaccum import live_grads
from fusedaccum.boundary import Boundary
from fusedaccum.flat_buffer import FlatBuffer
from fusedaccum.live_grads import LiveGrads, Place
from fusedaccum.ops import FRESH, TOUCHED
from fusedaccum.optimizer import FusedAccumOptimizer
from fusedaccum.wrapped_update import WrappedUpdate

MISTAKES = {}


def mistake(plant):
    """Register `plant`, which is called with a MonkeyPatch."""
    MISTAKES[plant.__name__] = plant, {}
    return plant


def mistake_in_16_bits(plant):
    """To be looked for where parameters have 16 bits."""
    MISTAKES[plant.__name__] = plant, {"precision": ("fused", "plain"), "policy": "skip_window"}
    return plant


# What p.grad says


@mistake
def a_sum_that_was_given_up_is_added_to(monkeypatch):
    def mark(live, window, p):
        live._away.add(p)

    before(monkeypatch, LiveGrads, "_fold", mark)


@mistake
def every_backward_begins_anew(monkeypatch):
    before(monkeypatch, LiveGrads, "_fold", lambda live, window, p: live._away.discard(p))


@mistake
def a_view_is_not_put_back_where_no_gradient_comes(monkeypatch):
    monkeypatch.setattr(LiveGrads, "put_back", lambda live: live._away.clear())


@mistake
def a_view_is_put_back_by_step_only(monkeypatch):
    monkeypatch.setattr(LiveGrads, "_end", lambda live: None)


@mistake
def a_view_that_was_taken_away_counts_as_given_up(monkeypatch):
    def forget(live):
        for p in live._away:
            p.grad = None
        live._away.clear()

    monkeypatch.setattr(LiveGrads, "_end", forget)


@mistake
def gradients_of_others_are_not_used(monkeypatch):
    monkeypatch.setattr(LiveGrads, "_others", lambda live, window, buffer: [None] * len(buffer.params))


@mistake
def gradients_of_others_are_added_to_the_sum_that_was_there(monkeypatch):
    def fold(buffer, grads, scale, norm, part=None):
        if part is None:
            for k, grad in enumerate(grads):
                if grad is not None:
                    buffer.marks[k] = TOUCHED
        return was(buffer, grads, scale, norm, part)

    was = FlatBuffer.fold
    monkeypatch.setattr(FlatBuffer, "fold", fold)


@mistake
def a_gradient_that_was_replaced_is_taken_for_the_view(monkeypatch):
    monkeypatch.setattr(Place, "is_view", lambda place, grad: grad is place.view)


@mistake
def marks_outlive_what_they_speak_of(monkeypatch):
    def collect(live, window):
        marks = [buffer.marks.clone() for buffer in window.buffers]
        was(live, window)
        for buffer, old in zip(window.buffers, marks, strict=True):
            buffer.marks |= old & TOUCHED
            buffer.touched = bool(buffer.marks.any())

    was = LiveGrads.collect
    monkeypatch.setattr(LiveGrads, "collect", collect)


@mistake
def what_step_has_used_is_not_there_any_more(monkeypatch):
    """As with the views of a window with steps=N, which are zeroed."""

    def zero(wrapper):
        for buffer in wrapper._window.buffers if wrapper._window.live is not None else ():
            buffer.flat.zero_()

    after(monkeypatch, FusedAccumOptimizer, "_close_window", zero)


@mistake
def the_norm_is_that_of_the_last_fold(monkeypatch):
    def collect(live, window):
        was(live, window)
        for buffer in window.buffers:
            buffer.marks[buffer.marks > 0] |= FRESH

    was = LiveGrads.collect
    monkeypatch.setattr(LiveGrads, "collect", collect)


@mistake
def who_keeps_a_gradient_sees_the_next_one(monkeypatch):
    monkeypatch.setattr(Place, "give_away", lambda place: None)


# How it is added up


@mistake
def sums_are_rounded_to_the_parameters_dtype(monkeypatch):
    def fold(live, window, p):
        was(live, window, p)
        p.grad.copy_(p.grad.to(p.dtype))

    was = LiveGrads._fold
    monkeypatch.setattr(LiveGrads, "_fold", fold)


@mistake_in_16_bits
def a_gradient_that_was_set_by_hand_is_added_to_in_16_bits(monkeypatch):
    def first(live, key, window):
        p = live._hooks.param(key)
        if p is not None and not live._is_ours(p):
            return
        was(live, key, window)

    was = LiveGrads.before
    monkeypatch.setattr(LiveGrads, "before", first)


@mistake
def a_backward_is_scaled_as_a_window_of_two(monkeypatch):
    def fold(buffer, grads, scale, norm, part=None):
        return was(buffer, grads, scale if part is None else 0.5, norm, part)

    was = FlatBuffer.fold
    monkeypatch.setattr(FlatBuffer, "fold", fold)


# Buffers and steps


@mistake
def sums_stay_behind_where_buffers_are_built_anew(monkeypatch):
    def carry(live, p, sum_, new):
        was(live, p, torch.zeros_like(sum_), new)

    was = LiveGrads._carry
    monkeypatch.setattr(LiveGrads, "_carry", carry)


@mistake
def a_gradient_stays_behind_where_its_parameter_leaves(monkeypatch):
    def carry(live, p, sum_, new):
        if new is None:
            p.grad = None
        else:
            was(live, p, sum_, new)

    was = LiveGrads._carry
    monkeypatch.setattr(LiveGrads, "_carry", carry)


@mistake
def what_hooks_drop_is_used(monkeypatch):
    """The look at p.grad before the hooks is the last one."""

    def collect(live, window):
        if not window.boundary.divided_already:
            was(live, window)

    was = LiveGrads.collect
    monkeypatch.setattr(LiveGrads, "collect", collect)
    flag = {"inside": False}

    def run_hooks(boundary, window, hooks, touched):
        result = hooks_were(boundary, window, hooks, touched)
        flag["inside"] = True
        return result

    def close(boundary, *given):
        flag["inside"] = False
        return close_was(boundary, *given)

    hooks_were, close_was = Boundary._run_pre_hooks, Boundary.close
    monkeypatch.setattr(Boundary, "_run_pre_hooks", run_hooks)
    monkeypatch.setattr(Boundary, "close", close)
    monkeypatch.setattr(Boundary, "divided_already", property(lambda boundary: flag["inside"]), raising=False)


@mistake
def the_wrapped_update_gives_the_gradient_to_the_optimizer_for_good(monkeypatch):
    def apply(update, buffers):
        was(update, buffers)
        for buffer in buffers if update.live else ():
            for p in buffer.params:
                p.grad = None

    was = WrappedUpdate.apply
    monkeypatch.setattr(WrappedUpdate, "apply", apply)


@mistake
def frozen_parameters_are_not_updated(monkeypatch):
    def collect(live, window):
        was(live, window)
        for buffer in window.buffers:
            for k, p in enumerate(buffer.params):
                if not p.requires_grad:
                    buffer.marks[k] = 0
            buffer.touched = bool(buffer.marks.any())

    was = LiveGrads.collect
    monkeypatch.setattr(LiveGrads, "collect", collect)


@mistake
def loading_drops_gradients(monkeypatch):
    def drop(wrapper, state_dict):
        wrapper._window.live.drop(wrapper._window)

    after(monkeypatch, FusedAccumOptimizer, "load_state_dict", drop)


@mistake
def close_leaves_hooks(monkeypatch):
    monkeypatch.setattr(live_grads.ParameterHooks, "remove", lambda hooks: None)


@mistake
def close_leaves_the_dtype_of_gradients(monkeypatch):
    def close(live):
        live._grad_dtypes = {}
        was(live)

    was = LiveGrads.close
    monkeypatch.setattr(LiveGrads, "close", close)


@mistake
def a_window_that_is_not_finite_is_counted(monkeypatch):
    def counted(wrapper):
        counts = wrapper._window.counts
        if torch.is_tensor(counts._last):
            counts._last = torch.zeros_like(counts._last)

    after(monkeypatch, FusedAccumOptimizer, "_close_window", counted)
