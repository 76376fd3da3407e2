"""What the demo measures: distances of gradient sums, bytes, seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


class GradientMeter:
    """Distance of a summed gradient from the float64 sum of the very micro-gradients that went into it.

    Between `open` and `close` a hook on each parameter adds every incoming gradient in float64, before it reaches
    `p.grad`, and leaves it as it is.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.sums: list[Tensor] = []
        self.handles: list[torch.utils.hooks.RemovableHandle] = []

    def open(self) -> None:
        self.sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in self.parameters]
        for parameter, total in zip(self.parameters, self.sums, strict=True):
            self.handles.append(parameter.register_hook(self.adder(total)))

    @staticmethod
    def adder(total: Tensor) -> Callable[[Tensor], None]:
        def add(gradient: Tensor) -> None:
            total.add_(gradient)

        return add

    def distance(self, gradients: Iterable[Tensor], scale: float) -> float:
        """|gradients - scale * sums| / |scale * sums| over all parameters (L2, float64)."""
        error = norm = 0.0
        for gradient, total in zip(gradients, self.sums, strict=True):
            error += (gradient.double() - scale * total).square().sum().item()
            norm += (scale * total).square().sum().item()
        return (error / norm) ** 0.5

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.sums.clear()


class Clock:
    """Seconds per phase; starting one ends the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.phase: str | None = None
        self.since = 0.0

    def start(self, phase: str | None) -> None:
        now = time.perf_counter()
        if self.phase is not None:
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self.since
        self.phase, self.since = phase, now

    def stop(self) -> None:
        self.start(None)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory that hold these tensors; a storage that several of them share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def activation_bytes(forward: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """Bytes that one forward keeps for its backward, parameters left out."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward()
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    held = bytes_of(tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in own)
    del loss
    return held
