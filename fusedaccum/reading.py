"""What a window tells of itself. Reading it waits for the device where folds were captured or skipped there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fusedaccum.ops import TOUCHED

if TYPE_CHECKING:
    from fusedaccum.window import Window


class Reading:
    """The part of `Window` that is only read."""

    @property
    def is_open(self: Window) -> bool:
        """Whether the window holds anything that would be lost with it."""
        return bool(self.micro_batches or self.begun)

    @property
    def may_close(self: Window) -> bool:
        """Whether there is something to close: nobody has called `reset` since that began."""
        return bool(self.pending or self.reduced or self.graphs.captured)

    @property
    def full(self: Window) -> bool:
        return self.pending >= self.length

    @property
    def micro_batches(self: Window) -> int:
        """What the open window holds. Reading it waits for the device where folds were captured in a CUDA graph."""
        self.graphs.leave(self)
        return self.pending - self.graphs.in_capture + self.graphs.replayed_folds()

    @property
    def counted_items(self: Window) -> float | Tensor:
        """The items that the window counts: those of all ranks once it was reduced."""
        return self.items if self.reduced is None else self.reduced.items

    @property
    def only_device_knows(self: Window) -> bool:
        """Whether only the device knows if anything is left of the gradients of this window."""
        return self.nonfinite.counts or isinstance(self.counted_items, Tensor)

    def left_any_out(self: Window) -> bool:
        """Whether gradients of this window were left out, as far as it matters where none are left. May wait."""
        held = [(b.marks & TOUCHED).bool() & ~b.live.cpu().bool() for b in self.buffers if b.live is not None]
        return self.dropped or any(bool(left_out.any()) for left_out in held)

    @property
    def updates(self: Window) -> int:
        return self.counts.updates + self.graphs.counted_updates()

    @property
    def skipped_micro_batches(self: Window) -> int:
        self._skipped_micro_batches += self.nonfinite.read_skipped()
        return self._skipped_micro_batches

    @property
    def grad_norm(self: Window) -> float | None:
        return None if self.norm is None else float(self.norm)

    @property
    def will_update(self: Window) -> bool:
        self.graphs.leave(self)
        return self.pending + 1 >= self.length_now()
