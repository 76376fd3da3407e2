"""A rank's share of a flat buffer: the run of elements that it alone adds up, and updates parameters with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedaccum.flat_buffer import FlatBuffer
from fusedaccum.memory_order import dense_stride, in_memory_order
from fusedaccum.ops import TOUCHED


class Cut(NamedTuple):
    """Who holds which elements of a parameter.

    shape, stride: by which its elements are in order. pieces: (rank, start, stop), one after the other.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    pieces: tuple[tuple[int, int, int], ...]

    def of(self, rank: int) -> tuple[int, int] | None:
        """(start, stop) of what `rank` holds; None where it holds nothing."""
        return next(((start, stop) for r, start, stop in self.pieces if r == rank), None)

    @property
    def numel(self) -> int:
        return self.pieces[-1][2]


def cuts_of(buffer: FlatBuffer, ranks: int) -> list[Cut]:
    """How each segment is cut where every rank has an equal run of the buffer. One of 0 elements belongs to a rank too,
    as optimizers count its updates.
    """
    share = buffer.flat.numel() // ranks
    cuts = []
    for k, (offset, numel) in enumerate(buffer.segments.tolist()):
        first = min(offset // share, ranks - 1) if share else 0
        last = max(first, (offset + numel - 1) // share) if share else 0
        pieces = [(r, max(0, r * share - offset), min(numel, (r + 1) * share - offset)) for r in range(first, last + 1)]
        cuts.append(Cut(tuple(buffer.shapes[k]), tuple(buffer.strides[k]), tuple(pieces)))
    return cuts


class Share(FlatBuffer):
    """What one rank updates of a flat buffer: views of its memory, with tables of their own.

    Segment k is a piece of `params[k]`, and `data(k)` that run of its memory. A share begins and ends at multiples of
    ALIGN elements, so that its segments do too.
    """

    def __init__(self, whole: FlatBuffer, rank: int, ranks: int) -> None:
        pieces = [cut.of(rank) for cut in cuts_of(whole, ranks)]
        there = [k for k, piece in enumerate(pieces) if piece is not None]
        self.source = whole
        self.ranges = [pieces[k] for k in there]
        self.here = slice(there[0], there[-1] + 1) if there else slice(0, 0)
        self._start = whole.flat.numel() // ranks * rank
        params = whole.params[self.here]
        self._pieces: list[Tensor] = []
        self._find(params)
        super().__init__(params, whole.device, whole.backend)

    def _find(self, params: Sequence[Tensor]) -> None:
        ordered = [in_memory_order(p, dense_stride(p)) for p in params]
        self._pieces = [p[start:stop] for p, (start, stop) in zip(ordered, self.ranges, strict=True)]

    def allocate(self, size: int) -> Tensor:
        return self.source.flat[self._start : self._start + size]

    def begin(self) -> None:
        """Take up what the buffer knows of its window, and where parameters lie now."""
        self._find(self.params)
        self.marks.copy_(self.source.marks[self.here] & TOUCHED)
        self.live = None if self.source.live is None else self.source.live[self.here]
        self.touched = bool(self.marks.any())

    def data(self, k: int) -> Tensor:
        """A view of the parameter; a copy, good until the next `begin`, where it is not dense in memory."""
        return self._pieces[k]

    def memory(self) -> list[Tensor]:
        return self._pieces

    def state_shape(self, k: int) -> torch.Size:
        return self._pieces[k].shape

    @property
    def zero_in_pass(self) -> bool:
        """Never: views that were handed out are of the whole buffer, and zeroed there."""
        return False
