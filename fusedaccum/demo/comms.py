"""Counts what a rank sends to others: every collective that it starts, and the bytes that leave its sockets."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators of torch's two namespaces for collectives, by what they are. DDP and FSDP2 call them from C++ and from
# Python, and so does torch.distributed itself: none goes another way.
KINDS = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "barrier": "barrier",
}
NO_COLLECTIVES = {"wait_tensor", "_wrap_tensor_autograd"}
# Times the bytes of the largest tensor (the whole, where ranks hold shares of it), of `size` ranks in a ring: what the
# average rank sends. As much has to be sent whatever the algorithm, for all but the broadcast of many small tensors.
SENT: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda size: 2 * (size - 1) / size,
    "all-gather": lambda size: (size - 1) / size,
    "reduce-scatter": lambda size: (size - 1) / size,
    "all-to-all": lambda size: (size - 1) / size,
    "broadcast": lambda size: (size - 1) / size,
    "barrier": lambda size: 0.0,
}


@dataclass(frozen=True)
class Call:
    """One collective of one rank. bytes: of the whole tensor. size: ranks that take part."""

    kind: str
    dtype: torch.dtype
    bytes: int
    size: int

    @property
    def sent(self) -> float:
        """Bytes that the average rank sends for it, in a ring."""
        return SENT[self.kind](self.size) * self.bytes


class Collectives(TorchDispatchMode):
    """Keeps every collective that this thread starts while the block runs, backwards on a CPU included: `calls`.

    Groups must be of all ranks. Raises NotImplementedError for a collective that it does not know.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    @property
    def sent(self) -> float:
        """Bytes that the average rank sends for all of them."""
        return sum(call.sent for call in self.calls)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own collectives come by, where it has taken the operator apart
        if "c10d" in func.namespace:
            name = func.overloadpacket.__name__
            if name not in NO_COLLECTIVES:
                self.calls.append(_call(name, args))
        return func(*args, **(kwargs or {}))


def _call(name: str, args: tuple[Any, ...]) -> Call:
    if name not in KINDS:
        raise NotImplementedError(
            f"the collective {name} is not in fusedaccum.demo.comms.KINDS, where its kind belongs"
        )
    sides = [[t for t in tree_leaves(arg) if isinstance(t, Tensor)] for arg in args]
    whole = max(sides, key=lambda side: sum(t.nbytes for t in side))
    return Call(KINDS[name], whole[0].dtype, sum(t.nbytes for t in whole), dist.get_world_size())


BYTES_SENT, BYTES_AGAIN = 200, 208  # offsets of tcpi_bytes_sent and tcpi_bytes_retrans in tcp_info, since Linux 4.19


def sent_on_sockets() -> int:
    """Bytes that this process has sent on its open TCP connections to ranks (gloo's are such), as Linux counts them."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += (
                        struct.unpack_from("=Q", info, BYTES_SENT)[0] - struct.unpack_from("=Q", info, BYTES_AGAIN)[0]
                    )
        except OSError:  # closed meanwhile: the folder's own descriptor is in the list
            continue
    return total
