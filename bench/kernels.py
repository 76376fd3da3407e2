"""The two kernels by themselves: a fold (first touch, later, last with the norm) and a step. Ours and their rivals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from bench.cases import BETAS, LR, SCALE, WEIGHT_DECAY, Case, pieces
from bench.harness import Part
from bench.window import adamw
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
    """A contender of one call. `result` shows what it left behind, for the comparison with float64 before the race.

    norm: of what a last fold left behind. scales_first: whether a first touch multiplies with SCALE too.
    """

    name: str
    prepare: Callable[[], object]
    run: Callable[[], object]
    result: Callable[[], list[Tensor]]
    norm: Callable[[], float] | None = None
    scales_first: bool = False

    def parts(self) -> Iterable[Part]:
        yield (self.prepare, self.run)


def buffer_for(case: Case, backend: str = "auto") -> FlatBuffer:
    """The gradients stand in for the parameters, whose shapes they have: a fold needs no more of them."""
    return FlatBuffer(list(case.gradients[0]), case.device, select(case.device, backend))


def views(buffer: FlatBuffer) -> list[Tensor]:
    return [buffer.view(k) for k in range(len(buffer.params))]


def our_fold(stage: str, grads: list[Tensor], buffer: FlatBuffer) -> Kernel:
    if stage != "first":
        buffer.fold(list(grads), SCALE, norm=False)

    def run() -> None:
        buffer.fold(list(grads), SCALE, norm=stage == "last")
        if stage == "last":
            buffer.square_total()

    prepare = buffer.clear if stage == "first" else lambda: None
    return Kernel(
        OURS, prepare, run, lambda: views(buffer), lambda: math.sqrt(float(buffer.total[0])), scales_first=True
    )


def rival_kernel(name: str, stage: str, sums: list[Tensor], copy: Callable, add: Callable) -> Kernel:
    """A rival's fold: `copy(sums)` on a first touch, else `add(sums)`; one was done when this returns."""
    norm: list[Tensor] = []
    if stage != "first":
        add(sums)

    def run() -> None:
        (copy if stage == "first" else add)(sums)
        if stage == "last":
            norm[:] = [torch.nn.utils.get_total_norm(sums, foreach=True)]

    return Kernel(name, lambda: None, run, lambda: sums, lambda: float(norm[0]))


def each_fold(stage: str, grads: list[Tensor], sums: list[Tensor]) -> Kernel:
    """One call per parameter."""

    def copy_each(sums: list[Tensor]) -> None:
        for total, grad in zip(sums, grads, strict=True):
            total.copy_(grad)

    def add_each(sums: list[Tensor]) -> None:
        for total, grad in zip(sums, grads, strict=True):
            total.add_(grad, alpha=SCALE)

    return rival_kernel("add_ per parameter", stage, sums, copy_each, add_each)


def foreach_fold(stage: str, grads: list[Tensor], sums: list[Tensor]) -> Kernel:
    """torch's lists of tensors. Adding another dtype to FP32 falls back to one call each, so it is converted first."""
    converted = grads
    if grads[0].dtype != torch.float32:
        converted = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]

    def add_converted(sums: list[Tensor]) -> None:
        if converted is not grads:
            torch._foreach_copy_(converted, grads)
        torch._foreach_add_(sums, converted, alpha=SCALE)

    return rival_kernel("_foreach_add_", stage, sums, lambda sums: torch._foreach_copy_(sums, grads), add_converted)


def check_fold(stage: str, grads: list[Tensor], kernels: list[Kernel]) -> None:
    """Refuse to time a fold whose sums or norm are not the float64 ones; sums to within two roundings of FP32."""
    for kernel in kernels:
        run_count = 1 if stage == "first" else 2  # one while it was built, and this one
        kernel.prepare()
        kernel.run()
        scale = 1.0 if stage == "first" and not kernel.scales_first else SCALE
        square = 0.0
        for got, grad in zip(pieces(kernel.result()), pieces(grads), strict=True):
            right = grad.double() * (scale * run_count)
            square += float(right.square().sum())
            if not torch.allclose(got.double(), right, rtol=2**-22, atol=0.0):
                raise RuntimeError(f"fold, {stage}, {kernel.name}: a sum is wrong; not timed")
        if stage == "last" and not math.isclose(kernel.norm(), math.sqrt(square), rel_tol=1e-3):
            raise RuntimeError(f"fold, {stage}, {kernel.name}: the norm is wrong; not timed")


def folds(case: Case, stage: str) -> list[Kernel]:
    """All contenders for one fold, checked."""
    grads = case.gradients[0]
    kernels = [our_fold(stage, grads, buffer_for(case))]
    for rival in (each_fold, foreach_fold):
        kernels.append(rival(stage, grads, [torch.zeros_like(grad, dtype=torch.float32) for grad in grads]))
    check_fold(stage, grads, kernels)
    return kernels


CLIP = 0.5  # a coefficient that both sides have to multiply with


@dataclass
class State:
    """What an update reads and writes beside the gradient. masters: empty where the kind has none."""

    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    masters: list[Tensor]

    @staticmethod
    def of(case: Case) -> State:
        params = [start.clone() for start in case.start]
        moments = [[torch.zeros_like(p, dtype=case.kind.state_dtype) for p in params] for _ in range(2)]
        return State(params, *moments, [p.float() for p in params] if case.kind.masters else [])

    def reset(self, case: Case) -> None:
        """As it was before the first update."""
        for tensors in (self.params, self.masters):
            if tensors:
                torch._foreach_copy_(tensors, case.start)
        torch._foreach_zero_([*self.exp_avgs, *self.exp_avg_sqs])


def our_step(case: Case, state: State, buffer: FlatBuffer) -> Kernel:
    """The adam operator on a window that is closed already: the clip coefficient rides along as a scalar."""
    buffer.fold(list(case.gradients[0]), 1.0, norm=False)
    buffer.steps.fill_(1.0)
    buffer.scalars.copy_(torch.tensor([CLIP, 0.0, 1.0]))
    values = {"lr": LR, "beta1": BETAS[0], "beta2": BETAS[1], "eps": case.eps, "weight_decay": WEIGHT_DECAY}
    row = [values.get(column, 1.0 if column == "decoupled" else 0.0) for column in ADAM_COLUMNS]
    hyper = torch.tensor([row], dtype=torch.float64, device=case.device)
    groups = torch.zeros(len(case.shapes), dtype=torch.int64, device=case.device)
    tables = (
        buffer.flat,
        buffer.marks,
        buffer.live,
        buffer.segments,
        buffer.tiles,
        buffer.scalars,
        buffer.steps,
        groups,
        hyper,
    )
    lists = (state.params, state.exp_avgs, state.exp_avg_sqs, [], state.masters, None)
    return Kernel(OURS, lambda: None, lambda: buffer.backend.adam(*tables, *lists, False), lambda: state.params)


def stock_adamw(params: list[Parameter], case: Case) -> torch.optim.Optimizer:
    return adamw(params, case, fused=True)


def rival_step(case: Case, state: State, name: str = "AdamW(fused=True)", make: Callable = stock_adamw) -> Kernel:
    """Clip, the optimizer's step, copy back, zero. Zeroing is part of it here because ours leaves nothing to zero.

    make(params, case): an optimizer with torch's state layout.
    """
    updated = [Parameter(tensor) for tensor in state.masters or state.params]
    dtype = updated[0].dtype
    optimizer = make(updated, case)
    for param, exp_avg, exp_avg_sq in zip(updated, state.exp_avgs, state.exp_avg_sqs, strict=True):
        step = torch.zeros((), dtype=torch.float32, device=param.device)
        optimizer.state[param] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        param.grad = torch.empty_like(param)
    grads = [param.grad for param in updated]
    given = [grad.to(dtype) for grad in case.gradients[0]]

    def run() -> None:
        with torch.no_grad():
            torch._foreach_mul_(grads, CLIP)
            optimizer.step()
            if state.masters:
                torch._foreach_copy_(state.params, state.masters)
            torch._foreach_zero_(grads)

    return Kernel(name, lambda: torch._foreach_copy_(grads, given), run, lambda: state.params)


def check_step(case: Case, kernels: list[Kernel]) -> None:
    """Refuse to time steps that do not agree with the formula in float64 (first step: m and v start at zero)."""
    state_eps = torch.finfo(case.kind.state_dtype).eps
    for kernel in kernels:
        kernel.prepare()
        kernel.run()
        lists = (case.start, case.gradients[0], kernel.result())
        for start, grad, got in zip(*map(pieces, lists), strict=True):
            g = grad.double().mul_(CLIP)
            right = start.double() * (1 - LR * WEIGHT_DECAY) - LR * g / (g.abs() + case.eps)
            # Some roundings of the parameter and of the update: enough to see other work, not to judge the last bit.
            limit = 2 * torch.finfo(case.kind.dtype).eps * right.abs() + 16 * state_eps * LR
            if not bool(((got.double() - right).abs() <= limit).all()):
                raise RuntimeError(f"step, {kernel.name}: a parameter is not the float64 result; not timed")


def steps(case: Case) -> list[Kernel]:
    """All contenders for one step, checked."""
    kernels = [our_step(case, State.of(case), buffer_for(case)), rival_step(case, State.of(case))]
    check_step(case, kernels)
    return kernels
