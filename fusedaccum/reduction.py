"""The reduction of a window over ranks: once, at its end, after which every rank holds the same sums and counts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedaccum import totals as norms
from fusedaccum.collectives import as_bits, from_bits
from fusedaccum.flat_buffer import FlatBuffer, in_memory_order
from fusedaccum.folding import describe
from fusedaccum.ops import TOUCHED
from fusedaccum.options import NAME, PLAIN, WEIGHTED

if TYPE_CHECKING:
    from fusedaccum.window import Window

# What a rank is about to do when it sends its header.
FULL, FLUSH, LAST, CONSOLIDATE = 1, 2, 3, 4
DOING = {
    FULL: "closing a full window in step()",
    FLUSH: "in flush()",
    LAST: "in the backward that micro_batch(last=True) announced",
    CONSOLIDATE: "in consolidate()",
}
MODES = (None, PLAIN, WEIGHTED)


@dataclass(frozen=True)
class Header:
    """What a rank says of its window before sums are sent.

    number: windows that it has reduced before. given_up: those that it has dropped then. values: at the first of them,
    what the bits of all parameters add up to: ranks that begin with other parameters would never agree. length, mode: 0
    where nothing is in the window. items: as `as_bits` has them, those that the host knows.
    """

    doing: int
    number: int
    given_up: int
    layout: int
    values: int
    length: int
    mode: int
    pending: int
    items: int
    items_on_device: int
    live: int
    dropped: int
    begun: int


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
        window.dropped = any(header.dropped for header in headers)
        if totals.count:
            if window.zero1 is not None:
                window.zero1.settle(window)
            _add_up(window, any(header.live for header in headers))
        window.reduced = totals
        window.ranks.windows += 1
    touched = [buffer for buffer in window.buffers if buffer.touched]
    if window.options.nonfinite == "raise":
        _check_finite(window, touched)
    return touched


def exchange(window: Window, doing: int) -> list[Header]:
    """Everybody's header, in order of ranks. Raises RuntimeError on all of them where they do not fit together."""
    on_device = isinstance(window.items, Tensor)
    mine = Header(
        doing=doing,
        number=window.ranks.windows,
        given_up=window.ranks.given_up,
        layout=_layout(window),
        values=0 if window.ranks.windows else _values(window.buffers),
        length=window.length if window.is_open else 0,
        mode=MODES.index(window.mode) if window.pending else 0,
        pending=window.pending,
        items=0 if on_device else as_bits(window.items),
        items_on_device=on_device,
        live=any(buffer.live is not None for buffer in window.buffers),
        dropped=window.dropped,
        begun=window.begun is not None,
    )
    what = f"the exchange of headers at window {mine.number} ({DOING[doing]})"
    headers = [Header(*numbers) for numbers in window.ranks.all_of(what, list(map(int, vars(mine).values())))]
    for name, show in SHOWN.items():
        seen = {getattr(header, name): rank for rank, header in reversed(list(enumerate(headers)))}
        if name in ("length", "mode"):  # of those that hold something
            seen.pop(0, None)
        if len(seen) > 1:
            told = ", ".join(f"rank {rank}: {show(value)}" for value, rank in sorted(seen.items(), key=lambda s: s[1]))
            raise RuntimeError(
                f"{NAME}: the ranks are not at the same point ({told}); every rank has to make the same calls with "
                f"the same options, and nothing was sent. {WAYS_OUT[name]}"
            )
    return headers


SHOWN = {
    "doing": lambda v: DOING[v],
    "layout": lambda v: f"parameters with digest {v & 0xFFFFFFFF:08x}",
    "values": lambda v: f"parameters whose bits add up to {v & 0xFFFFFFFF:08x}",
    "number": lambda v: f"{v} windows closed",
    "given_up": lambda v: f"{v} windows dropped by reset() after their reduction had begun",
    "length": lambda v: f"{v} micro-batches a window",
    "mode": lambda v: f"{MODES[v]} micro-batches",
}
WAYS_OUT = {
    "doing": "A rank that has run out of data calls step() without a gradient as often as the others with one; "
    "flush(), consolidate() and micro_batch(last=True) are called on every rank, or on none",
    "layout": "The optimizers must hold parameters of the same shapes in the same order, frozen alike and in the "
    "same memory format; with "
    "shard='zero1' a state is loaded on every rank, or on none",
    "values": "Begin with equal parameters: load the same file on every rank, or send those of one by "
    "torch.distributed.broadcast",
    "number": "Wrap the optimizer at the same time on every rank",
    "given_up": "One that others may have updated with is dropped on every rank, or ended by flush(); load a saved "
    "state on all of them, or wrap the optimizer again with equal parameters",
    "length": "Give every rank the same `steps`",
    "mode": "Give item counts (mean_of or sum_of) on every rank, or on none",
}


def _layout(window: Window) -> int:
    """A digest of what the buffers hold, and of the shares of it."""
    digests = b"".join(buffer.digest for buffer in window.buffers)
    if window.zero1 is not None:
        digests += window.zero1.digest(window)
    return int.from_bytes(hashlib.sha256(digests).digest()[:8], "little", signed=True)


def _values(buffers: list[FlatBuffer]) -> int:
    """What the bits of all parameters add up to, modulo 2^64. Waits for the device."""
    total = 0
    for buffer in buffers:
        for p, stride in zip(buffer.params, buffer.strides, strict=True):
            bits = in_memory_order(p, stride)
            total += int(bits.view(torch.int32 if bits.dtype == torch.float32 else torch.int16).sum(dtype=torch.int64))
    return (total + 2**63) % 2**64 - 2**63


def _totals(window: Window, headers: list[Header]) -> Totals:
    items: float | Tensor = sum(from_bits(header.items) for header in headers)
    if any(header.items_on_device for header in headers):
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


def consolidate(window: Window) -> None:
    """Make every rank's open window the mean over ranks. See `FusedAccumOptimizer.consolidate`."""
    window.locate()
    headers = exchange(window, CONSOLIDATE)
    counts = [header.pending for header in headers]
    if len(set(counts)) > 1 or any(header.begun for header in headers):
        raise RuntimeError(
            f"{NAME}: consolidate() needs windows with equally many micro-batches on every rank, each one ended by "
            f"step(); the ranks hold {counts}; flush() first, or call it where they agree"
        )
    if not counts[0]:
        return
    totals = _totals(window, headers)
    window.dropped = any(header.dropped for header in headers)
    _add_up(window, any(header.live for header in headers), whole=True)
    window.rescale(1.0 / totals.ranks)
    if totals.mode == WEIGHTED:
        window.items = totals.items / totals.ranks
    window.consolidated = True
