"""The two kernels by themselves: a fold (first touch, later, last with the norm) and a step. Ours and their rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from bench.cases import BETAS, LR, SCALE, WEIGHT_DECAY, Case
from bench.harness import Part
from bench.window import adamw, parameters
from fusedaccum.backends import select
from fusedaccum.flat_buffer import FlatBuffer
from fusedaccum.ops import ADAM_COLUMNS

STAGES = ("first", "later", "last")
OURS = "fusedaccum"


def least_fold_bytes(stage: str, gradient_bytes: int) -> int:
    """Read the gradient, write the sum; from the second micro-batch on, read the sum as well. The norm adds nothing."""
    return gradient_bytes + (4 if stage == "first" else 8)


@dataclass
class Kernel:
    """A contender of one call. `result` shows what it left behind, for the comparison with float64 before the race."""

    name: str
    prepare: Callable[[], object]
    run: Callable[[], object]
    result: Callable[[], list[Tensor]]

    def parts(self) -> Iterable[Part]:
        yield (self.prepare, self.run)


def buffer_for(case: Case) -> FlatBuffer:
    return FlatBuffer([start.detach() for start in case.start], torch.device("cpu"), select(torch.device("cpu")))


def views(buffer: FlatBuffer) -> list[Tensor]:
    return [buffer.view(k) for k in range(len(buffer.params))]


def our_fold(case: Case, stage: str, grads: list[Tensor]) -> Kernel:
    buffer = buffer_for(case)
    if stage != "first":
        buffer.fold(list(grads), SCALE, norm=False)

    def run() -> None:
        buffer.fold(list(grads), SCALE, norm=stage == "last")
        if stage == "last":
            buffer.square_total()

    return Kernel(OURS, buffer.clear if stage == "first" else lambda: None, run, lambda: views(buffer))


def rival_folds(case: Case, stage: str, grads: list[Tensor]) -> list[Kernel]:
    """What a fold replaces. A first touch is at its best for them: a conversion, no zeroing and no scale."""
    kernels = []
    converted = [torch.empty(shape) for shape in case.shapes] if grads[0].dtype != torch.float32 else grads

    def add_kernel(name: str, copy: Callable, add: Callable) -> None:
        sums = [torch.zeros(shape) for shape in case.shapes]
        if stage != "first":
            add(sums)

        def run() -> None:
            (copy if stage == "first" else add)(sums)
            if stage == "last":
                torch.nn.utils.get_total_norm(sums, foreach=True)

        kernels.append(Kernel(name, lambda: None, run, lambda: sums))

    def copy_each(sums: list[Tensor]) -> None:
        for total, grad in zip(sums, grads, strict=True):
            total.copy_(grad)

    def add_each(sums: list[Tensor]) -> None:
        for total, grad in zip(sums, grads, strict=True):
            total.add_(grad, alpha=SCALE)

    def add_converted(sums: list[Tensor]) -> None:
        if converted is not grads:
            torch._foreach_copy_(converted, grads)
        torch._foreach_add_(sums, converted, alpha=SCALE)

    add_kernel("add_ per parameter", copy_each, add_each)
    add_kernel("_foreach_add_", lambda sums: torch._foreach_copy_(sums, grads), add_converted)
    return kernels


def check_fold(case: Case, stage: str, grads: list[Tensor], kernels: list[Kernel]) -> None:
    """Refuse to time a fold whose sums are not the float64 ones, to within two roundings of FP32."""
    for kernel in kernels:
        run_count = 1 if stage == "first" else 2  # one while it was built, and this one
        kernel.prepare()
        kernel.run()
        scale = 1.0 if stage == "first" and kernel.name != OURS else SCALE
        for index, (got, grad) in enumerate(zip(kernel.result(), grads, strict=True)):
            right = grad.double() * scale * run_count
            if not torch.allclose(got.double(), right, rtol=2**-22, atol=0.0):
                raise RuntimeError(f"fold, {stage}, {kernel.name}: the sum of parameter {index} is wrong; not timed")


def folds(case: Case, stage: str) -> list[Kernel]:
    """All contenders for one fold, checked."""
    grads = case.gradients[0]
    kernels = [our_fold(case, stage, grads), *rival_folds(case, stage, grads)]
    check_fold(case, stage, grads, kernels)
    return kernels


CLIP = 0.5  # a coefficient that both sides have to multiply with


def our_step(case: Case) -> Kernel:
    """The adam operator on a window that is closed already: the clip coefficient rides along as a scalar."""
    kind, params = case.kind, [start.clone() for start in case.start]
    buffer = buffer_for(case)
    buffer.fold([grad for grad in case.gradients[0]], 1.0, norm=False)
    buffer.steps.fill_(1.0)
    buffer.scalars.copy_(torch.tensor([CLIP, 0.0, 1.0]))
    moments = [[torch.zeros_like(p, dtype=kind.state_dtype) for p in params] for _ in range(2)]
    masters = [p.float() for p in params] if kind.masters else []
    values = {"lr": LR, "beta1": BETAS[0], "beta2": BETAS[1], "eps": case.eps, "weight_decay": WEIGHT_DECAY}
    row = [values.get(column, 1.0 if column == "decoupled" else 0.0) for column in ADAM_COLUMNS]
    hyper = torch.tensor([row], dtype=torch.float64)
    groups = torch.zeros(len(params), dtype=torch.int64)
    tables = (buffer.flat, buffer.marks, buffer.segments, buffer.tiles, buffer.scalars, buffer.steps, groups, hyper)
    lists = (params, *moments, [], masters)
    return Kernel(OURS, lambda: None, lambda: buffer.backend.adam(*tables, *lists, False), lambda: params)


def rival_step(case: Case) -> Kernel:
    """Clip, AdamW(fused=True), copy back, zero. Zeroing is part of a step here because ours leaves nothing to zero."""
    kind, params = case.kind, parameters(case)
    updated = [Parameter(p.detach().float()) for p in params] if kind.masters else params
    dtype = updated[0].dtype
    optimizer = adamw(updated, case, fused=True)
    for param in updated:
        param.grad = torch.empty_like(param)
    grads = [param.grad for param in updated]
    given = [grad.to(dtype) for grad in case.gradients[0]]

    def run() -> None:
        with torch.no_grad():
            torch._foreach_mul_(grads, CLIP)
            optimizer.step()
            if updated is not params:
                torch._foreach_copy_(params, updated)
            torch._foreach_zero_(grads)

    return Kernel("AdamW(fused=True)", lambda: torch._foreach_copy_(grads, given), run, lambda: params)


def check_step(case: Case, kernels: list[Kernel]) -> None:
    """Refuse to time steps that do not agree with the formula in float64 (first step: m and v start at zero)."""
    for kernel in kernels:
        kernel.prepare()
        kernel.run()
    state_eps = torch.finfo(case.kind.state_dtype).eps
    for index, start in enumerate(case.start):
        g = case.gradients[0][index].double() * CLIP
        right = start.double() * (1 - LR * WEIGHT_DECAY) - LR * g / (g.abs() + case.eps)
        # Some roundings of the parameter and of the update: enough to see other work, not to judge the last bit.
        limit = 2 * torch.finfo(case.kind.dtype).eps * right.abs() + 16 * state_eps * LR
        for kernel in kernels:
            off = (kernel.result()[index].detach().double() - right).abs()
            if not bool((off <= limit).all()):
                raise RuntimeError(f"step, {kernel.name}: parameter {index} is not the float64 result; not timed")


def steps(case: Case) -> list[Kernel]:
    """All contenders for one step, checked."""
    kernels = [our_step(case), rival_step(case)]
    check_step(case, kernels)
    return kernels
