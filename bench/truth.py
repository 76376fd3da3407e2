"""The right result in float64, and what counts as having computed it.

A contender that did less work would win. So before anything is timed every contender runs two windows, with different
sums, and its parameters are compared with the same two windows in float64: a sum not zeroed, a lost tensor, a forgotten
clipping, weight decay or copy each leaves parameters far outside the bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cases import BETAS, LR, MAX_NORM, SCALE, WEIGHT_DECAY, Case

WINDOWS = 2


@dataclass
class Error:
    """How far parameters are from float64: root mean square, in units of the update's, and elements out of bound."""

    relative: float
    outside: int
    numel: int


def mean_gradients(case: Case, index: int, window: int) -> Tensor:
    """The window's mean gradient of one parameter, flat."""
    return sum(case.gradients[which][index].double().flatten() * SCALE for which in case.order(window))


def clip_factors(case: Case) -> list[float]:
    squares = [
        sum(float(mean_gradients(case, index, window).square().sum()) for index in range(len(case.shapes)))
        for window in range(WINDOWS)
    ]
    return [min(1.0, MAX_NORM / (math.sqrt(square) + 1e-6)) for square in squares]


def right_parameter(case: Case, index: int, factors: list[float]) -> Tensor:
    """One parameter after the two windows: AdamW as torch.optim documents it."""
    beta1, beta2 = BETAS
    p = case.start[index].double().flatten()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for window in range(WINDOWS):
        g, step = mean_gradients(case, index, window) * factors[window], window + 1
        p = p - LR * WEIGHT_DECAY * p
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        p = p - LR / (1 - beta1**step) * m / (v.sqrt() / math.sqrt(1 - beta2**step) + case.eps)
    return p


def bound(case: Case, right: Tensor) -> Tensor:
    """How far an element may be off: roundings of the parameter in its dtype, and of the update in the moments' dtype.

    A rounding is half a unit in the last place, at most eps / 2; 0.6 for a parameter that was a little larger then.
    Without masters each window rounds the parameter. An update is a quotient of about 1 * LR; moments of 8 bits and
    the mean gradient's own rounding to them shift it by some hundredths, FP32 ones by little even where sums cancel.
    """
    roundings = 1 if case.kind.masters else WINDOWS
    update = 0.1 if case.kind.state_dtype == torch.bfloat16 else 0.01
    return 0.6 * roundings * torch.finfo(case.kind.dtype).eps * right.abs() + update * WINDOWS * LR


def errors(case: Case, contenders: dict[str, Sequence[Tensor]]) -> dict[str, Error]:
    """Compare each contender's parameters after the two windows with float64, one parameter at a time."""
    factors = clip_factors(case)
    square = dict.fromkeys(contenders, 0.0)
    outside = dict.fromkeys(contenders, 0)
    moved = 0.0
    for index in range(len(case.shapes)):
        right = right_parameter(case, index, factors)
        limit = bound(case, right)
        moved += float((right - case.start[index].double().flatten()).square().sum())
        for name, params in contenders.items():
            off = (params[index].detach().double().flatten() - right).abs()
            square[name] += float(off.square().sum())
            outside[name] += int((~(off <= limit)).sum())
    return {name: Error(math.sqrt(square[name] / moved), outside[name], case.numel) for name in contenders}


# Sums in the parameter's own low precision lose bits where gradients cancel: the disease, not a benchmark gone wrong.
LOSSY_SHARE = 0.01


def refuse_wrong(found: dict[str, Error], lossy: set[str]) -> None:
    """Raise where a contender did not compute what it was asked to: its time would mean nothing."""
    for name, error in found.items():
        allowed = int(LOSSY_SHARE * error.numel) if name in lossy else 0
        if error.outside > allowed or not math.isfinite(error.relative):
            raise RuntimeError(
                f"{name}: {error.outside} of {error.numel} parameters are farther from the float64 result than "
                f"rounding explains ({allowed} allowed); it did other work than asked, so it is not timed"
            )
