"""Whole windows: eight micro-batches, clip to a norm of 1.0, AdamW. Ours through the public wrapper, and its rivals.

A gradient arrives as a tensor of the parameter's dtype. Handing it over is the backward's work and is not timed; what
is done with it is. Every rival does the whole job: it scales by 1/8, sums, zeroes, clips with
`torch.nn.utils.clip_grad_norm_`, steps `AdamW(fused=True)` on what it updates, and copies masters back.

A rival is a way to sum (a `Sums` class) in front of that boundary. Scaling costs nothing anywhere: it is the `alpha` of
an addition, and exact, so that it also stands for a loss divided by eight.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from bench.cases import BETAS, LR, MAX_NORM, MICRO_BATCHES, SCALE, WEIGHT_DECAY, Case
from bench.harness import Part


def adamw(params: list[Parameter], case: Case, **how: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LR, betas=BETAS, eps=case.eps, weight_decay=WEIGHT_DECAY, **how)


def parameters(case: Case) -> list[Parameter]:
    return [Parameter(start.clone()) for start in case.start]


class Window:
    """What contenders share: parameters of their own, and the two kinds of window (see `Case.order`)."""

    name: str

    def __init__(self, case: Case) -> None:
        self.case = case
        self.params = parameters(case)

    def give(self, index: int, first: bool) -> None:
        """Hand over a micro-batch's gradients, as autograd does when p.grad is None: without a copy."""
        for param, grad in zip(self.params, self.case.gradients[index], strict=True):
            param.grad = grad

    def add(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def parts(self, window: int = 0) -> Iterable[Part]:
        for number, index in enumerate(self.case.order(window)):
            yield (lambda index=index, first=number == 0: self.give(index, first), self.add)
        yield (lambda: None, self.close)


class Ours(Window):
    """The public wrapper, as in the README: step() and zero_grad() in every micro-batch; the eighth updates."""

    name = "fusedaccum"
    backend = "auto"

    def __init__(self, case: Case) -> None:
        from fusedaccum import FusedAccumOptimizer

        super().__init__(case)
        own_state = case.kind.state_dtype != case.kind.dtype
        with warnings.catch_warnings():
            # bf16 parameters without masters are measured on purpose, against rivals that do the same.
            warnings.filterwarnings("ignore", message=".*master_weights.*")
            self.optimizer = FusedAccumOptimizer(
                adamw(self.params, case),
                steps=MICRO_BATCHES,
                max_norm=MAX_NORM,
                update="fused",
                master_weights=case.kind.masters,
                state_dtype=case.kind.state_dtype if own_state else None,
                backend=self.backend,
            )

    def add(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        """Nothing is left to do: the eighth step was the update."""


class Rival(Window):
    """The boundary all rivals share. A subclass fills `self.sums` (what is clipped) in `add`.

    `self.updated` is what AdamW works on: the masters where there are any, else the parameters. Where sums are FP32 and
    the parameters are not, AdamW wants their dtype, and the sums are rounded to it once (`self.rounded`).
    """

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.updated = [Parameter(p.detach().float()) for p in self.params] if case.kind.masters else self.params
        self.sums = self.make_sums()
        differ = self.sums[0].dtype != self.updated[0].dtype
        self.rounded = [torch.empty_like(p) for p in self.updated] if differ else self.sums
        self.optimizer = self.make_optimizer()

    def make_sums(self) -> list[Tensor]:
        return [torch.zeros(shape, device=self.case.device) for shape in self.case.shapes]

    def make_optimizer(self) -> torch.optim.Optimizer:
        return adamw(self.updated, self.case, fused=True)

    def collect(self) -> list[Tensor]:
        """The micro-batch's gradients, dropped from the parameters as a training loop does."""
        grads = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        return grads

    @torch.no_grad()
    def close(self) -> None:
        if self.rounded is not self.sums:
            torch._foreach_copy_(self.rounded, self.sums)
        for param, grad in zip(self.updated, self.rounded, strict=True):
            param.grad = grad
        torch.nn.utils.clip_grad_norm_(self.updated, MAX_NORM, foreach=True)
        self.optimizer.step()
        if self.updated is not self.params:
            torch._foreach_copy_(self.params, self.updated)
        self.zero()

    def zero(self) -> None:
        torch._foreach_zero_(self.sums)


class StockSums(Rival):
    """Autograd's own accumulation: the first gradient becomes p.grad, later ones are added in the parameter's dtype.

    Autograd adds one tensor after another in C++, as the CPU's `_foreach_add_` does: a Python loop would charge it with
    costs it has not.
    """

    name = "autograd sums in the parameter's dtype"

    def make_sums(self) -> list[Tensor]:
        return [torch.empty_like(p) for p in self.params]

    def give(self, index: int, first: bool) -> None:
        self.incoming = None if first else self.case.gradients[index]
        if first:  # taking over a gradient is free, and the gradients here are used again: copied before the clock runs
            for total, grad in zip(self.sums, self.case.gradients[index], strict=True):
                torch.mul(grad, SCALE, out=total)

    def add(self) -> None:
        if self.incoming is not None:
            torch._foreach_add_(self.sums, self.incoming, alpha=SCALE)

    def zero(self) -> None:
        """set_to_none: nothing to write."""


class ViewSums(Rival):
    """p.grad as an FP32 view of one flat buffer (p.grad_dtype = None): autograd adds bf16 gradients into it itself."""

    name = "autograd into FP32 views"

    def make_sums(self) -> list[Tensor]:
        self.flat = torch.zeros(self.case.numel, device=self.case.device)
        sizes = [start.numel() for start in self.case.start]
        return [part.view(shape) for part, shape in zip(self.flat.split(sizes), self.case.shapes, strict=True)]

    def give(self, index: int, first: bool) -> None:
        self.incoming = self.case.gradients[index]

    def add(self) -> None:
        torch._foreach_add_(self.sums, self.incoming, alpha=SCALE)  # in C++, as in StockSums

    def zero(self) -> None:
        self.flat.zero_()


class AddSums(Rival):
    """One main_grad.add_(grad) per parameter."""

    name = "main_grad.add_ per parameter"

    @torch.no_grad()
    def add(self) -> None:
        for param, total in zip(self.params, self.sums, strict=True):
            total.add_(param.grad, alpha=SCALE)
            param.grad = None


class ForeachSums(Rival):
    """_foreach_add_. A bf16 list is first converted into memory kept for that.

    Adding it as it is lets torch allocate and drop an FP32 copy of every tensor, which takes longer on large ones.
    """

    name = "_foreach_add_"

    def make_sums(self) -> list[Tensor]:
        convert = self.case.kind.dtype != torch.float32
        self.converted = (
            [torch.empty(shape, device=self.case.device) for shape in self.case.shapes] if convert else None
        )
        return super().make_sums()

    @torch.no_grad()
    def add(self) -> None:
        grads = self.collect()
        if self.converted is not None:
            torch._foreach_copy_(self.converted, grads)
            grads = self.converted
        torch._foreach_add_(self.sums, grads, alpha=SCALE)


def add_all(sums: list[Tensor], grads: list[Tensor]) -> None:
    for total, grad in zip(sums, grads, strict=True):
        total.add_(grad, alpha=SCALE)


class CompiledSums(Rival):
    """torch.compile over the sums, AdamW(fused=True) at the boundary."""

    name = "torch.compile, sums"
    most_tensors = 500  # compiling 10,000 loops does not end

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.compiled_add = torch.compile(add_all, dynamic=False)

    @torch.no_grad()
    def add(self) -> None:
        self.compiled_add(self.sums, self.collect())


class CompiledWindow(CompiledSums):
    """torch.compile over the sums and over the whole boundary, with the optimizer that it can see into."""

    name = "torch.compile, sums and boundary"
    most_tensors = 150  # the boundary of 148 tensors compiles in minutes

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.close = torch.compile(super().close, dynamic=False)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return adamw(self.updated, self.case, foreach=True)


class DeepSpeedWindow(AddSums):
    """AddSums in front of DeepSpeed's CPU optimizer, where that is installed."""

    name = "main_grad.add_ + DeepSpeedCPUAdam"

    def make_optimizer(self) -> torch.optim.Optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(
            self.updated, lr=LR, betas=BETAS, eps=self.case.eps, weight_decay=WEIGHT_DECAY, adamw_mode=True
        )


RIVALS: dict[str, tuple[type[Rival], ...]] = {
    "masters": (ViewSums, AddSums, ForeachSums, CompiledSums, CompiledWindow, DeepSpeedWindow),
    "bf16": (StockSums, AddSums, ForeachSums, CompiledSums, CompiledWindow),
    "fp32": (StockSums, AddSums, ForeachSums, CompiledSums, CompiledWindow, DeepSpeedWindow),
}


def contenders(kind: str, tensors: int, compiled: bool) -> tuple[list[Callable[[Case], Window]], dict[str, str]]:
    """The rivals that can run, and by name why each of the others cannot."""
    present: list[Callable[[Case], Window]] = []
    absent: dict[str, str] = {}
    for rival in RIVALS[kind]:
        if rival is DeepSpeedWindow and importlib.util.find_spec("deepspeed") is None:
            absent[rival.name] = "deepspeed is not installed"
        elif issubclass(rival, CompiledSums) and not compiled:
            absent[rival.name] = "left out by --no-compile"
        elif issubclass(rival, CompiledSums) and tensors > rival.most_tensors:
            absent[rival.name] = f"not compiled for more than {rival.most_tensors} tensors: it takes too long"
        else:
            present.append(rival)
    return present, absent
