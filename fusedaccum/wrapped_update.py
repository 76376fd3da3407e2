"""The update at a boundary by the wrapped optimizer's own `step()`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedaccum.flat_buffer import FlatBuffer
from fusedaccum.local import like
from fusedaccum.options import parameters


def convert_moments(optimizer: Optimizer, param: Tensor, was: torch.dtype) -> None:
    """Bring what `optimizer` keeps for `param`, whose dtype `was` another, to its dtype, as loading a state would.

    Adam raises for moments of another dtype, with some step counts advanced. Scalars beside them keep theirs.
    """
    entries = optimizer.state.get(param, {})
    for key, value in entries.items():
        if key != "step" and isinstance(value, Tensor) and value.dtype == was and value.dim() == param.dim():
            entries[key] = value.to(param.dtype)


class WrappedUpdate:
    """The wrapped optimizer's own `step()`, on the mean gradient rounded once to each parameter's dtype."""

    name = "wrapped"

    def __init__(self, optimizer: Optimizer, live: bool = False, clips: bool = False) -> None:
        self.optimizer = optimizer
        self.live = live  # `p.grad` is what there is to update with, and stays
        self.clips = clips

    def replace(self, old: list[FlatBuffer], new: list[FlatBuffer]) -> None:
        pass

    def retype(self, param: Tensor, was: torch.dtype) -> None:
        convert_moments(self.optimizer, param, was)

    def prepare(self, buffers: list[FlatBuffer]) -> None:
        pass

    def take_back(self, buffers: list[FlatBuffer]) -> bool:
        """After `apply` raised: what the optimizer has done is its own affair, as without us."""
        return True

    def apply(self, buffers: list[FlatBuffer]) -> None:
        """Set `p.grad` of every touched parameter, call `optimizer.step()`, set it to None again.

        The gradients are the optimizer's to keep. They take the memory of a micro-batch's gradients, freed just before.
        A gradient that waits for the next `step()` when `flush()` is called is neither used nor lost, and with
        steps=None it stays.
        """
        there = [p for p in parameters(self.optimizer) if p.is_leaf or p.retains_grad]  # torch warns of the others
        waiting = {p: p.grad for p in there if p.grad is not None and not self._is_right(p)}
        for param in waiting:
            param.grad = None
        held: list[tuple[Tensor, torch.dtype | None]] = []
        given: list[tuple[Tensor, Tensor, int]] = []
        try:
            for buffer in buffers:
                held += self._give_gradients(buffer)
            if self.live:
                given = [(param, param.grad, param.grad._version) for param, _ in held]
            self.optimizer.step()
        finally:
            for param, grad, version in given:
                _follow_hooks(param, waiting, grad, version)
            for param, grad_dtype in held:
                if self.live and param not in waiting:
                    continue
                param.grad = None
                if grad_dtype is not None:
                    param.grad_dtype = grad_dtype
            for param, grad in waiting.items():
                param.grad = grad

    def _is_right(self, param: Tensor) -> bool:
        """Whether the optimizer can read `p.grad` as it is."""
        return self.live and not self.clips and param.grad.dtype == param.dtype

    def _give_gradients(self, buffer: FlatBuffer) -> list[tuple[Tensor, torch.dtype | None]]:
        """Set the gradients; returns the parameters with a `grad_dtype` to be set again, or None."""
        segments, marks = buffer.touched_segments(), buffer.marks.clone()
        grads = [buffer.absent] * len(buffer.params)
        held: list[tuple[Tensor, torch.dtype | None]] = []
        for k in [k for k in segments if self.live and buffer.params[k].grad is not None]:
            segments.remove(k)
            marks[k] = 0
        for k in segments:
            dtype = buffer.data(k).dtype
            real = torch.float32 if dtype.is_complex else dtype
            grads[k] = torch.empty(buffer.numels[k], dtype=real, device=buffer.device)
        buffer.backend.emit(buffer.flat, marks, buffer.live, buffer.segments, buffer.tiles, buffer.scalars, grads)
        live = [1] * len(grads) if buffer.live is None else buffer.live.tolist()
        for k in segments:
            if not live[k]:  # all its gradients were left out: as one without a gradient
                continue
            param, grad = buffer.params[k], grads[k]
            if param.is_complex():
                grad = torch.view_as_complex(grad.view(-1, 2))
            # Only leaves have one; what is not a leaf is what differentiable=True is for.
            wanted = param.grad_dtype if param.is_leaf else param.dtype
            if wanted not in (None, param.dtype):
                param.grad_dtype = None
            held.append((param, None if wanted == param.dtype else wanted))
            param.grad = like(param, grad.as_strided(buffer.shapes[k], buffer.strides[k]))
        return held


def _follow_hooks(param: Tensor, waiting: dict[Tensor, Tensor], given: Tensor, version: int) -> None:
    """After a `step()` whose hooks may have dropped, replaced or edited the gradient that it was given."""
    if param.grad is not given:
        waiting.pop(param, None)
    elif given._version != version and param in waiting:
        waiting[param].detach().copy_(given)
