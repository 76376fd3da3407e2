"""What ranks tell each other before sums are sent: where each one is, and with what. A difference raises on all."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedaccum.collectives import as_bits
from fusedaccum.memory_order import dense_stride, in_memory_order
from fusedaccum.options import NAME, PLAIN, WEIGHTED, parameters

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
KINDS = 16  # above them, the rank that consolidate() is for
MODES = (None, PLAIN, WEIGHTED)
ON_DEVICE, LIVE, DROPPED = 1, 2, 4  # item counts are tensors there; some segments may hold nothing; left something out
CHUNK = 2**20  # elements whose bits are added up at a time


@dataclass(frozen=True)
class Header:
    """What a rank says of its window before sums are sent.

    number: windows that it has reduced before. given_up: those that it has dropped then. values: at the first of them,
    a digest of the bits of all parameters and of the state: ranks that begin with others would never agree. options: a
    digest. length, mode: 0 where nothing is in the window. items: as `as_bits` has them, those that the host knows.
    sent: buckets that have left inside the last backward. flags: ON_DEVICE, LIVE and DROPPED.
    """

    doing: int
    options: int
    sent: int
    number: int
    given_up: int
    layout: int
    values: int
    length: int
    mode: int
    pending: int
    items: int
    flags: int
    begun: int


def exchange(window: Window, doing: int, to: int | None = None) -> list[Header]:
    """Everybody's header, in order of ranks. Raises RuntimeError on all of them where they do not fit together."""
    on_device = isinstance(window.items, Tensor)
    mine = Header(
        doing=doing if to is None else doing + KINDS * (1 + to),
        options=_digest(said(window)),
        sent=0 if window.overlap is None else window.overlap.sent,
        number=window.ranks.windows,
        given_up=window.ranks.given_up,
        layout=_layout(window),
        values=0 if window.ranks.windows else _values(window),
        length=window.length if window.is_open else 0,
        mode=MODES.index(window.mode) if window.pending else 0,
        pending=window.pending,
        items=0 if on_device else as_bits(window.items),
        flags=ON_DEVICE * on_device
        + LIVE * any(buffer.live is not None for buffer in window.buffers)
        + DROPPED * window.dropped,
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
            mine = f"; this one, rank {window.ranks.rank}, has {said(window)}" if name == "options" else ""
            done = "nothing was updated" if headers[0].sent or name == "sent" else "nothing was sent"
            raise RuntimeError(
                f"{NAME}: the ranks are not at the same point ({told}); every rank has to make the same calls with "
                f"the same options, and {done}. {WAYS_OUT[name]}{mine}"
            )
    return headers


SHOWN = {
    "doing": lambda v: DOING[v % KINDS] + (f" with to={v // KINDS - 1}" if v >= KINDS else ""),
    "options": lambda v: f"options and hyper-parameters with digest {v & 0xFFFFFFFF:08x}",
    "sent": lambda v: f"{v} buckets sent inside the window's last backward",
    "layout": lambda v: f"parameters with digest {v & 0xFFFFFFFF:08x}",
    "values": lambda v: f"parameters and optimizer state whose values have digest {v & 0xFFFFFFFF:08x}",
    "number": lambda v: f"{v} windows closed",
    "given_up": lambda v: f"{v} windows dropped by reset() after their reduction had begun",
    "length": lambda v: f"{v} micro-batches a window",
    "mode": lambda v: f"{MODES[v]} micro-batches",
}
WAYS_OUT = {
    "doing": "A rank that has run out of data calls step() without a gradient as often as the others with one; "
    "flush(), consolidate() and micro_batch(last=True) are called on every rank, or on none",
    "options": "Give every rank the same options and hyper-parameters, learning rates too, and load a state on every "
    "rank or on none",
    "sent": "A rank has dropped this window while its sums were on their way: reset() on every rank drops it",
    "layout": "The optimizers must hold parameters of the same shapes in the same order, frozen alike and in the "
    "same memory format; with "
    "shard='zero1' a state is loaded on every rank, or on none",
    "values": "Begin with equal parameters, in the same order, and with equal optimizer state: load the same file on "
    "every rank, or send what one has by torch.distributed.broadcast",
    "number": "Wrap the optimizer at the same time on every rank",
    "given_up": "One that others may have updated with is dropped on every rank, or ended by flush(); load a saved "
    "state on all of them, or wrap the optimizer again with equal parameters",
    "length": "Give every rank the same `steps`",
    "mode": "Give item counts (mean_of or sum_of) on every rank, or on none",
}


def said(window: Window) -> str:
    """What ranks have to share: options, hyper-parameters that the host knows, and how often a state was loaded.

    How gradients are folded is each rank's own affair.
    """
    own = ("process_group", "fold")
    options = [f"{name}={value}" for name, value in vars(window.options).items() if name not in own]
    groups = [
        {key: plain for key, value in group.items() if (plain := _plain(value)) is not None}
        for group in window.optimizer.param_groups
    ]
    return f"{', '.join(options)}, param_groups={groups}, {window.ranks.loads} states loaded"


def _plain(value: Any) -> Any:
    """A hyper-parameter as something that prints alike on every rank; None for what is none, or on another device."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, bool | int | float | str) else None


def _digest(what: str | bytes) -> int:
    data = what.encode() if isinstance(what, str) else what
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little", signed=True)


def _layout(window: Window) -> int:
    """A digest of what the buffers hold, and of the shares of it."""
    digests = b"".join(buffer.digest for buffer in window.buffers)
    if window.zero1 is not None:
        digests += window.zero1.digest(window)
    return _digest(digests)


def _values(window: Window) -> int:
    """A digest of the bits of all parameters, and of what the optimizer keeps whole for them. Waits for the device.

    The order counts, because ranks that list parameters of one shape in another order would add up what does not
    belong together, and hold the same bits all in all.
    """
    seen: list[Any] = []
    for buffer in window.buffers:
        for p, stride in zip(buffer.params, buffer.strides, strict=True):
            seen.append(_bits(in_memory_order(p, stride)))
    # With zero1 each rank may hold pieces of its own, and those that do not belong to it are refused in `settle`.
    whole = dict.fromkeys(parameters(window.optimizer)) if window.zero1 is None else ()
    for p in whole:
        entries = window.optimizer.state.get(p, {})
        for name in sorted(map(str, entries)):
            value = entries.get(name)
            if isinstance(value, Tensor):
                dense = in_memory_order(value, dense_stride(value)) if value.is_floating_point() else value.reshape(-1)
                seen.append((name, tuple(value.shape), _bits(dense)))
            else:
                seen.append((name, repr(_plain(value))))
    return _digest(repr(seen))


def _bits(flat: Tensor) -> list[int]:
    """Numbers that other bits, or the same in another order, would hardly have. flat: 1-D."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    weights = torch.arange(1, CHUNK + 1, device=flat.device)
    return [int((chunk * weights[: len(chunk)]).sum()) for chunk in flat.contiguous().view(kind).split(CHUNK)]
