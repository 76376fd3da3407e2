"""What the operator tests share: buffers with guards, sizes, and bounds on rounding errors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedaccum.ops import ALIGN, FRESH, TILE, TOTAL, TOUCHED

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TOUCHED_AND_FRESH = TOUCHED | FRESH
SIZES = (0, 1, 15, 16, 17, 4095, 4096, 4097, 3 * 4096 + 5)

# One rounding to nearest moves x by at most UNIT * |x|, or by TINY where the result is subnormal.
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TINY = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}

# NaNs that no arithmetic produces: read by mistake they spread, written over they are missed.
_GUARD = {torch.float32: 0x7FC0BEEF, torch.bfloat16: 0x7FC3, torch.float16: 0x7E03}
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The elements as integers: tells -0 from +0, and compares NaNs."""
    return tensor.detach().view(_BITS[tensor.itemsize]) if tensor.is_floating_point() else tensor


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal bits, but that any NaN equals any other: IEEE 754 leaves its payload open."""
    a, b = a.detach(), b.detach()
    return a.dtype == b.dtype and bool(((bits(a) == bits(b)) | (a.isnan() & b.isnan())).all())


def guarded(numel: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """`numel` elements that start `offset` elements after an aligned address, with guard values on both sides."""
    whole = torch.full((ALIGN + offset + numel + ALIGN,), _GUARD[dtype], dtype=_BITS[dtype.itemsize]).view(dtype)
    return whole[ALIGN + offset : ALIGN + offset + numel]


def place(values: Tensor, offset: int = 0) -> Tensor:
    """A copy of `values` in a guarded tensor."""
    return guarded(values.numel(), values.dtype, offset).copy_(values)


def guards_intact(tensor: Tensor) -> bool:
    """Whether everything around a guarded tensor is as `guarded` made it."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    start = tensor.storage_offset()
    around = torch.cat([whole[:start], whole[start + tensor.numel() :]])
    return bool((bits(around) == _GUARD[tensor.dtype]).all())


class Buffer:
    """A flat buffer with all that goes with it. Segments, padding and partials hold NaN, as left by another window."""

    def __init__(self, sizes: Sequence[int]) -> None:
        ends = [0]
        for numel in sizes:
            ends.append(ends[-1] + -(-numel // ALIGN) * ALIGN)
        pairs = list(zip(ends[:-1], sizes, strict=True))
        rows = [
            (k, start, offset + start, min(TILE, numel - start))
            for k, (offset, numel) in enumerate(pairs)
            for start in range(0, numel, TILE)
        ]
        self.flat = guarded(ends[-1], torch.float32)
        self.segments = torch.tensor(pairs, dtype=torch.int64, device="cpu").view(-1, 2)
        self.tiles = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
        self.marks = torch.zeros(len(sizes), dtype=torch.uint8, device="cpu")
        self.live: Tensor | None = None
        self.partials = torch.full((len(rows),), torch.nan, dtype=torch.float64)

    def segment(self, k: int) -> Tensor:
        offset, numel = self.segments[k].tolist()
        return self.flat[offset : offset + numel]

    def fill(self, segments: Sequence[Tensor | None], mark: int = TOUCHED) -> None:
        """Put values into segments, as a fold would; None leaves a segment untouched."""
        for k, values in enumerate(segments):
            if values is not None:
                self.segment(k).copy_(values)
                self.marks[k] = mark

    def tiles_of(self, k: int) -> list[int]:
        return [t for t, row in enumerate(self.tiles.tolist()) if row[0] == k]

    def plan(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.flat, self.marks, self.segments, self.tiles

    def step_plan(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        return self.flat, self.marks, self.live, self.segments, self.tiles

    def fold_plan(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        return self.flat, self.partials, self.marks, self.live, self.segments, self.tiles

    def norm_plan(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.flat, self.partials, self.marks, self.segments, self.tiles

    def padding_intact(self) -> bool:
        """Whether everything outside the segments is as it was made."""
        outside = torch.ones_like(self.flat, dtype=torch.bool)
        for offset, numel in self.segments.tolist():
            outside[offset : offset + numel] = False
        return guards_intact(self.flat) and bool((bits(self.flat)[outside] == _GUARD[torch.float32]).all())

    def square_sums(self) -> Tensor:
        """float64[T]: the sum of squares of each tile, by torch."""
        sums = [self.flat[start : start + count].double().square().sum() for _, _, start, count in self.tiles.tolist()]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64)


def partials_agree(got: Tensor, want: Tensor) -> bool:
    """A tile's squares are exact in float64; adding TILE of them rounds TILE times, in any order, on both sides."""
    return bool(((got - want).abs() <= 2 * TILE * 2.0**-53 * want).all())


def scalar(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([value], dtype=dtype)


def total_tensor(value: float = -1.0) -> Tensor:
    """What `square_total` writes to, its workspace as it is first given."""
    total = torch.zeros(TOTAL, dtype=torch.float64)
    total[0] = value
    return total


def random_bits(numel: int) -> Tensor:
    """float32 of every kind: all magnitudes, subnormal, infinite, NaN."""
    return torch.randint(-(2**31), 2**31, (numel,), dtype=torch.int64).to(torch.int32).view(torch.float32)


class FoldModel:
    """A window summed in float64, and how far a sum of float32 fused multiply-adds may be from it.

    Each fold rounds the sum so far once: by UNIT times that sum, which no partial sum of the terms' magnitudes is
    exceeded by, or by TINY. The errors of K folds add up, each grown by at most (1 + UNIT)^K.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sums = [torch.zeros(n, dtype=torch.float64) for n in sizes]
        self.magnitudes = [torch.zeros(n, dtype=torch.float64) for n in sizes]
        self.folds = [0] * len(sizes)

    def fold(self, grads: Sequence[Tensor | None], scale: Tensor) -> None:
        for k, grad in enumerate(grads):
            if grad is not None:
                term = scale.double() * grad.double() if scale != 0 else torch.zeros_like(self.sums[k])
                self.sums[k] += term
                self.magnitudes[k] += term.abs()
                self.folds[k] += 1

    def check(self, buffer: Buffer) -> None:
        for k, (want, magnitude, count) in enumerate(zip(self.sums, self.magnitudes, self.folds, strict=True)):
            assert bool(buffer.marks[k] & TOUCHED) == (count > 0), f"mark of segment {k}"
            if count:
                bound = (1 + 2.0**-20) * count * (UNIT[torch.float32] * magnitude + TINY[torch.float32])
                error = (buffer.segment(k).double() - want).abs()
                assert bool((error <= bound).all()), f"segment {k}: {error.max()} against {bound.max()}"
