"""The sum of squares of a window: over buffers, and over the ranks that hold parts of what is updated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fusedaccum.flat_buffer import FlatBuffer
from fusedaccum.spread import spreads

if TYPE_CHECKING:
    from fusedaccum.window import Window


def total(window: Window, buffers: list[FlatBuffer]) -> Tensor:
    """The sum of squares of what the window holds in `buffers`: float64[1] on the first one's device.

    Of DTensors it is that of whole parameters: shards are added up, replicas counted once, and all ranks of a mesh get
    the same bits. Plain tensors beside DTensors count once too, as copies that every rank has; should they differ, the
    largest counts for all. A collective where there are DTensors: every rank has to call it.

    Where the buffers are shares (shard="zero1") it is that of all shares, in a collective too.
    """
    if window.zero1 is not None:
        return window.zero1.total(buffers)
    if any(buffer.spread is not None for buffer in window.buffers):
        buffers = window.buffers  # of which a rank may have touched others than the next one
    device = buffers[0].device
    plain = [buffer.square_total() for buffer in buffers if buffer.spread is None]
    sums = []
    if plain:
        mine = sum((other.to(device) for other in plain[1:]), plain[0].to(device))
        for spread in spreads(buffers):
            mine = spread.greatest("the sum of squares of what is not sharded", mine)
        sums.append(mine)
    for buffer in buffers:
        if buffer.spread is not None:
            shards = buffer.spread.total("the sum of squares over shards", buffer.square_total())
            sums.append(shards.to(device))
    return sum(sums[1:], sums[0])


def agree_on_live(buffers: list[FlatBuffer]) -> None:
    """Have all ranks know of every DTensor whether anything is left of its gradients.

    A shard without elements is never live by itself, and an optimizer that communicates needs all ranks.
    """
    for buffer in buffers:
        if buffer.spread is not None and buffer.live is not None:
            buffer.spread.largest("the exchange of live segments", buffer.live)
