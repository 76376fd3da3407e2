"""The boundary: what step hooks may see and edit of a window, its norm, and the update that it ends with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedaccum import capture, folding, headers, reduction, totals
from fusedaccum.flat_buffer import FlatBuffer
from fusedaccum.options import NAME, WEIGHTED

if TYPE_CHECKING:
    from fusedaccum.window import Window


class Boundary:
    """Ends the windows of one wrapper.

    divisor: what the sums, as they stand, have to be divided by. Hooks that look at them find means: they were divided
    then, and it is 1.
    """

    def __init__(self) -> None:
        self.divisor: float | Tensor = 1.0
        self.in_pre_hook = False
        self._counted = False  # in `steps`: the update that is being made
        self._shown = False  # to a pre-hook, which may have edited it
        self._divided_by: float | Tensor | None = None  # by which `show` has divided the sums

    def close(
        self, window: Window, pre_hooks: Callable[[], bool], post_hooks: Callable[[], None], doing: int = headers.FULL
    ) -> None:
        """Update the parameters with what the window holds, and begin the next one.

        doing: what other ranks are told: headers.FULL, or FLUSH for a window that may be short.
        pre_hooks and post_hooks are called around the update, and not at all where no gradient came in the window.
        Where something raises before the update, the window is as it was.
        """
        if self.in_pre_hook:
            raise RuntimeError(
                f"{NAME}: flush() or a full window inside a step pre-hook, which runs because the window is being "
                "closed; leave that call out of the hook"
            )
        touched = _touched(window)
        if window.ranks is not None:
            touched = reduction.reduce(window, doing)
            if not window.reduced.count:  # flush() on every rank, and none had a window to end
                window.reset()
                return
        if _is_empty(window, touched):
            window.norm = 0.0
            window.reset()
            return
        may_skip = window.nonfinite.skips_windows or window.only_device_knows
        if may_skip and window.update.name == "wrapped" and self._is_skipped_now(window, touched):
            return
        try:
            if self._run_pre_hooks(window, pre_hooks, touched):
                if not window.may_close:  # a hook has called reset() or close()
                    return
                touched = _touched(window)
            if not capture.is_capturing():
                window.graphs.prepare(window.buffers, window.optimizer)
            updated = window.owned(touched)
            window.update.prepare(updated)
        except BaseException:
            self._take_back(window)
            raise
        if not touched:  # a hook has taken away what there was to update
            window.norm = 0.0
            window.reset()
            return
        self._counted = False
        try:
            skip = self._set_scalars(window, touched, updated)
            self._counted = True
            window.update.apply(updated)
            if window.zero1 is not None:
                window.zero1.send_parameters(window, touched)
            if on_device := window.graphs.captured > 0:
                window.graphs.count_update(updated[0].scalars)
            window.reset()
            window.counts.window_closed(skip, counted_elsewhere=on_device)
        except BaseException as error:
            window.midway = not self._is_as_it_was(window, updated, error)
            raise
        post_hooks()

    def _is_as_it_was(self, window: Window, updated: list[FlatBuffer], error: BaseException) -> bool:
        """Whether the window can be closed again after `error`: one that was raised before anything was updated.

        What a wrapped optimizer did before it raised is its own affair, as without us.
        """
        known = Exception if window.update.name == "wrapped" else folding.REFUSALS
        if not isinstance(error, known) or (self._counted and not window.update.take_back(updated)):
            return False
        self._take_back(window)
        return True

    def _is_skipped_now(self, window: Window, touched: list[FlatBuffer]) -> bool:
        """Whether a wrapped update is left out, and its window closed: the optimizer is not called, nor any hook."""
        self.divisor = window.divisor()
        self._set_scalars(window, touched, touched)
        skipped = bool(touched[0].scalars[1])
        if skipped:
            window.reset()
            window.counts.window_skipped()
        return skipped

    def _run_pre_hooks(self, window: Window, pre_hooks: Callable[[], bool], touched: list[FlatBuffer]) -> bool:
        """Whether there were any. What they saw of the buffer they may have edited, so its norm is taken again."""
        self.divisor = window.divisor()
        self._shown, self._divided_by = False, None
        try:
            self.in_pre_hook = True
            return pre_hooks()
        finally:
            self.in_pre_hook = False
            if self._shown:
                for buffer in touched:
                    buffer.stale_norm()

    def show(self, window: Window) -> None:
        """Somebody is about to look at the sums: inside a pre-hook they are made means, once."""
        if not self.in_pre_hook:
            return
        self._shown = True
        divisor = self.divisor
        if isinstance(divisor, Tensor):
            empty = divisor == 0
            window.rescale(torch.where(empty, 0.0, 1.0 / divisor))
            self.divisor = torch.where(empty, 0.0, 1.0)
        elif divisor != 1.0:
            window.rescale(1.0 / divisor)
            self.divisor = 1.0
        if self.divisor is not divisor and self._divided_by is None:
            self._divided_by = divisor

    def _take_back(self, window: Window) -> None:
        """Make sums again of what `show` has made means of: the window stays open."""
        if self._divided_by is not None and window.may_close:
            window.rescale(self._divided_by)
        self._divided_by = None

    def undivided(self, window: Window, sums: Tensor) -> Tensor:
        """`sums` as they count in a saved window: in a pre-hook `show` may have divided them already."""
        if self.in_pre_hook and self._shown:
            was = window.divisor()
            return sums * was if isinstance(was, Tensor) or was != 1.0 else sums
        return sums

    def _set_scalars(self, window: Window, touched: list[FlatBuffer], updated: list[FlatBuffer]) -> Tensor | None:
        """Norm, clip factor, divisor and skip on every device; returns the skip flag where the device decides it.

        updated: this rank's shares of `touched`, or those themselves.
        """
        first, skips = updated[0], window.nonfinite.skips_windows
        totals.agree_on_live(touched)
        total = totals.total(window, updated)
        max_norm = math.inf if window.options.max_norm is None else float(window.options.max_norm)
        divisor = self.divisor
        if window.only_device_knows:
            divisor = window.nonfinite.zero_where_nothing_is_live(divisor, touched)
        for buffer in updated:
            buffer.close_window(total.to(buffer.device), divisor, max_norm, skips)
        window.norm = first.scalars[2]
        undecided = isinstance(self.divisor, Tensor) or skips
        on_device = undecided and window.update.name == "fused" and not capture.is_capturing()
        return first.scalars[1].long() if on_device else None


def _touched(window: Window) -> list[FlatBuffer]:
    """The buffers that hold something, after a look at what parameters are now."""
    window.locate()
    folding.follow(window, thorough=True)
    if window.live is not None:
        window.live.collect(window)
    return [buffer for buffer in window.buffers if buffer.touched]


def _is_empty(window: Window, touched: list[FlatBuffer]) -> bool:
    """Whether the host ends this window without an update: it holds no gradient, or items that count 0.

    A count on the device is left to the device, and nothing waits for it here.
    """
    items = window.counted_items
    mode = window.mode if window.reduced is None else window.reduced.mode
    no_items = mode == WEIGHTED and not isinstance(items, Tensor) and items == 0
    if no_items or (window.dropped and not touched):
        window.counts.window_skipped()
    elif not touched:
        window.counts.window_without_sums(items, window.nonfinite.left_any_out(window.pending))
    return no_items or not touched
