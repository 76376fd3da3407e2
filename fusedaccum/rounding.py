"""Stochastic rounding of bfloat16 parameters in the fused update: what its random numbers are made of."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedaccum.flat_buffer import FlatBuffer, to_device
from fusedaccum.options import NAME, parameters


def check_rounded(params: Iterable[Tensor]) -> None:
    """Refuse parameters that would be rounded to nearest where the others are not. Frozen ones are left alone."""
    for i, p in enumerate(params):
        if p.dtype == torch.float16 and (p.requires_grad or p.grad is not None):
            raise ValueError(
                f"{NAME}: parameter {i} of shape {tuple(p.shape)} is {p.dtype}, and rounding='stochastic' is for "
                "bfloat16 parameters (float32 ones need none); convert it to bfloat16, or use master_weights=True "
                "instead"
            )


class Rounding:
    """The random numbers of one optimizer: a seed, and the number of the next update.

    state: int64[2], both of them. On the device, so that a CUDA graph draws new numbers at every replay. torch's own
    generators are neither read nor advanced.
    """

    def __init__(self, optimizer: Optimizer, seed: int) -> None:
        self.optimizer = optimizer
        self.first = (seed, 0)
        self.state = torch.tensor(self.first, dtype=torch.int64, device="cpu")

    def move(self, device: torch.device) -> None:
        """Have the state on `device`."""
        if self.state.device.type == "cpu":
            self.state = to_device(self.state, device)
        else:
            self.state = self.state.to(device)

    def advance(self) -> None:
        """On the device, now or at every replay: the next update is another one, skipped or not."""
        self.state[1].add_(1)

    def save(self) -> tuple[int, ...]:
        """(seed, number of the next update). Waits for the device."""
        return tuple(self.state.tolist())

    def load(self, saved: tuple[int, ...]) -> None:
        """Go on with what `save` returned; from the beginning where that was nothing."""
        self.state.copy_(torch.tensor(saved or self.first, dtype=torch.int64, device="cpu"))


class RandomTable:
    """What the operators take as `random`, for one flat buffer.

    The stream of a segment is its parameter's position in the optimizer, so that it keeps its numbers in a buffer that
    is built anew, on another device, or beside parameters that are frozen or not. Each shard of a DTensor has a stream
    of its own, and replicas have the same: with another number of shards the numbers are others.
    """

    def __init__(self, rounding: Rounding, buffer: FlatBuffer) -> None:
        self.rounding = rounding
        self.buffer = buffer
        self.tensor: Tensor | None = None
        self.streams: list[int] = []

    def prepare(self) -> None:
        """Make the table fit the parameters. Raises ValueError for such as cannot be rounded."""
        check_rounded(self.buffer.params)
        if not self.is_current():
            self.streams = self._streams_now()
            facts = torch.tensor([0, 0, *self.streams], dtype=torch.int64, device="cpu")
            self.tensor = to_device(facts, self.buffer.device)

    def is_current(self) -> bool:
        return self.tensor is not None and self.streams == self._streams_now()

    def read(self) -> Tensor:
        """The table for the next update."""
        self.tensor[:2].copy_(self.rounding.state)
        return self.tensor

    def _streams_now(self) -> list[int]:
        position = {id(p): i for i, p in enumerate(dict.fromkeys(parameters(self.rounding.optimizer)))}
        spread = self.buffer.spread
        first = 0 if spread is None else len(position) * spread.shard
        return [first + position[id(p)] for p in self.buffer.params]
