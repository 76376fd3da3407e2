"""Gradients that are held back: those of `fold_every` micro-batches are folded in one pass, or by the update itself."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedaccum import capture
from fusedaccum.ops import TOUCHED, VOID

if TYPE_CHECKING:
    from fusedaccum.flat_buffer import FlatBuffer
    from fusedaccum.micro import Micro
    from fusedaccum.window import Window


# Owners


def _owners(grads: list[Tensor]) -> list[tuple[int, int]]:
    """Of each tensor: references to the object, and to what it stands for."""
    return list(zip(map(sys.getrefcount, grads), map(Tensor._use_count, grads), strict=True))


def _storages(grads: list[Tensor]) -> list[int]:
    """Of each tensor: references to its storage."""
    count = torch._C._storage_Use_Count
    return [count(g.untyped_storage()._cdata) for g in grads]


def _alone() -> tuple[tuple[int, int], int]:
    """What `_owners` and `_storages` say of a gradient that nobody but a parameter and one list refers to."""
    with torch.enable_grad(), torch.inference_mode(False):
        p = torch.ones(1, device="cpu", requires_grad=True)
        (p * 2).backward()
    given: list[Tensor | None] = [p.grad]
    grads = [g for g in given if g is not None]
    return _owners(grads)[0], _storages(grads)[0]


ALONE: list[tuple[tuple[int, int], int]] = []  # found at the first use


def owned_alone(given: list[Tensor | None]) -> list[bool]:
    """Of each gradient: whether nobody else can write to it later.

    given: the only list of them, whose `p.grad` they are still. Gradients that share storage with each other alone, as
    autograd makes them of one tensor that is cut up, are owned by the window too.
    """
    if not ALONE:
        ALONE.append(_alone())
    ((owners, storage),) = ALONE
    grads = [g for g in given if g is not None]
    plain = [g.layout == torch.strided for g in grads]
    if not all(plain):  # the parts of a sparse gradient may be anybody's; it is folded at once
        return [g is not None and g.layout == torch.strided and owned_alone([g, None])[0] for g in given]
    counts, storages = _owners(grads), _storages(grads)
    shared = [k for k, n in enumerate(storages) if n > storage]
    alone = [seen == owners for seen in counts]
    if shared:
        mine: dict[int, int] = {}
        for k in shared:
            where = grads[k].untyped_storage()._cdata
            mine[where] = mine.get(where, 0) + 1
        for k in shared:
            others = storages[k] - storage - (mine[grads[k].untyped_storage()._cdata] - 1)
            alone[k] = alone[k] and others == 0
    found = iter(alone)
    return [g is not None and next(found) for g in given]


# When

MOST_LATE = 16  # micro-batches that an update can add on every backend
NOW, UNTIL_FOLDED, LATE = 0, 1, 2  # a micro-batch is folded, waits for others of its window, or is left to the update


def waits(window: Window, micro: Micro, grads: list[list[Tensor | None]]) -> int:
    """What becomes of the gradients of the micro-batch that comes now, by buffer: NOW, UNTIL_FOLDED or LATE."""
    if capture.is_capturing():
        return NOW
    if window.pending + 1 >= micro.length:
        return LATE if _leaves_late(window, grads) else NOW
    every = window.options.fold_every
    if every == 1 or any(buffer.handed_out or buffer.spread is not None for buffer in window.buffers):
        return NOW
    count = max((len(buffer.held) for buffer in window.buffers), default=0)
    return UNTIL_FOLDED if count + 1 < every else NOW


def _leaves_late(window: Window, grads: list[list[Tensor | None]]) -> bool:
    """Whether the update adds the last micro-batch to the sums by itself, which moves fewer bytes than a fold."""
    if window.update.name != "fused" or window.ranks is not None or window.graphs.captured:
        return False
    if any(buffer.has_live or buffer.keeps_zero or len(buffer.held) >= MOST_LATE for buffer in window.buffers):
        return False
    return not needs_norm(window) or all(map(_is_read_twice, window.buffers, grads))


def needs_norm(window: Window) -> bool:
    """Whether an update is by the norm of what it updates with."""
    max_norm = window.options.max_norm
    return (max_norm is not None and max_norm != math.inf) or window.nonfinite.skips_windows


def _is_read_twice(buffer: FlatBuffer, grads: list[Tensor | None]) -> bool:
    """Whether to read the gradients twice, once for the norm and once for the update, moves fewer bytes than a fold.

    With S bytes of gradients an element, and a sum that is there already or not: 2 (S + 4) or 2 S bytes, and with a
    fold S + 4 + 4 + 4 or S + 4 + 4.
    """
    lists = [*buffer.held.grads, grads]
    size = sum(max((g.element_size() for g in given if g is not None), default=0) for given in lists)
    there = any(mark & (TOUCHED | VOID) == TOUCHED for mark in buffer.own_marks().tolist())
    return size < (4 if there else 8)


def must_settle(window: Window, buffers: list[FlatBuffer]) -> bool:
    """Whether what is held back cannot be left to the update that ends the window."""
    return window.update.name != "fused" or any(b.has_live or len(b.held) > MOST_LATE for b in buffers)


def settle(buffers: list[FlatBuffer]) -> None:
    """Fold what is held back at the end of a window, and leave the norm behind."""
    for buffer in buffers:
        buffer.settle(norm=True)
