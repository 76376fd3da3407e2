"""Contenders beside those of the CPU: autograd's own additions, torch.compile, Apex, TransformerEngine, DeepSpeed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bench import window
from bench.cases import BETAS, LR, WEIGHT_DECAY, Case
from bench.kernels import SCALE, Kernel, rival_kernel


class HandOver(torch.autograd.Function):
    """A node that hands prepared gradients to its inputs: what is left of a backward is autograd's own accumulation.

    Added one after another in C++ (AccumulateGrad), which is what a training step does; a loop in Python is slower, and
    `_foreach_add_` is faster.
    """

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.grads)


def shapes_only(grads: list[Tensor]) -> list[Parameter]:
    """Parameters that own one element of memory each, and take gradients of any dtype."""
    params = [Parameter(grad.new_empty(()).expand(grad.shape)) for grad in grads]
    for param in params:
        param.grad_dtype = None
    return params


def views_fold(stage: str, scaled: list[Tensor], sums: list[Tensor]) -> Kernel:
    """p.grad as an FP32 view (p.grad_dtype = None). Autograd does not overwrite: a first touch is zeroed and added to.

    scaled: gradients of a loss that was divided.
    """
    params = shapes_only(scaled)
    for param, total in zip(params, sums, strict=True):
        param.grad = total
    roots: list[Tensor] = []

    def prepare() -> None:
        roots[:] = [HandOver.apply(scaled, *params)]

    def add(_: list[Tensor]) -> None:
        roots.pop().backward()

    def zero_and_add(sums: list[Tensor]) -> None:
        torch._foreach_zero_(sums)
        add(sums)

    prepare()
    kernel = rival_kernel("autograd into FP32 views", stage, sums, zero_and_add, add)
    kernel.prepare, kernel.scales_first = prepare, True
    return kernel


class AutogradSums(window.StockSums):
    """Autograd's own accumulation, in the parameter's dtype."""

    def give(self, index: int, first: bool) -> None:
        scaled = self.case.scale(index)
        if first:  # autograd would keep the tensor that it gets, which is the case's
            torch._foreach_copy_(self.sums, scaled)
        for param, total in zip(self.params, self.sums, strict=True):
            param.grad = total
        self.root = None if first else HandOver.apply(scaled, *self.params)

    def add(self) -> None:
        if self.root is not None:
            self.root.backward()
            self.root = None


class AutogradViewSums(window.ViewSums):
    """p.grad as an FP32 view of one flat buffer, filled by autograd itself."""

    def give(self, index: int, first: bool) -> None:
        for param, total in zip(self.params, self.sums, strict=True):
            param.grad_dtype = None
            param.grad = total
        self.root = HandOver.apply(self.case.scale(index), *self.params)

    def add(self) -> None:
        self.root.backward()
        self.root = None


WINDOWS: dict[str, tuple[type[window.Rival], ...]] = {
    "masters": (AutogradViewSums, window.AddSums, window.ForeachSums),
    "bf16": (AutogradSums, window.AddSums, window.ForeachSums),
    "fp32": (AutogradSums, window.AddSums, window.ForeachSums),
}


COMPILED = "torch.compile, add_ per parameter"


def compiled_fold(stage: str, grads: list[Tensor], sums: list[Tensor]) -> Kernel:
    """add_ per parameter, compiled. A first touch is left to a copy."""
    compiled = torch.compile(window.add_all, dynamic=False)
    copy = torch._foreach_copy_
    return rival_kernel(COMPILED, stage, sums, lambda sums: copy(sums, grads), lambda sums: compiled(sums, grads))


def apex_fold(module: ModuleType, stage: str, grads: list[Tensor], sums: list[Tensor]) -> Kernel:
    """Apex's multi-tensor axpby, which mixes dtypes."""
    apply = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
    overflow = torch.zeros(1, dtype=torch.int, device=sums[0].device)

    def add(sums: list[Tensor]) -> None:
        apply(module.multi_tensor_axpby, overflow, [sums, grads, sums], 1.0, SCALE, -1)

    return rival_kernel("Apex multi_tensor_axpby", stage, sums, lambda sums: torch._foreach_copy_(sums, grads), add)


def adam_of(module: ModuleType) -> Callable[[list[Parameter], Case], torch.optim.Optimizer]:
    """Apex, TransformerEngine and DeepSpeed each have a FusedAdam with the same arguments."""

    def make(params: list[Parameter], case: Case) -> torch.optim.Optimizer:
        options = {"lr": LR, "betas": BETAS, "eps": case.eps, "weight_decay": WEIGHT_DECAY}
        return module.FusedAdam(params, adam_w_mode=True, **options)

    return make


# name: the module that has it
APEX_FOLD = ("Apex multi_tensor_axpby", "amp_C")
ADAMS = {
    "Apex FusedAdam": "apex.optimizers",
    "TransformerEngine FusedAdam": "transformer_engine.pytorch.optimizers",
    "DeepSpeed FusedAdam": "deepspeed.ops.adam",
}
# Its sums are main_grad.add_ per parameter, or part of a matrix product, and its optimizer is Apex's or
# TransformerEngine's: there is nothing left to call that is not here already.
MEGATRON = "Megatron: its sums are the add_ per parameter, its optimizer Apex's or TransformerEngine's"


def installed(name: str) -> ModuleType | None:
    """The module, or None where there is no such package. Other failures are the caller's to report."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
            raise
        return None
