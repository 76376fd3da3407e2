"""The sum of squares of a window: over buffers, and over the ranks that hold parts of what is updated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fusedaccum.flat_buffer import FlatBuffer

if TYPE_CHECKING:
    from fusedaccum.window import Window


def total(window: Window, buffers: list[FlatBuffer]) -> Tensor:
    """The sum of squares of what the window holds in `buffers`: float64[1] on the first one's device.

    Of DTensors it is that of whole parameters: shards are added up, replicas counted once, and all ranks of a mesh get
    the same bits. A collective where there are shards: every rank has to call it, with the same buffers.
    """
    first = buffers[0]
    sums = None
    for buffer in buffers:
        mine = buffer.square_total()
        if buffer.spread is not None:
            mine = buffer.spread.total("the sum of squares over shards", mine)
        sums = mine if sums is None else sums + mine.to(first.device)
    return sums


def agree_on_live(buffers: list[FlatBuffer]) -> None:
    """Have all ranks know of every DTensor whether anything is left of its gradients.

    A shard without elements is never live by itself, and an optimizer that communicates needs all ranks.
    """
    for buffer in buffers:
        if buffer.spread is not None and buffer.live is not None:
            buffer.spread.largest("the exchange of live segments", buffer.live)
