"""The operators as Triton kernels: any GPU that Triton supports, and Triton's interpreter on the CPU.

Each operator is one launch over all tiles of all segments (the norm has a second stage), and at most one of torch's
own to set marks. Nothing waits for the device. See `fusedaccum.ops` for what the arguments are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from fusedaccum.backends import _checks as check
from fusedaccum.backends import _triton_kernels as kernels
from fusedaccum.ops import ADAM_COLUMNS, FRESH, SGD_COLUMNS, TOUCHED

_CODES = {
    torch.float32: kernels.FLOAT32.value,
    torch.bfloat16: kernels.BFLOAT16.value,
    torch.float16: kernels.FLOAT16.value,
}
_INTERPRETED = not isinstance(kernels.fold_tiles, triton.JITFunction)

# Elements that a program holds at a time. 256 threads then have 16 for a fold and 8 for an update, which has up to six
# streams. In-place kernels are not autotuned: trying a configuration would already change the data.
FOLD_BLOCK = 4096
STEP_BLOCK = 2048
SUM_BLOCK = 1024
# Without fusion by the compiler: where a product is added, the kernels say so themselves.
LAUNCH_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


def why_not(device: torch.device) -> str | None:
    """None on a GPU, and on the CPU under Triton's interpreter; otherwise the reason, in words."""
    if device.type == "cuda":
        return "TRITON_INTERPRET=1 makes Triton work on the CPU; unset it" if _INTERPRETED else None
    if device.type == "cpu":
        return None if _INTERPRETED else "Triton needs a GPU, or TRITON_INTERPRET=1 to run its interpreter"
    return f"Triton kernels are launched on cuda devices, not on {device.type}"


def fold(
    flat: Tensor,
    partials: Tensor,
    marks: Tensor,
    segments: Tensor,
    tiles: Tensor,
    grads: Sequence[Tensor | None],
    scale: Tensor,
    norm: bool,
) -> None:
    check.plan("fold", flat, marks, segments, tiles)
    check.one("fold", "partials", partials, torch.float64, (tiles.shape[0],), flat.device)
    check.one("fold", "scale", scale, torch.float32, (1,), flat.device)
    check.listed("fold", "grads", grads, flat, segments, absent="None")

    grads = [grad if grad is None else grad.resolve_neg() for grad in grads]  # a kernel reads memory, not the mark
    table = _table(flat, segments, grads)
    arguments = (flat, partials, _on_device(marks, flat), tiles, table, scale)
    _launch(kernels.fold_tiles, tiles.shape[0], *arguments, NORM=bool(norm), BLOCK=FOLD_BLOCK)
    present = torch.tensor([grad is not None for grad in grads], dtype=torch.bool, device=marks.device)
    marks.masked_fill_(present, TOUCHED | FRESH if norm else TOUCHED)
    torch.autograd.graph.increment_version([flat, partials])


def square_total(flat: Tensor, partials: Tensor, marks: Tensor, segments: Tensor, tiles: Tensor, total: Tensor) -> None:
    check.plan("square_total", flat, marks, segments, tiles)
    check.norm("square_total", flat, partials, tiles, total)

    known = _on_device(marks, flat)
    _launch(kernels.sum_stale_tiles, tiles.shape[0], flat, partials, known, tiles, BLOCK=FOLD_BLOCK)
    _launch(kernels.sum_partials, 1, partials, known, tiles, total, tiles.shape[0], BLOCK=SUM_BLOCK)
    marks.masked_fill_(marks == TOUCHED, TOUCHED | FRESH)
    torch.autograd.graph.increment_version([partials, total])


def close_window(
    scalars: Tensor, steps: Tensor, marks: Tensor, total: Tensor, divisor: Tensor, max_norm: float
) -> None:
    check.window("close_window", scalars, steps, marks, total, divisor)

    clip = max_norm != float("inf")
    arguments = (scalars, steps, _on_device(marks, scalars), total, divisor, max_norm, marks.numel())
    _launch(kernels.close, 1, *arguments, CLIP=clip, BLOCK=SUM_BLOCK)
    torch.autograd.graph.increment_version([scalars, steps])


def rescale(flat: Tensor, marks: Tensor, segments: Tensor, tiles: Tensor, factor: Tensor) -> None:
    check.plan("rescale", flat, marks, segments, tiles)
    check.one("rescale", "factor", factor, torch.float32, (1,), flat.device)

    _launch(kernels.rescale_tiles, tiles.shape[0], flat, _on_device(marks, flat), tiles, factor, BLOCK=FOLD_BLOCK)
    marks.bitwise_and_(TOUCHED)
    torch.autograd.graph.increment_version([flat])


def emit(
    flat: Tensor, marks: Tensor, segments: Tensor, tiles: Tensor, scalars: Tensor, grads: Sequence[Tensor]
) -> None:
    check.plan("emit", flat, marks, segments, tiles)
    check.one("emit", "scalars", scalars, torch.float32, (3,), flat.device)
    check.listed("emit", "grads", grads, flat, segments, absent="empty", marks=marks)

    table = _table(flat, segments, _present(grads))
    arguments = (flat, _on_device(marks, flat), tiles, scalars, table)
    _launch(kernels.emit_tiles, tiles.shape[0], *arguments, BLOCK=FOLD_BLOCK)
    torch.autograd.graph.increment_version(list(grads))


def adam(
    flat: Tensor,
    marks: Tensor,
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
    zero: bool,
) -> None:
    check.plan("adam", flat, marks, segments, tiles)
    check.update("adam", flat, segments, scalars, steps, groups, hyper, ADAM_COLUMNS)
    check.listed("adam", "params", params, flat, segments, absent="empty", marks=marks)
    check.listed("adam", "exp_avgs", exp_avgs, flat, segments, absent="empty", marks=marks)
    check.listed("adam", "exp_avg_sqs", exp_avg_sqs, flat, segments, absent="empty", marks=marks)
    check.listed("adam", "max_exp_avg_sqs", max_exp_avg_sqs, flat, segments, absent="empty")
    check.listed("adam", "masters", masters, flat, segments, check.SINGLE, absent="empty")

    lists = [params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters]
    _step(kernels.adam_tiles, flat, marks, segments, tiles, scalars, steps, groups, hyper, lists, zero)


def sgd(
    flat: Tensor,
    marks: Tensor,
    segments: Tensor,
    tiles: Tensor,
    scalars: Tensor,
    steps: Tensor,
    groups: Tensor,
    hyper: Tensor,
    params: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    masters: Sequence[Tensor],
    zero: bool,
) -> None:
    check.plan("sgd", flat, marks, segments, tiles)
    check.update("sgd", flat, segments, scalars, steps, groups, hyper, SGD_COLUMNS)
    check.listed("sgd", "params", params, flat, segments, absent="empty", marks=marks)
    check.listed("sgd", "momentum_buffers", momentum_buffers, flat, segments, absent="empty")
    check.listed("sgd", "masters", masters, flat, segments, check.SINGLE, absent="empty")

    lists = [params, momentum_buffers, masters]
    _step(kernels.sgd_tiles, flat, marks, segments, tiles, scalars, steps, groups, hyper, lists, zero)


def _step(
    kernel: triton.JITFunction,
    flat: Tensor,
    marks: Tensor,
    segments: Tensor,
    tiles: Tensor,
    scalars: Tensor,
    steps: Tensor,
    groups: Tensor,
    hyper: Tensor,
    lists: list[Sequence[Tensor]],
    zero: bool,
) -> None:
    table = _table(flat, segments, *map(_present, lists))
    arguments = (flat, _on_device(marks, flat), tiles, scalars, steps, groups, hyper, table)
    _launch(kernel, tiles.shape[0], *arguments, ZERO=bool(zero), BLOCK=STEP_BLOCK)
    written = [tensor for tensors in lists for tensor in tensors]
    torch.autograd.graph.increment_version([flat, *written] if zero else written)


def _on_device(marks: Tensor, leader: Tensor) -> Tensor:
    return marks.to(leader.device, non_blocking=True)


def _present(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    return [tensor if tensor.numel() else None for tensor in tensors]


def _table(flat: Tensor, segments: Tensor, *lists: Sequence[Tensor | None]) -> Tensor:
    """int64[n, 2 * lists] on `flat`'s device: address and dtype code of each segment's tensors, zeros for None."""
    rows = []
    for k in range(segments.shape[0]):
        for tensors in lists:
            tensor = tensors[k] if tensors else None
            rows += (0, kernels.ABSENT.value) if tensor is None else (tensor.data_ptr(), _CODES[tensor.dtype])
    table = torch.tensor(rows, dtype=torch.int64).view(segments.shape[0], 2 * len(lists))
    return table.to(flat.device, non_blocking=True)


def _launch(kernel: triton.JITFunction, programs: int, *arguments: object, **constants: object) -> None:
    if programs == 0:
        return
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **constants, **LAUNCH_OPTIONS)
