"""The specification of the operators in plain torch: one segment after the other, in the words of `fusedaccum.ops`.

It runs on every device and is meant to be read, not to be fast: it looks at marks and scalars on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fusedaccum.backends import _checks as check
from fusedaccum.backends._reference_random import stochastic
from fusedaccum.ops import ADAM_COLUMNS, FRESH, SGD_COLUMNS, TOUCHED


def why_not(device: torch.device) -> str | None:
    """None: plain torch serves every device that holds values."""
    if device.type != "meta":
        return None
    return "tensors on meta hold no values; model.to_empty() makes parameters that do, to be put into param_groups"


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c on float32 with one rounding, as the fused multiply-add of a processor gives it.

    The product of two float32 is exact in float64, the sum is not, and rounding it to float64 and then to float32 can
    differ from rounding once. So the float64 sum is rounded to odd: where it is inexact, its last bit is set, and the
    second rounding sees on which side of a tie the exact sum lies (Boldo and Melquiond 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # The exact error of that sum (Knuth's TwoSum).
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    toward_exact = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & total.isfinite() & (bits % 2 == 0), bits + toward_exact, bits)
    return odd.view(torch.float64).float()


@torch.no_grad()
def fold(
    flat: Tensor,
    partials: Tensor,
    marks: Tensor,
    live: Tensor | None,
    segments: Tensor,
    tiles: Tensor,
    grads: Sequence[Tensor | None],
    scale: Tensor,
    norm: bool,
) -> None:
    check.plan("fold", flat, marks, segments, tiles, live)
    check.one("fold", "partials", partials, torch.float64, (tiles.shape[0],), flat.device)
    check.one("fold", "scale", scale, torch.float32, (1,), flat.device)
    check.listed("fold", "grads", grads, flat, segments, absent="None")

    for k, grad in enumerate(grads):
        if grad is None:
            continue
        master_grad = _segment(flat, segments, k)
        # A select, not a product: 0 * inf is not 0.
        addend = torch.where(scale == 0, 0.0, grad.view(-1).float())
        if marks[k] & TOUCHED:
            master_grad.copy_(fma(scale, addend, master_grad))
        else:
            master_grad.copy_(torch.where(scale == 0, 0.0, scale * addend))
        marks[k] = TOUCHED | FRESH if norm else TOUCHED
        if live is not None and grad.numel() > 0 and scale != 0:
            live[k] = 1
    if norm:
        _sum_squares(flat, partials, tiles, [grad is not None for grad in grads])


@torch.no_grad()
def found_inf(
    flat: Tensor, marks: Tensor, segments: Tensor, tiles: Tensor, grads: Sequence[Tensor | None], found_inf: Tensor
) -> None:
    check.plan("found_inf", flat, marks, segments, tiles)
    check.listed("found_inf", "grads", grads, flat, segments, absent="None")
    check.one("found_inf", "found_inf", found_inf, torch.float32, (1,), flat.device)

    found_inf[0] = float(not all(bool(grad.isfinite().all()) for grad in grads if grad is not None))


@torch.no_grad()
def square_total(flat: Tensor, partials: Tensor, marks: Tensor, segments: Tensor, tiles: Tensor, total: Tensor) -> None:
    check.plan("square_total", flat, marks, segments, tiles)
    check.norm("square_total", flat, partials, tiles, total)

    _sum_squares(flat, partials, tiles, (marks == TOUCHED).tolist())
    touched = (marks & TOUCHED) != 0
    marks[touched] = TOUCHED | FRESH
    # Partials of untouched segments are left over from earlier windows, and may be anything.
    total[0] = torch.where(touched.to(flat.device)[tiles[:, 0]], partials, 0.0).sum()


@torch.no_grad()
def close_window(
    scalars: Tensor,
    steps: Tensor,
    marks: Tensor,
    live: Tensor | None,
    total: Tensor,
    divisor: Tensor,
    max_norm: float,
    skip_nonfinite: bool,
) -> None:
    check.window("close_window", scalars, steps, marks, live, total, divisor)

    empty = divisor == 0
    skip = empty | ~total.isfinite() if skip_nonfinite else empty
    norm = total.sqrt() / divisor
    # clamp keeps a norm that is not a number. Without clipping the norm has no say at all.
    clip = torch.ones_like(norm) if max_norm == float("inf") else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    multiplier = 1 / divisor * clip
    scalars.copy_(torch.cat([multiplier.masked_fill(skip, 0), skip.double(), norm.masked_fill(empty, 0)]))
    counted = ((marks & TOUCHED) != 0).to(steps.device) & ~skip
    steps.add_(counted if live is None else counted & (live != 0))


@torch.no_grad()
def rescale(flat: Tensor, marks: Tensor, segments: Tensor, tiles: Tensor, factor: Tensor) -> None:
    check.plan("rescale", flat, marks, segments, tiles)
    check.one("rescale", "factor", factor, torch.float32, (1,), flat.device)

    for k in _touched(marks):
        _segment(flat, segments, k).mul_(factor)
    marks.bitwise_and_(TOUCHED)


@torch.no_grad()
def emit(
    flat: Tensor,
    marks: Tensor,
    live: Tensor | None,
    segments: Tensor,
    tiles: Tensor,
    scalars: Tensor,
    grads: Sequence[Tensor],
) -> None:
    check.plan("emit", flat, marks, segments, tiles, live)
    check.one("emit", "scalars", scalars, torch.float32, (3,), flat.device)
    check.listed("emit", "grads", grads, flat, segments, absent="empty", marks=marks)

    multiplier, skip, _ = scalars
    if skip:
        return
    for k in _touched(marks, live):
        _store(grads[k], _segment(flat, segments, k) * multiplier)


@torch.no_grad()
def adam(
    flat: Tensor,
    marks: Tensor,
    live: Tensor | None,
    segments: Tensor,
    tiles: Tensor,
    scalars: Tensor,
    steps: Tensor,
    groups: Tensor,
    hyper: Tensor,
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor],
    random: Tensor | None,
    zero: bool,
) -> None:
    check.plan("adam", flat, marks, segments, tiles, live)
    check.update("adam", flat, segments, scalars, steps, groups, hyper, ADAM_COLUMNS, random)
    check.listed("adam", "params", params, flat, segments, absent="empty", marks=marks)
    check.listed("adam", "exp_avgs", exp_avgs, flat, segments, absent="empty", marks=marks)
    check.listed("adam", "exp_avg_sqs", exp_avg_sqs, flat, segments, absent="empty", marks=marks)
    check.listed("adam", "max_exp_avg_sqs", max_exp_avg_sqs, flat, segments, absent="empty")
    check.listed("adam", "masters", masters, flat, segments, check.SINGLE, absent="empty")

    multiplier, skip, _ = scalars
    for k in _touched(marks, live):
        master_grad = _segment(flat, segments, k)
        if master_grad.numel() and not skip:
            option = dict(zip(ADAM_COLUMNS, hyper[groups[k]], strict=True))
            p = _entry(masters, k) if _has(masters, k) else _entry(params, k)
            g = master_grad * (-multiplier if option["maximize"] else multiplier)
            p, m, v, v_max = _adam_rule(
                option,
                steps[k].double(),
                g,
                p,
                _entry(exp_avgs, k),
                _entry(exp_avg_sqs, k),
                _entry(max_exp_avg_sqs, k) if option["amsgrad"] and _has(max_exp_avg_sqs, k) else None,
            )
            _store(params[k], p if _has(masters, k) else _rounded(p, params[k].dtype, random, k))
            _store(exp_avgs[k], m)
            _store(exp_avg_sqs[k], v)
            if v_max is not None:
                _store(max_exp_avg_sqs[k], v_max)
            if _has(masters, k):
                _store(masters[k], p)
        if zero:
            master_grad.zero_()


def _adam_rule(
    option: dict[str, Tensor], step: Tensor, g: Tensor, p: Tensor, m: Tensor, v: Tensor, v_max: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One update of one segment, float32 in and out. Options and step are float64, and so is what is made of them."""
    lr, beta1, beta2, weight_decay = (option[name] for name in ("lr", "beta1", "beta2", "weight_decay"))
    step_size = (lr / (1 - beta1**step)).float()
    root_correction = (1 - beta2**step).sqrt().float()
    # A weight decay of 0 is left out: 0 * p is not 0 where p is infinite.
    if weight_decay != 0 and option["decoupled"]:
        p = fma(-(lr * weight_decay).float(), p, p)
    elif weight_decay != 0:
        g = fma(weight_decay.float(), p, g)
    m = fma((1 - beta1).float(), g - m, m)
    v = fma((1 - beta2).float() * g, g, beta2.float() * v)
    v_hat = v
    if v_max is not None:
        v_hat = v_max = torch.maximum(v_max, v)
    p = fma(-step_size, m / (v_hat.sqrt() / root_correction + option["eps"].float()), p)
    return p, m, v, v_max


@torch.no_grad()
def sgd(
    flat: Tensor,
    marks: Tensor,
    live: Tensor | None,
    segments: Tensor,
    tiles: Tensor,
    scalars: Tensor,
    steps: Tensor,
    groups: Tensor,
    hyper: Tensor,
    params: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    masters: Sequence[Tensor],
    random: Tensor | None,
    zero: bool,
) -> None:
    check.plan("sgd", flat, marks, segments, tiles, live)
    check.update("sgd", flat, segments, scalars, steps, groups, hyper, SGD_COLUMNS, random)
    check.listed("sgd", "params", params, flat, segments, absent="empty", marks=marks)
    check.listed("sgd", "momentum_buffers", momentum_buffers, flat, segments, absent="empty")
    check.listed("sgd", "masters", masters, flat, segments, check.SINGLE, absent="empty")

    multiplier, skip, _ = scalars
    for k in _touched(marks, live):
        master_grad = _segment(flat, segments, k)
        if master_grad.numel() and not skip:
            option = dict(zip(SGD_COLUMNS, hyper[groups[k]], strict=True))
            p = _entry(masters, k) if _has(masters, k) else _entry(params, k)
            g = master_grad * (-multiplier if option["maximize"] else multiplier)
            if option["weight_decay"] != 0:
                g = fma(option["weight_decay"].float(), p, g)
            if option["momentum"] != 0 and _has(momentum_buffers, k):
                momentum = option["momentum"].float()
                b = g
                if steps[k] != 1:
                    b = fma(momentum, _entry(momentum_buffers, k), (1 - option["dampening"]).float() * g)
                g = fma(momentum, b, g) if option["nesterov"] else b
                _store(momentum_buffers[k], b)
            p = fma(-option["lr"].float(), g, p)
            _store(params[k], p if _has(masters, k) else _rounded(p, params[k].dtype, random, k))
            if _has(masters, k):
                _store(masters[k], p)
        if zero:
            master_grad.zero_()


def _touched(marks: Tensor, live: Tensor | None = None) -> Iterator[int]:
    alive = [1] * len(marks) if live is None else live.tolist()
    return (k for k, mark in enumerate(marks.tolist()) if mark & TOUCHED and alive[k])


def _segment(flat: Tensor, segments: Tensor, k: int) -> Tensor:
    offset, numel = segments[k].tolist()
    return flat[offset : offset + numel]


def _has(tensors: Sequence[Tensor], k: int) -> bool:
    return len(tensors) > 0 and tensors[k].numel() > 0


def _entry(tensors: Sequence[Tensor], k: int) -> Tensor:
    """Entry k in memory order, as float32."""
    return tensors[k].view(-1).float()


def _rounded(p: Tensor, dtype: torch.dtype, random: Tensor | None, k: int) -> Tensor:
    """`p` as a parameter of segment k stores it: rounded stochastically, where that is asked for."""
    return p if random is None or dtype != torch.bfloat16 else stochastic(p, random, k)


def _store(tensor: Tensor, values: Tensor) -> None:
    """The one rounding, where `values` are not rounded yet: copy_ rounds to nearest even."""
    tensor.view(-1).copy_(values)


def _sum_squares(flat: Tensor, partials: Tensor, tiles: Tensor, wanted: list[bool]) -> None:
    """partials = the sum of squares of the elements of each tile whose segment is wanted."""
    for t, (k, _, start, count) in enumerate(tiles.tolist()):
        if wanted[k]:
            partials[t] = flat[start : start + count].double().square().sum()
