"""Mistakes that the machine must find in what is folded in a backward."""

from __future__ import annotations

from stateful_drawn import BYTE
from stateful_mistakes import before, mistake, mistake_where
from stateful_mistakes_inputs import MISTAKES

from fusedaccum import checkpoint
from fusedaccum.flat_buffer import FlatBuffer
from fusedaccum.in_backward import InBackward
from fusedaccum.micro import Micro
from fusedaccum.ops import FRESH
from fusedaccum.passes import Passes, _End
from fusedaccum.window import Window

__all__ = ["MISTAKES"]

in_backward = mistake_where(bucket=272 * BYTE, scaling=None)


@mistake
def a_bucket_entry_is_folded_twice(monkeypatch):
    def fold(folder, window):
        again = [(p, slot, slot.grad) for p, slot in folder._bucket[:1]]
        was(folder, window)
        for p, slot, grad in again:
            slot.grad = grad
            folder._bucket.append((p, slot))
        was(folder, window)

    was = InBackward._fold
    monkeypatch.setattr(InBackward, "_fold", fold)


@mistake
def a_gradient_is_left_behind_at_the_end_of_a_backward(monkeypatch):
    def end(folder, window):
        behind = folder._bucket[-1:]
        del folder._bucket[-1:]
        was(folder, window)
        folder._bucket += behind

    was = InBackward._end
    monkeypatch.setattr(InBackward, "_end", end)


@in_backward
def a_backward_that_failed_is_not_noticed(monkeypatch):
    def deleted(end):
        end.passes.close(end.token, failed=False)

    monkeypatch.setattr(_End, "__del__", deleted)


@in_backward
def half_a_backward_is_taken_for_none(monkeypatch):
    before(monkeypatch, InBackward, "_fail", lambda folder, window: setattr(folder, "_folded", False))


@in_backward
def gradients_of_a_backward_that_failed_are_dropped(monkeypatch):
    before(monkeypatch, InBackward, "_fail", lambda folder, window: folder._bucket.clear())


@in_backward
def a_failure_outlives_reset(monkeypatch):
    def forget(passes):
        failed = passes.failed
        was(passes)
        passes.failed = failed

    was = Passes.forget
    monkeypatch.setattr(Passes, "forget", forget)


@mistake
def a_save_forgets_what_has_begun(monkeypatch):
    was = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda window: was(window) | {"begun": ()})


@mistake_where(bucket=BYTE, scaling=None, reduction="mean", precision=("fused", None))
def a_save_forgets_the_count_of_what_has_begun(monkeypatch):
    monkeypatch.setattr(Micro, "as_saved", lambda micro: (micro.scale, None, micro.weighted))


@in_backward
def a_norm_is_stale_after_a_second_backward(monkeypatch):
    """What the first one left is taken for the sum's."""

    def fold(buffer, grads, scale, norm, part=None):
        if part is None:
            was(buffer, grads, scale, norm)
            return
        fresh = buffer.marks & FRESH
        was(buffer, grads, scale, norm and not bool(fresh[part.first : part.last].any()), part)
        buffer.marks.bitwise_or_(fresh)

    was = FlatBuffer.fold
    monkeypatch.setattr(FlatBuffer, "fold", fold)


@in_backward
def a_micro_batch_takes_the_scale_of_the_last_one(monkeypatch):
    """The count that was announced is forgotten by the gradients."""

    def begin(folder, window, p):
        begun = window.begun
        known = was(folder, window, p)
        if begun is None and window.begun is not None:
            last = folder.__dict__.setdefault("_last_scale", window.begun.scale)
            folder._last_scale = window.begun.scale
            object.__setattr__(window.begun, "scale", last)
        return known

    was = InBackward._begin
    monkeypatch.setattr(InBackward, "_begin", begin)


@in_backward
def a_count_that_comes_late_divides_twice(monkeypatch):
    def settled(micro, window, mean_of, sum_of):
        done = was(micro, window, mean_of, sum_of)
        if sum_of is not None and not micro.weighted:
            window.rescale(0.5)
        return done

    was = Micro.settled
    monkeypatch.setattr(Micro, "settled", settled)


@in_backward
def flush_forgets_a_backward_without_step(monkeypatch):
    before(monkeypatch, Window, "nothing_to_flush", lambda window: setattr(window, "begun", None))
