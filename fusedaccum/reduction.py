"""The reduction of a window over ranks: once, at its end, after which every rank holds the same sums and counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedaccum import totals as norms
from fusedaccum.collectives import from_bits
from fusedaccum.flat_buffer import FlatBuffer
from fusedaccum.folding import describe
from fusedaccum.headers import CONSOLIDATE, DROPPED, LIVE, MODES, ON_DEVICE, Header, exchange
from fusedaccum.ops import TOUCHED
from fusedaccum.options import NAME, WEIGHTED

if TYPE_CHECKING:
    from fusedaccum.window import Window


@dataclass(frozen=True)
class Totals:
    """A window over all ranks. count: its micro-batches. items: that they count."""

    ranks: int
    count: int
    length: int
    mode: str | None
    items: float | Tensor

    def divisor(self, reduction: str) -> float | Tensor:
        """What the sum over ranks has to be divided by: for the mean of all micro-batches, or for ranks' mean sum."""
        if self.mode == WEIGHTED:
            return self.items
        return self.count / self.length if reduction == "mean" else float(self.ranks)

    def share(self, window: Window) -> float | Tensor:
        """The part of the sums over all ranks that stands for one rank's window, when that is saved by itself."""
        if self.mode != WEIGHTED:
            return window.pending / self.count
        if isinstance(self.items, Tensor):
            return torch.where(self.items == 0, 0.0, window.items / self.items).float()
        return window.items / self.items if self.items else 0.0


def reduce(window: Window, doing: int) -> list[FlatBuffer]:
    """Add up the windows of all ranks, once for each window; returns the buffers that hold something on any of them.

    doing: FULL or FLUSH, the same on every rank: full windows hold equally many micro-batches, flushed ones need not.

    Raises RuntimeError on every rank, before anything is sent, where ranks do not close the same window, and
    FloatingPointError after it under nonfinite="raise".
    """
    if window.reduced is None:
        if window.last and window.overlap is None:  # no gradient has come in that backward
            window.begin_overlap()
        if window.overlap is not None:
            window.overlap.send_rest()
        headers = exchange(window, doing)
        totals = _totals(window, headers)
        window.dropped = any(header.flags & DROPPED for header in headers)
        if totals.count:
            if window.zero1 is not None:
                window.zero1.settle(window)
            _add_up(window, any(header.flags & LIVE for header in headers))
        window.reduced = totals
        window.ranks.windows += 1
    touched = [buffer for buffer in window.buffers if buffer.touched]
    if window.options.nonfinite == "raise":
        _check_finite(window, touched)
    return touched


def _totals(window: Window, headers: list[Header]) -> Totals:
    items: float | Tensor = sum(from_bits(header.items) for header in headers)
    if any(header.flags & ON_DEVICE for header in headers):
        device = window.buffers[0].device if window.buffers else "cpu"
        items = torch.as_tensor(window.items, dtype=torch.float64, device=device).clone().reshape(1)
        window.ranks.total("the sum of item counts", items)
    return Totals(
        ranks=window.ranks.size,
        count=sum(header.pending for header in headers),
        length=max(header.length for header in headers),
        mode=MODES[max(header.mode for header in headers)],
        items=items,
    )


def _add_up(window: Window, live: bool, whole: bool = False) -> None:
    """Every rank's sums become those of all. A segment that any rank has touched is touched everywhere.

    whole: on every rank, also where each needs its share alone.
    """
    if not window.buffers:  # every parameter is frozen, on every rank
        return
    if live:
        window.keep_live()
    marks = torch.cat([buffer.marks & TOUCHED for buffer in window.buffers])
    window.ranks.largest("the exchange of touched segments", marks)
    window.midway = True
    for buffer, here in zip(window.buffers, marks.split([len(b.params) for b in window.buffers]), strict=True):
        if not here.any():
            continue
        if window.overlap is None:
            buffer.zero_untouched()
            if window.zero1 is None or whole:
                window.ranks.add_up("the reduction of a window", buffer.flat)
            else:
                window.zero1.add_up(buffer)
        buffer.marks.copy_(here)
        buffer.touched = True
        if buffer.live is not None:
            window.ranks.largest("the exchange of live segments", buffer.live)
    if window.overlap is not None:
        window.overlap.finish()
        window.overlap = None
    window.midway = False


def _check_finite(window: Window, touched: list[FlatBuffer]) -> None:
    if touched and not bool(norms.total(window, window.owned(touched)).isfinite()):
        names = [describe(window, p) for p in _not_finite(window, touched)]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise FloatingPointError(
            f"{NAME}: gradients must be finite with nonfinite='raise', and the window's sum over {window.ranks.size} "
            f"ranks has infinities or NaNs in {shown}; reset() on every rank drops the window, "
            "nonfinite='skip_window' would have left it out"
        )


def _not_finite(window: Window, touched: list[FlatBuffer]) -> list[Tensor]:
    """Parameters whose sum is not finite, the same on every rank."""
    found = set()
    for buffer in window.owned(touched):
        for k in buffer.touched_segments():
            offset, numel = buffer.segments[k].tolist()
            if not bool(buffer.flat[offset : offset + numel].isfinite().all()):
                found.add(id(buffer.params[k]))
    suspects = [buffer.params[k] for buffer in touched for k in buffer.touched_segments()]
    here = torch.tensor([id(p) in found for p in suspects], dtype=torch.uint8, device="cpu")
    window.ranks.largest("the exchange of what is not finite", here)
    return [p for p, bad in zip(suspects, here.tolist(), strict=True) if bad]


def consolidate(window: Window, to: int | None) -> None:
    """Make every rank's open window the mean over ranks. See `FusedAccumOptimizer.consolidate`."""
    window.locate()
    headers = exchange(window, CONSOLIDATE, to)
    counts = [header.pending for header in headers]
    if len(set(counts)) > 1 or any(header.begun for header in headers):
        raise RuntimeError(
            f"{NAME}: consolidate() needs windows with equally many micro-batches on every rank, each one ended by "
            f"step(); the ranks hold {counts}; flush() first, or call it where they agree"
        )
    if not counts[0]:
        return
    totals = _totals(window, headers)
    window.dropped = any(header.flags & DROPPED for header in headers)
    _add_up(window, any(header.flags & LIVE for header in headers), whole=True)
    window.rescale(1.0 / totals.ranks)
    if totals.mode == WEIGHTED:
        window.items = totals.items / totals.ranks
    window.consolidated = True
