"""The reduction of a window over ranks that begins inside its last backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fusedaccum.collectives import Sum
from fusedaccum.flat_buffer import FlatBuffer, Part
from fusedaccum.headers import LAST, exchange
from fusedaccum.options import NAME

if TYPE_CHECKING:
    from fusedaccum.window import Window


class Overlap:
    """Parts of the buffers leave in an order that is the same on every rank, the last parameters first: each as soon as
    it, and all before it, have every gradient.

    Making one is a collective, and raises RuntimeError on every rank where not all do.
    """

    def __init__(self, window: Window, size: int) -> None:
        exchange(window, LAST)
        self.window = window
        self._order = [(b, part) for b in reversed(window.buffers) for part in reversed(b.parts(size))]
        self._missing = {
            part: sum(p.requires_grad for p in buffer.params[part.first : part.last]) for buffer, part in self._order
        }
        self._sums: list[Sum] = []

    @property
    def sent(self) -> int:
        """How many parts have left."""
        return len(self._sums)

    def check(self, part: Part) -> None:
        """Refuse a gradient that comes too late."""
        if any(part is left for _, left in self._order[: len(self._sums)]):
            raise RuntimeError(
                f"{NAME}: a gradient came after its bucket was sent to the other ranks, because a parameter got more "
                "than one in the micro-batch that micro_batch(last=True) announced; leave last=True out for such "
                "models: the window is then reduced in step(). reset() on every rank drops this one"
            )

    def folded(self, part: Part, gradients: int) -> None:
        """So many gradients of a part were folded: send what is complete."""
        self._missing[part] -= gradients
        while len(self._sums) < len(self._order) and self._missing[self._order[len(self._sums)][1]] <= 0:
            self._send()

    def send_rest(self) -> None:
        """The backward is over: send what has not been sent."""
        while len(self._sums) < len(self._order):
            self._send()

    def _send(self) -> None:
        buffer, part = self._order[len(self._sums)]
        if not any(buffer is b for b in self.window.buffers):
            raise RuntimeError(
                f"{NAME}: parameters were added, moved or unfrozen while the window was being reduced; do it between "
                "windows. reset() on every rank drops this one"
            )
        buffer.zero_untouched(part)
        self._sums.append(Sum(self.window.ranks, "the reduction of a window's bucket", _range(buffer, part)))

    def finish(self) -> None:
        """Wait for what was sent."""
        while self._sums:
            self._sums.pop(0).finish()
        self._order.clear()


def _range(buffer: FlatBuffer, part: Part) -> Tensor:
    start = int(buffer.segments[part.first, 0])
    end = int(buffer.segments[part.last, 0]) if part.last < len(buffer.params) else buffer.flat.numel()
    return buffer.flat[start:end]
