"""Over which ranks DTensor parameters are spread, and what these ranks have to agree on.

FSDP2 and tensor parallelism reduce gradients by themselves. What is left for a window: the sum of squares over all
shards, and that a decision which one rank makes from its shards (to skip, to raise) is made by all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedaccum.collectives import Ranks, all_gather_single
from fusedaccum.local import is_distributed

if TYPE_CHECKING:
    from fusedaccum.flat_buffer import FlatBuffer


def key_of(param: Tensor) -> tuple[Any, frozenset[int]] | None:
    """What parameters of one buffer have in common: (mesh, the mesh dimensions that shard them); None if plain."""
    if not is_distributed(param):
        return None
    sharded = frozenset(d for d, placement in enumerate(param.placements) if not placement.is_replicate())
    return param.device_mesh, sharded


class Spread:
    """The ranks of one mesh, over some of whose dimensions parameters are sharded and replicated over the others."""

    def __init__(self, mesh: Any, sharded: frozenset[int]) -> None:
        self.key = (mesh, sharded)
        self.device_type = mesh.device_type
        dims = [d for d in range(mesh.ndim) if mesh.size(d) > 1]
        self._ranks = {d: Ranks(mesh.get_group(d)) for d in dims}
        self._sharded = [d for d in dims if d in sharded]
        # Which of how many shards this rank holds: replicas hold the same one.
        self.shard, self.shards = 0, 1
        for d in self._sharded:
            self.shard = self.shard * mesh.size(d) + mesh.get_local_rank(d)
            self.shards *= mesh.size(d)

    def total(self, what: str, values: Tensor) -> Tensor:
        """The sum of `values` (any shape, on any device) over all shards, the same bits on every rank.

        Each rank adds up in order of ranks, mesh dimension by mesh dimension.
        """
        total = values
        for d in self._sharded:
            total = self._of_all(what, d, total).sum(0)
        return total

    def greatest(self, what: str, values: Tensor) -> Tensor:
        """The largest of `values`, element by element, among all ranks of the mesh; NaN where one of them is."""
        for d in self._ranks:
            values = self._of_all(what, d, values).amax(0)
        return values

    def _of_all(self, what: str, d: int, values: Tensor) -> Tensor:
        """`values` of all ranks along mesh dimension `d`, in a new first dimension."""
        ranks = self._ranks[d]
        mine = values.to(self.device_type)  # parameters that are offloaded to the CPU belong to a mesh of GPUs
        everybody = torch.empty(ranks.size * mine.numel(), dtype=mine.dtype, device=mine.device)
        with ranks.saying(what):
            all_gather_single(everybody, mine.reshape(-1), group=ranks.group)
        return everybody.view(ranks.size, *values.shape).to(values.device)

    def largest(self, what: str, values: Tensor) -> None:
        """Make every element of `values` the largest of all ranks of the mesh, replicas included."""
        there = values.to(self.device_type)
        for ranks in self._ranks.values():
            ranks.largest(what, there)
        if there is not values:
            values.copy_(there)


def spreads(buffers: Iterable[FlatBuffer]) -> Iterable[Spread]:
    """One for each mesh that parameters in `buffers` are spread over."""
    return {buffer.spread.key[0]: buffer.spread for buffer in buffers if buffer.spread is not None}.values()


def agree(what: str, buffers: Iterable[FlatBuffer], values: Tensor) -> None:
    """Make every element of `values` the largest of all ranks that hold a part of `buffers`' parameters."""
    for spread in spreads(buffers):
        spread.largest(what, values)
