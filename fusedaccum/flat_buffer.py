"""The flat buffer: one FP32 tensor per device that holds every master gradient, and the tables that describe it."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from operator import is_
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedaccum.local import local
from fusedaccum.memory_order import dense_stride, densified, in_memory_order
from fusedaccum.ops import ALIGN, TILE, TOTAL, TOUCHED

if TYPE_CHECKING:
    from fusedaccum.spread import Spread

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layout(numels: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Place segments of `numels` elements one after another, each start on a multiple of ALIGN elements.

    Returns (segments int64[n, 2] on the CPU, tiles int64[T, 4] on `device`, elements of the flat buffer); the columns
    are those of `fusedaccum.ops`.
    """
    numel = torch.tensor(list(numels), dtype=torch.int64, device="cpu")
    padded = (numel + ALIGN - 1) // ALIGN * ALIGN
    offset = padded.cumsum(0) - padded
    tile_count = (numel + TILE - 1) // TILE
    segment = torch.repeat_interleave(torch.arange(len(numel), device="cpu"), tile_count)
    first_tile = tile_count.cumsum(0) - tile_count
    start = (torch.arange(len(segment), device="cpu") - first_tile[segment]) * TILE
    count = torch.clamp(numel[segment] - start, max=TILE)
    tiles = torch.stack((segment, start, offset[segment] + start, count), 1)
    return torch.stack((offset, numel), 1), to_device(tiles, device), int(padded.sum())


@dataclass(frozen=True, eq=False)
class Part:
    """A run of neighbouring segments, with tables of its own: what is folded alone costs no look at the others.

    first, last: segments first to last - 1. tiles: theirs, which number segments from `first`. partials, marks: theirs.
    """

    first: int
    last: int
    segments: Tensor
    tiles: Tensor
    partials: Tensor
    marks: Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on `device` that nothing waits for: on CUDA only a copy from pinned memory is that."""
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # torch keeps the pinned memory until the copy is over
    return tensor.to(device, non_blocking=True)


def _among(segments: Set[int], here: range, count: int) -> Set[int]:
    """Those of `segments`, out of `count`, that are `here`, without a look at the others."""
    return segments if len(here) == count or not segments else segments & set(here)


class FlatBuffer:
    """The master gradients of all parameters on one device.

    params: n parameters, float32, bfloat16, float16 or complex64 (a pair of float32), in the order of their segments.
    They are what the rest of the code knows segments by; the memory of segment k, with its shape, order and address, is
    that of `data(k)`. spread: where they are DTensors, the ranks that hold parts of them, or copies; else None.
    shares: the number of ranks that get an equal run of the buffer, which begins on a multiple of ALIGN elements.
    """

    def __init__(
        self,
        params: list[Tensor],
        device: torch.device,
        backend: ModuleType,
        spread: Spread | None = None,
        shares: int = 1,
    ) -> None:
        self.params = params
        self.device = device
        self.backend = backend
        self.spread = spread
        memory = self.memory()
        self.shapes = [p.shape for p in memory]
        self.strides = [dense_stride(p) for p in memory]
        self.complex = [p.is_complex() for p in memory]
        # Segments whose gradient cannot be read as it is: complex, or in another order than row-major.
        self.special = frozenset(
            k for k, p in enumerate(memory) if p.is_complex() or not torch.empty_like(p, device="meta").is_contiguous()
        )
        # Segments whose gradient has been sparse.
        self.sparse: set[int] = set()
        self.numels = [p.numel() * (2 if p.is_complex() else 1) for p in memory]
        self.segments, self.tiles, size = layout(self.numels, device)
        self.flat = self.allocate(-(-size // (ALIGN * shares)) * ALIGN * shares)
        self.partials = torch.zeros(len(self.tiles), dtype=torch.float64, device=device)
        self.marks = torch.zeros(len(params), dtype=torch.uint8, device="cpu")
        self._parts: dict[int, list[Part]] = {}
        self.whole = Part(0, len(params), self.segments, self.tiles, self.partials, self.marks)
        # Which segments hold more than the zeros of skipped folds: None where every fold counts.
        self.live: Tensor | None = None
        self.steps = torch.zeros(len(params), dtype=torch.float32, device=device)
        self.total = torch.zeros(TOTAL, dtype=torch.float64, device=device)
        self.divisor = torch.ones(1, dtype=torch.float64, device=device)
        self.scalars = torch.zeros(3, dtype=torch.float32, device=device)
        self._scale = torch.ones(1, dtype=torch.float32, device=device)
        self.scale_value = 1.0
        self._scale_in_graph = False
        self._divisor_value: float | None = 1.0
        self._views: weakref.WeakSet[Tensor] = weakref.WeakSet()
        # The list entry of a segment to which a list does not apply.
        self.absent = torch.empty(0, dtype=torch.float32, device=device)
        self.addresses = self.addresses_now()
        self.touched = False
        # Whether every boundary leaves `flat` zeroed, as captured folds need it; whether the last update has zeroed
        # what it read; whether there are values left from a window that was not zeroed.
        self.keeps_zero = False
        self.was_zeroed = False
        self.has_leftovers = False

    @cached_property
    def digest(self) -> bytes:
        """A digest of device type, dtypes, shapes and memory order, by which ranks find out that they hold the same
        parameters, element for element. The stride of a dimension of 1 says nothing.
        """
        parameters = [
            (str(p.dtype), tuple(shape), [s for s, n in zip(stride, shape, strict=True) if n != 1])
            for p, shape, stride in zip(self.params, self.shapes, self.strides, strict=True)
        ]
        what = (self.device.type, parameters)
        return hashlib.sha256(repr(what).encode()).digest()

    def allocate(self, size: int) -> Tensor:
        """The memory of the segments: float32[size]."""
        return torch.zeros(size, dtype=torch.float32, device=self.device)

    def data(self, k: int) -> Tensor:
        """The plain tensor whose memory segment k is the sum for and updates: on this rank, of the k-th parameter."""
        return local(self.params[k])

    def memory(self) -> list[Tensor]:
        """`data(k)` of every segment, to be read only."""
        return list(map(local, self.params)) if self.spread is not None else self.params

    def state_shape(self, k: int) -> torch.Size:
        """The shape of what the optimizer keeps for segment k."""
        return self.params[k].shape

    def addresses_now(self) -> list[int]:
        """Where the parameters lie in memory. `addresses` is where they lay when they were last judged."""
        return list(map(Tensor.data_ptr, self.memory()))

    def matches(self, params: Sequence[Tensor]) -> bool:
        """Whether this buffer, as it is, can hold the gradients of `params`, which are spread as its own: same objects,
        sizes, order in memory.
        """
        return (
            len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and all(
                p.shape == shape and p.device == self.device and dense_stride(p) == stride and p.is_complex() == pairs
                for p, shape, stride, pairs in zip(self.memory(), self.shapes, self.strides, self.complex, strict=True)
            )
        )

    def moved(self) -> bool:
        """Whether a parameter has left its place since construction: another shape, device or order in memory."""
        for k, p in enumerate(self.memory()):
            if p.shape != self.shapes[k] or p.device != self.device:
                return True
            if (k in self.special or not p.is_contiguous()) and dense_stride(p) != self.strides[k]:
                return True
        return False

    def view(self, k: int) -> Tensor:
        """The k-th segment as a tensor of the parameter's shape and order: float32, or complex64 for complex64."""
        offset = int(self.segments[k, 0])
        if self.complex[k]:
            pair = self.flat.as_strided((*self.shapes[k], 2), (*(2 * s for s in self.strides[k]), 1), offset)
            return torch.view_as_complex(pair)
        return self.flat.as_strided(self.shapes[k], self.strides[k], offset)

    def hand_out(self, k: int) -> Tensor:
        """`view(k)`, remembered: while it lives, the update that closes the window stores zeros behind it."""
        view = self.view(k)
        self._views.add(view)
        return view

    @property
    def handed_out(self) -> bool:
        return len(self._views) > 0

    @property
    def zero_in_pass(self) -> bool:
        """Whether the update has to store zeros behind what it reads."""
        return self.handed_out or self.keeps_zero

    def parts(self, size: int) -> list[Part]:
        """The buffer in parts of neighbouring segments whose parameters take `size` bytes, or are one segment.

        Made once for each size: a part has tables of its own.
        """
        if size in self._parts:
            return self._parts[size]
        starts, taken = [0], 0
        for k, p in enumerate(self.memory()):
            if taken and taken + p.nbytes > size:
                starts.append(k)
                taken = 0
            taken += p.nbytes
        count = (self.segments[:, 1] + TILE - 1) // TILE
        ends = [0, *count.cumsum(0).tolist()]
        ranges = zip(starts, [*starts[1:], len(self.params)], strict=True)
        self._parts[size] = [self._part(a, b, ends[a], ends[b]) for a, b in ranges]
        return self._parts[size]

    def _part(self, first: int, last: int, first_tile: int, last_tile: int) -> Part:
        tiles = self.tiles[first_tile:last_tile].clone()
        tiles[:, 0] -= first
        partials = self.partials[first_tile:last_tile]
        return Part(first, last, self.segments[first:last], tiles, partials, self.marks[first:last])

    def readable(self, grads: list[Tensor | None], first: int = 0) -> list[Tensor | None]:
        """`grads`, those of segment `first` and the next ones, with sparse ones made dense, and those of special
        segments in memory order.
        """
        here = range(first, first + len(grads))
        for k in _among(self.sparse, here, len(self.params)):
            if (grad := grads[k - first]) is not None and grad.is_sparse:
                grads[k - first] = densified(grad)
        for k in _among(self.special, here, len(self.params)):
            grad = grads[k - first]
            if grad is not None and grad.shape == self.shapes[k] and grad.layout == torch.strided:
                grads[k - first] = in_memory_order(grad, self.strides[k])
        return grads

    def _here(self, value: Tensor) -> Tensor:
        """`value` on this device, without a wait for a copy from the CPU."""
        value = value.detach()
        return to_device(value, self.device) if value.device.type == "cpu" else value.to(self.device)

    def _scalar(self, value: float | Tensor) -> Tensor:
        """`value`, a number or a tensor of one element anywhere, as float32[1] on this device."""
        if isinstance(value, Tensor):
            return self._here(value).to(torch.float32).reshape(1)
        return torch.full((1,), value, dtype=torch.float32, device=self.device)

    def fold(self, grads: list[Tensor | None], scale: float | Tensor, norm: bool, part: Part | None = None) -> None:
        """Fold one micro-batch, or what came of it in one part. grads: an entry for each of its segments.

        scale: a number, or a tensor of one element on any device.
        """
        if isinstance(scale, Tensor):
            factor = self._scalar(scale)
        else:
            if scale != self.scale_value:
                self._set_scale(scale)
            factor = self._scale
        part = part or self.whole
        self.backend.fold(
            self.flat,
            part.partials,
            part.marks,
            None if self.live is None else self.live[part.first : part.last],
            part.segments,
            part.tiles,
            self.readable(grads, part.first),
            factor,
            norm,
        )
        self.touched = self.touched or any(g is not None for g in grads)

    def _set_scale(self, value: float) -> None:
        if self._scale_in_graph:  # a CUDA graph reads the old value at every replay
            self._scale = self._scalar(value)
            self._scale_in_graph = False
        else:
            self._scale.fill_(value)
        self.scale_value = value

    def scale_in_graph(self) -> Tensor:
        """The scale as a CUDA graph reads it: from now on it is not written."""
        self._scale_in_graph = True
        return self._scale

    def found_inf(self, grads: list[Tensor | None]) -> Tensor:
        """1.0 where an element of a gradient is not finite, else 0.0: float32[1] on this device, new for each call."""
        found = torch.empty(1, dtype=torch.float32, device=self.device)
        self.backend.found_inf(self.flat, self.marks, self.segments, self.tiles, self.readable(list(grads)), found)
        return found

    def square_total(self) -> Tensor:
        """The sum of squares of what this window holds: float64[1] on this device, reused by the next call."""
        self.backend.square_total(self.flat, self.partials, self.marks, self.segments, self.tiles, self.total)
        return self.total[:1]

    def close_window(
        self, total: Tensor, divisor: float | Tensor, max_norm: float, skip_nonfinite: bool = False
    ) -> None:
        """Fill `scalars` and count the update in `steps`. total: float64[1], over all devices, on this device."""
        if isinstance(divisor, Tensor):
            self.divisor.copy_(self._here(divisor).reshape(1))
            self._divisor_value = None
        elif divisor != self._divisor_value:
            self.divisor.fill_(divisor)
            self._divisor_value = divisor
        self.backend.close_window(
            self.scalars, self.steps, self.marks, self.live, total, self.divisor, max_norm, skip_nonfinite
        )

    def rescale(self, factor: float | Tensor) -> None:
        """Multiply what this window holds by `factor`, a number or a tensor of one element on any device."""
        self.backend.rescale(self.flat, self.marks, self.segments, self.tiles, self._scalar(factor))

    def padding(self) -> list[Tensor]:
        """Views of the elements between segments, and behind the last."""
        ends = (self.segments[:, 0] + self.segments[:, 1]).tolist()
        starts = [*self.segments[1:, 0].tolist(), self.flat.numel()]
        return [self.flat[end:start] for end, start in zip(ends, starts, strict=True) if end < start]

    def stale_norm(self) -> None:
        """Forget the partial sums: somebody may have written to the segments."""
        self.marks.bitwise_and_(TOUCHED)

    def touched_segments(self) -> list[int]:
        """Indices of the segments that hold a sum of this window."""
        return [k for k, mark in enumerate(self.marks.tolist()) if mark & TOUCHED]

    def put(self, k: int, values: Tensor) -> None:
        """Make `values` (the parameter's shape) the sum of segment k."""
        self.view(k).copy_(values)
        self.marks[k] = TOUCHED
        self.touched = True
        if self.live is not None:
            self.live[k] = 1

    def zero_untouched(self, part: Part | None = None) -> None:
        """Zero what earlier windows have left in segments that this one has not touched, in all or in one part."""
        part = part or self.whole
        for k in range(part.first, part.last):
            if not self.is_touched(k):
                offset, numel = self.segments[k].tolist()
                self.flat[offset : offset + numel].zero_()

    def keep_live(self) -> None:
        """Have the device note which segments were folded into: what it skips, the host does not know."""
        if self.live is None:
            touched = (self.marks & TOUCHED).mul_((self.segments[:, 1] > 0).to(torch.uint8))
            self.live = to_device(touched, self.device)

    def uncount(self) -> None:
        """Take back what `close_window` has counted in `steps`: the update was refused."""
        counted = to_device(self.marks & TOUCHED, self.device) if self.live is None else self.live
        self.steps.sub_(counted.to(torch.float32) * (1 - self.scalars[1]))

    def holds_sum(self, k: int) -> bool:
        """Whether segment k holds a sum of this window, skipped folds left out. Waits for the device if it must."""
        return self.is_touched(k) and (self.live is None or bool(self.live[k]))

    def is_touched(self, k: int) -> bool:
        """Whether segment k holds a sum of this window."""
        return bool(self.marks[k] & TOUCHED)

    def clear(self) -> None:
        """Make every segment untouched, which costs no bytes. Views that were handed out and live read as zero."""
        self.has_leftovers = self.has_leftovers or (self.touched and not self.was_zeroed)
        if self.keeps_zero and self.has_leftovers:
            self.flat.zero_()
            self.has_leftovers = False
        elif not self.was_zeroed:
            for view in list(self._views):
                view.zero_()
        self.was_zeroed = False
        if self.live is not None:
            self.live.zero_()
        self.marks.zero_()
        self.touched = False
