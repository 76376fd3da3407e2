"""Calls that a window refuses in the state it is in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedaccum.flat_buffer import FlatBuffer
from fusedaccum.notices import warn_local_window
from fusedaccum.options import NAME

if TYPE_CHECKING:
    from fusedaccum.window import Window


class Checks:
    """The part of `Window` that raises."""

    def check_open(self: Window) -> None:
        """Refuse to go on after `close()`."""
        if self.closed:
            raise RuntimeError(f"{NAME}: close() was called; wrap the optimizer again to go on accumulating")

    def check_owns_boundary(self: Window, call: str, instead: str) -> None:
        """Refuse a call that is about windows where the caller of `step()` owns them."""
        if self.live is not None:
            raise RuntimeError(
                f"{NAME}: {call} has no meaning with steps=None: {instead}; leave it out, or use steps=N"
            )

    def check_usable(self: Window) -> None:
        """`check_open` and `check_sound`."""
        self.check_open()
        self.check_sound()

    def check_sound(self: Window) -> None:
        """Refuse to go on with a window that an interrupt has left half-way."""
        if self.midway:
            raise RuntimeError(
                f"{NAME}: an earlier step() or flush() was interrupted half-way, and the window does not hold what it "
                "counts; reset() drops it (the parameters may hold its update), load_state_dict() after that goes back "
                "to a saved state"
            )
        if self.in_backward is not None:
            self.in_backward.check_ended()

    def check_takes_more(self: Window) -> None:
        """Refuse another micro-batch in a window that ranks have reduced, or are reducing."""
        if self.overlap is not None:
            raise RuntimeError(
                f"{NAME}: micro_batch(last=True) has announced the last micro-batch of this window, whose sums are on "
                "their way to the other ranks; flush() ends the window"
            )
        if self.reduced is not None:
            others = "for which the others are waiting" if self.zero1 else "which no other rank takes part in"
            raise RuntimeError(
                f"{NAME}: this window was reduced over ranks, and its end did not succeed; flush() ends it, {others}, "
                "or reset() drops it"
            )

    def check_readable(self: Window) -> None:
        """`check_sound` and `check_shown`."""
        self.check_sound()
        self.check_shown()

    def check_shown(self: Window) -> None:
        """Refuse to look at sums some of which are of this rank and some of all."""
        if self.zero1 is not None and self.reduced is not None:
            raise RuntimeError(
                f"{NAME}: the window is being closed, as in a step pre-hook, when with shard='zero1' a rank holds the "
                "sums of its own share alone; look at them, or save them, before the window's last step(); grad_norm "
                "is their norm afterwards"
            )
        if self.overlap is not None:
            raise RuntimeError(
                f"{NAME}: the window's sums are on their way to the other ranks, since micro_batch(last=True); look at "
                "them, or save them, after step()"
            )

    def check_may_move(self: Window, buffers: list[FlatBuffer]) -> list[FlatBuffer]:
        """`buffers`, which are to take the place of those that are there; refused while ranks hold shares of them."""
        if self.zero1 is not None and self.reduced is not None and buffers != self.buffers:
            raise RuntimeError(
                f"{NAME}: parameters were added, moved or unfrozen while the window is being closed, when with "
                "shard='zero1' a rank holds the sums of its own share alone; do it between windows. reset() on every "
                "rank drops this one"
            )
        return buffers

    def check_may_be_saved(self: Window) -> None:
        """Refuse to save sums that are on their way to other ranks, and warn of such that only this rank has."""
        self.check_readable()
        if self.is_of_one_rank:
            warn_local_window(self)

    @property
    def is_of_one_rank(self: Window) -> bool:
        """Whether the open window is what this rank alone has summed up, of several."""
        return self.ranks is not None and self.ranks.size > 1 and self.is_open and not self.consolidated
