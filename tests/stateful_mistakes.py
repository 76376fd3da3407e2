"""Mistakes that the machine must find, each planted into the package by a few changed lines."""

from __future__ import annotations

import copy

from fusedaccum import FusedAccumOptimizer, GatedScheduler, checkpoint, folding, loaded_state, window
from fusedaccum.boundary import Boundary
from fusedaccum.counts import Counts
from fusedaccum.flat_buffer import FlatBuffer
from fusedaccum.length import Length
from fusedaccum.nonfinite import NonFinite
from fusedaccum.ops import FRESH, TOUCHED
from fusedaccum.options import PLAIN
from fusedaccum.update import FusedUpdate, Masters, WrappedUpdate
from fusedaccum.window import Window

MISTAKES = {}


def mistake(plant):
    """Register `plant`, which is called with a MonkeyPatch, to be looked for by the whole machine."""
    MISTAKES[plant.__name__] = plant, {}
    return plant


def mistake_where(**chosen):
    """To be looked for by a machine that is begun with these choices, of which only few beginnings have all."""

    def register(plant):
        MISTAKES[plant.__name__] = plant, chosen
        return plant

    return register


def after(monkeypatch, owner, name, then):
    """owner.name does what it did; then(self, *arguments) is called with the same arguments."""
    was = getattr(owner, name)

    def both(self, *args, **kwargs):
        result = was(self, *args, **kwargs)
        then(self, *args, **kwargs)
        return result

    monkeypatch.setattr(owner, name, both)


def before(monkeypatch, owner, name, first):
    was = getattr(owner, name)

    def both(self, *args, **kwargs):
        first(self, *args, **kwargs)
        return was(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, both)


# First touch and untouched segments


@mistake
def a_first_touch_adds_to_what_an_earlier_window_left(monkeypatch):
    def mark(buffer, grads, scale, norm, part=None):
        for k, g in enumerate(grads, part.first if part else 0):
            if g is not None:
                buffer.marks[k] |= TOUCHED

    before(monkeypatch, FlatBuffer, "fold", mark)


def _all_touched(monkeypatch, name):
    was = getattr(FlatBuffer, name)

    def everywhere(buffer, *args, **kwargs):
        marks = buffer.marks.clone()
        buffer.marks.bitwise_or_(TOUCHED).bitwise_and_(~FRESH & 0xFF)
        result = was(buffer, *args, **kwargs)
        buffer.marks.copy_(marks)
        return result

    monkeypatch.setattr(FlatBuffer, name, everywhere)


@mistake
def the_norm_takes_untouched_segments_along(monkeypatch):
    _all_touched(monkeypatch, "square_total")


@mistake
def untouched_segments_are_updated(monkeypatch):
    for update in (FusedUpdate, WrappedUpdate):
        before(monkeypatch, update, "prepare", lambda update, touched: [b.marks.bitwise_or_(TOUCHED) for b in touched])


@mistake
def the_step_of_an_untouched_parameter_is_counted(monkeypatch):
    _all_touched(monkeypatch, "close_window")


@mistake
def the_norm_is_that_of_the_last_micro_batch_that_left_one(monkeypatch):
    def fresh(buffer):
        buffer.marks[buffer.marks > 0] = TOUCHED | FRESH

    before(monkeypatch, FlatBuffer, "square_total", fresh)


@mistake
def what_a_pre_hook_edits_is_not_in_the_norm(monkeypatch):
    monkeypatch.setattr(FlatBuffer, "stale_norm", lambda buffer: None)


# Divisors


@mistake
def flush_divides_by_steps(monkeypatch):
    def divisor(w):
        return 1.0 if w.mode == PLAIN and w.nonfinite.kept is None else was(w)

    was = Window.divisor
    monkeypatch.setattr(Window, "divisor", divisor)


@mistake
def sum_of_is_read_as_mean_of(monkeypatch):
    was = Window.micro_batch
    monkeypatch.setattr(Window, "micro_batch", lambda w, m, s, *more: was(w, s if m is None else m, None, *more))


@mistake
def item_counts_that_are_tensors_are_read_as_one(monkeypatch):
    was = window.as_float64
    monkeypatch.setattr(window, "as_float64", lambda items, total: was(items * 0 + 1, total))


@mistake
def clipping_sees_the_sum(monkeypatch):
    was = FlatBuffer.close_window

    def close_window(buffer, total, divisor, max_norm, skip_nonfinite=False):
        clip = max_norm / float(divisor) if float(divisor) > 0 else max_norm
        was(buffer, total, divisor, clip, skip_nonfinite)

    monkeypatch.setattr(FlatBuffer, "close_window", close_window)


@mistake
def an_announced_count_holds_for_ever(monkeypatch):
    def keep(opt, *args, **kwargs):
        opt._window.announced = kept = opt._window.__dict__.get("_kept_count") or opt._window.announced
        opt._window._kept_count = kept

    before(monkeypatch, FusedAccumOptimizer, "step", keep)


# Skipping


@mistake
def a_micro_batch_that_was_left_out_is_counted_in_the_divisor(monkeypatch):
    def count_all(policy, kept):
        policy.kept = policy.kept + (1 - kept)

    after(monkeypatch, NonFinite, "count", count_all)


@mistake
def a_skipped_window_is_counted_as_an_update(monkeypatch):
    def skipped(counts):
        counts._updates += 1

    was = Counts.window_closed
    after(monkeypatch, Counts, "window_skipped", skipped)
    monkeypatch.setattr(Counts, "window_closed", lambda counts, skip, **more: was(counts, None, **more))


@mistake
def a_skipped_window_changes_the_momentum(monkeypatch):
    def decay(update, buffers):
        for buffer in buffers:
            if buffer.scalars[1]:
                for state in update.optimizer.state.values():
                    for name in ("momentum_buffer", "exp_avg"):
                        if state.get(name) is not None:
                            state[name].mul_(0.5)

    after(monkeypatch, FusedUpdate, "apply", decay)


@mistake
def raise_counts_the_micro_batch_that_it_refused(monkeypatch):
    was = NonFinite.look

    def look(policy, w, *what):
        try:
            return was(policy, w, *what)
        except FloatingPointError:
            w.pending += 1
            raise

    monkeypatch.setattr(NonFinite, "look", look)


@mistake
def a_policy_looks_at_half_of_the_gradients(monkeypatch):
    was = FlatBuffer.found_inf
    monkeypatch.setattr(FlatBuffer, "found_inf", lambda buffer, grads: was(buffer, [*grads[:-1], None]))


@mistake
def the_norm_of_a_window_without_items_is_an_earlier_one(monkeypatch):
    was = Boundary.close

    def close(boundary, w, *hooks):
        before = w.norm
        was(boundary, w, *hooks)
        if w.norm == 0.0:
            w.norm = before

    monkeypatch.setattr(Boundary, "close", close)


# Saving and loading


@mistake
def loading_forgets_the_sums(monkeypatch):
    monkeypatch.setattr(FlatBuffer, "put", lambda buffer, k, values: None)


@mistake
def loading_forgets_the_counts(monkeypatch):
    monkeypatch.setattr(Window, "set_counts", lambda w, *counts: None)


@mistake
def loading_does_not_rescale_for_other_steps(monkeypatch):
    was = checkpoint._take_counts
    monkeypatch.setattr(
        checkpoint,
        "_take_counts",
        lambda w, saved: was(w, {**saved, "steps": w.coming.of_update(lambda: saved["updates"])}),
    )


@mistake
def loading_shares_the_moments_with_the_dict(monkeypatch):
    monkeypatch.setattr(loaded_state, "make_own", lambda optimizer, state, positions: None)


@mistake
def masters_are_not_saved(monkeypatch):
    monkeypatch.setattr(checkpoint, "_saved_master", lambda w, p: None)


@mistake
def a_copy_forgets_an_announced_count(monkeypatch):
    was = checkpoint.pack
    monkeypatch.setattr(checkpoint, "pack", lambda w: {**was(w), "announced": None})


@mistake
def a_copy_shares_the_window(monkeypatch):
    monkeypatch.setattr(FusedAccumOptimizer, "__deepcopy__", lambda opt, memo: copy.copy(opt), raising=False)


# Calls around the window


@mistake
def zero_grad_drops_the_window(monkeypatch):
    after(monkeypatch, FusedAccumOptimizer, "zero_grad", lambda opt, set_to_none=True: opt.reset())


@mistake
def steps_hold_at_once(monkeypatch):
    was = FusedAccumOptimizer.steps

    def at_once(opt, value):
        was.fset(opt, value)
        opt._window.length = value(opt.updates) if callable(value) else value

    monkeypatch.setattr(FusedAccumOptimizer, "steps", property(was.fget, at_once))


@mistake
def a_function_for_steps_is_given_skipped_windows_too(monkeypatch):
    def length_now(w):
        if w.pending or w.coming.is_fixed:
            return was(w)
        return w.coming.of_update(lambda: w.updates + w.counts.skipped_windows)

    was = Window.length_now
    monkeypatch.setattr(Window, "length_now", length_now)


@mistake
def a_function_for_steps_is_asked_once(monkeypatch):
    was = Length.of_update
    monkeypatch.setattr(Length, "of_update", lambda length, index: was(length, lambda: 0))


@mistake
def a_gated_schedule_counts_calls(monkeypatch):
    monkeypatch.setattr(GatedScheduler, "step", lambda gate: gate.scheduler.step())


@mistake
def gradients_stay_after_step(monkeypatch):
    monkeypatch.setattr(folding, "discard", lambda params: None)


@mistake
def a_flush_uses_gradients_that_wait_for_step(monkeypatch):
    def apply(update, buffers):
        held = [entry for buffer in buffers for entry in update._give_gradients(buffer)]
        update.optimizer.step()
        for param, _ in held:
            param.grad = None

    monkeypatch.setattr(WrappedUpdate, "apply", apply)


@mistake
def sums_are_lost_when_a_group_is_added(monkeypatch):
    monkeypatch.setattr(folding, "carry", lambda old, new: None)


@mistake
def a_master_does_not_see_its_parameter_change(monkeypatch):
    monkeypatch.setattr(Masters, "is_current", lambda masters, k: masters.tensors[k].numel() > 0)
