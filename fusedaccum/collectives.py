"""What ranks say to each other: every collective of a wrapper, each with its name in the error where it fails.

Facts that hosts know (counts, which segments are touched) travel between hosts, so that no device is waited for; sums
and what only a device knows travel between devices.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from fusedaccum.options import NAME

# torch renames them; releases before 2.13 have the older names alone.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CHUNK = 2**24  # elements that are sent at a time where sending needs memory of its own


class Ranks:
    """The ranks of one process group. Its methods are collectives.

    wire_dtype: of sums while they are sent, float32 or bfloat16.
    """

    def __init__(self, group: dist.ProcessGroup, wire_dtype: torch.dtype = torch.float32) -> None:
        self.group = group
        self.wire_dtype = wire_dtype
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.windows = 0  # that were reduced
        self.loads = 0  # of states
        self.given_up = 0  # by reset(), when their reduction had begun
        self._hosts: dist.ProcessGroup | None = None

    @contextmanager
    def saying(self, what: str) -> Iterator[None]:
        """Names the collective in the error with which it ends where a rank is missing."""
        try:
            yield
        except Exception as error:
            raise RuntimeError(
                f"{NAME}: {what} failed on rank {self.rank} of {self.size}: {error}. Another rank has ended, is "
                "stuck, or did not make the same call within the process group's timeout; every rank has to step() "
                "and flush() as often as the others"
            ) from error

    @property
    def hosts(self) -> dist.ProcessGroup:
        """The group itself where it serves CPU tensors, else one of the same ranks that does, made at first use."""
        if self._hosts is None:
            if torch.device("cpu") in self.group._device_types:
                self._hosts = self.group
            else:
                members = dist.get_process_group_ranks(self.group)
                (device,) = self.group._device_types
                timeout = self.group._get_backend(device).options._timeout
                self._hosts = dist.new_group(members, timeout, backend="gloo", use_local_synchronization=True)
        return self._hosts

    def _serving(self, tensor: Tensor) -> dist.ProcessGroup:
        """The group that takes tensors where `tensor` is."""
        return self.hosts if tensor.device.type == "cpu" else self.group

    def all_of(self, what: str, numbers: Sequence[int]) -> list[list[int]]:
        """`numbers` of every rank, in order of ranks. Integers of 64 bits, equally many on each."""
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        everybody = torch.empty(self.size * len(numbers), dtype=torch.int64, device="cpu")
        with self.saying(what):
            all_gather_single(everybody, mine, group=self.hosts)
        return everybody.view(self.size, -1).tolist()

    def largest(self, what: str, tensor: Tensor) -> None:
        """Make every element of `tensor` the largest of all ranks."""
        if tensor.numel():
            with self.saying(what):
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._serving(tensor))

    def total(self, what: str, tensor: Tensor) -> None:
        """Make every element of `tensor` the sum over all ranks, in its own dtype."""
        with self.saying(what):
            dist.all_reduce(tensor, group=self._serving(tensor))

    def share_out(self, what: str, flat: Tensor) -> None:
        """Make this rank's share of `flat` (float32[n], n a multiple of the ranks) the sum over all ranks.

        Sent in `wire_dtype`; in bfloat16 every number is rounded once, and added in float32 and in order of ranks. What
        the rest of `flat` holds is of no use afterwards.
        """
        shares = flat.view(self.size, -1)
        mine = shares[self.rank]
        if not flat.numel():
            return
        with self.saying(what):
            if self.wire_dtype == torch.float32:
                reduce_scatter_single(mine, flat, group=self.group)
                return
            for start in range(0, mine.numel(), length := max(1, CHUNK // self.size)):
                sent = shares[:, start : start + length].to(self.wire_dtype, memory_format=torch.contiguous_format)
                received = torch.empty_like(sent)
                dist.all_to_all_single(received, sent, group=self.group)
                total = mine[start : start + length].copy_(received[0])
                for other in received[1:]:
                    total.add_(other)

    def collect(self, what: str, tensor: Tensor) -> None:
        """Make every rank's share of `tensor` (n elements, a multiple of the ranks) what it is on that rank."""
        if tensor.numel():
            with self.saying(what):
                all_gather_single(tensor, tensor.view(self.size, -1)[self.rank], group=self.group)

    def spread(self, what: str, tensor: Tensor, source: int) -> None:
        """Make `tensor` what it is on rank `source`."""
        if tensor.numel():
            with self.saying(what):
                dist.broadcast(tensor, group=self.group, group_src=source)

    def add_up(self, what: str, flat: Tensor) -> None:
        """Make `flat` (float32[n]) the sum over all ranks, the same bits on each, sent in `wire_dtype`."""
        for chunk in (flat,) if self.wire_dtype == torch.float32 else flat.split(CHUNK):
            Sum(self, what, chunk).finish()


class Sum:
    """One `add_up` that has begun. All ranks begin and finish theirs in the same order.

    In bfloat16 each rank adds up a share of the elements, in float32 and in order of ranks, so that a number is rounded
    once when it is sent and once when its sum is, however many ranks there are: 2 * (size - 1) / size * 2 bytes an
    element are sent by each rank, as in a ring.
    """

    def __init__(self, ranks: Ranks, what: str, flat: Tensor) -> None:
        self.ranks, self.what, self.flat = ranks, what, flat
        with ranks.saying(what):
            if ranks.wire_dtype == torch.float32:
                self.work = dist.all_reduce(flat, group=ranks.group, async_op=True)
                return
            share = -(-flat.numel() // ranks.size)
            self.sent = flat.new_zeros(share * ranks.size, dtype=ranks.wire_dtype)
            self.sent[: flat.numel()].copy_(flat)
            self.received = torch.empty_like(self.sent)
            self.work = dist.all_to_all_single(self.received, self.sent, group=ranks.group, async_op=True)

    def finish(self) -> None:
        ranks = self.ranks
        with ranks.saying(self.what):
            self.work.wait()
            if ranks.wire_dtype == torch.float32:
                return
            first, *others = self.received.view(ranks.size, -1)
            total = first.float()
            for other in others:
                total.add_(other)
            all_gather_single(self.sent, total.to(ranks.wire_dtype), group=ranks.group)
            self.flat.copy_(self.sent[: self.flat.numel()])


def as_bits(value: float) -> int:
    """The bits of a float64, as an integer of 64 bits."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def from_bits(bits: int) -> float:
    """What `as_bits` was given."""
    return struct.unpack("<d", struct.pack("<q", bits))[0]
