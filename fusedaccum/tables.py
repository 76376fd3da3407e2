"""The tables that describe a flat buffer: where segments lie in it, and the tiles that kernels work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedaccum.ops import ALIGN, TILE


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
