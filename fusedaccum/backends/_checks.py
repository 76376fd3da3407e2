"""Argument checks of the backends written in Python: each rule of `fusedaccum.ops`, said once.

Every check raises RuntimeError naming the operator, the argument with its index, the rule, the value seen and a way
out. All of them run before an operator writes its first element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedaccum.ops import ALIGN, TOTAL, TOUCHED

LOW_AND_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
SINGLE = (torch.float32,)

_DTYPE_WAY_OUT = "convert it first, or leave its parameter out of the flat buffer"
_PLAN_WAY_OUT = "pass the tensors that the flat buffer was planned with"


def _fail(op: str, what: str, rule: str, seen: object, way_out: str) -> None:
    raise RuntimeError(f"{op}: {what} must {rule}, got {seen}; {way_out}")


def one(op: str, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """`tensor` has exactly this dtype, shape and device, and is contiguous."""
    if tensor.dtype != dtype:
        _fail(op, name, f"be {dtype}", tensor.dtype, f"pass {name}.to({dtype})")
    if tuple(tensor.shape) != shape:
        _fail(op, name, f"have shape {shape}", tuple(tensor.shape), _PLAN_WAY_OUT)
    if tensor.device != device:
        _fail(op, name, f"be on {device}", tensor.device, f"move it with .to('{device}')")
    if not tensor.is_contiguous():
        _fail(op, name, "be contiguous", f"strides {tensor.stride()}", "pass .contiguous()")


def plan(op: str, flat: Tensor, marks: Tensor, segments: Tensor, tiles: Tensor, live: Tensor | None = None) -> None:
    """The arguments that say where the segments lie fit each other."""
    one(op, "flat", flat, torch.float32, (flat.numel(),), flat.device)
    one(op, "segments", segments, torch.int64, (segments.shape[0], 2), torch.device("cpu"))
    one(op, "tiles", tiles, torch.int64, (tiles.shape[0], 4), flat.device)
    one(op, "marks", marks, torch.uint8, (segments.shape[0],), torch.device("cpu"))
    if live is not None:
        one(op, "live", live, torch.uint8, (segments.shape[0],), flat.device)
    end = 0
    for k, (offset, numel) in enumerate(segments.tolist()):
        if numel < 0 or offset < end or offset % ALIGN or offset + numel > flat.numel():
            rule = f"start at a multiple of {ALIGN}, after the segments before it ({end}), and end inside the "
            rule += f"{flat.numel()} elements of flat"
            _fail(op, f"segments[{k}]", rule, f"offset {offset}, numel {numel}", _PLAN_WAY_OUT)
        end = offset + numel


def listed(
    op: str,
    name: str,
    tensors: Sequence[Tensor | None],
    flat: Tensor,
    segments: Tensor,
    dtypes: tuple[torch.dtype, ...] = LOW_AND_SINGLE,
    *,
    absent: str,
    marks: Tensor | None = None,
) -> None:
    """`tensors` has one entry for each segment, each of the segment's size, a supported dtype, and on `flat`'s device.

    absent: how an entry says that it does not apply: "None", or "empty" (0 elements; an empty list says so for all).
    marks: given where every touched segment must have an entry.
    """
    touched = (marks & TOUCHED).tolist() if marks is not None else [0] * segments.shape[0]
    if absent == "empty" and len(tensors) == 0 and not any(touched):
        return
    if len(tensors) != segments.shape[0]:
        _fail(op, name, f"have {segments.shape[0]} entries, one for each segment", len(tensors), _PLAN_WAY_OUT)
    for k, (tensor, (_, numel)) in enumerate(zip(tensors, segments.tolist(), strict=True)):
        what = f"{name}[{k}]"
        if tensor is None:
            if absent != "None":
                _fail(op, what, "be a tensor", None, "pass a tensor of 0 elements where an entry does not apply")
            continue
        if tensor.layout != torch.strided:
            _fail(op, what, "be dense", tensor.layout, "pass .to_dense()")
        if tensor.dtype not in dtypes:
            _fail(op, what, f"be {' or '.join(map(str, dtypes))}", tensor.dtype, _DTYPE_WAY_OUT)
        if tensor.device != flat.device:
            _fail(op, what, f"be on {flat.device}", tensor.device, f"move it with .to('{flat.device}')")
        left_out = absent == "empty" and tensor.numel() == 0 and not touched[k]
        if tensor.numel() != numel and not left_out:
            _fail(op, what, f"have {numel} elements, as its segment has", tensor.numel(), _PLAN_WAY_OUT)
        if not tensor.is_contiguous():
            _fail(
                op, what, "be contiguous", f"strides {tensor.stride()}", "pass .contiguous(), or a view in memory order"
            )


def norm(op: str, flat: Tensor, partials: Tensor, tiles: Tensor, total: Tensor) -> None:
    """The arguments that only `square_total` has."""
    one(op, "partials", partials, torch.float64, (tiles.shape[0],), flat.device)
    one(op, "total", total, torch.float64, (TOTAL,), flat.device)


def update(
    op: str,
    flat: Tensor,
    segments: Tensor,
    scalars: Tensor,
    steps: Tensor,
    groups: Tensor,
    hyper: Tensor,
    columns: tuple[str, ...],
    random: Tensor | None,
) -> None:
    """The arguments that only the update rules have."""
    one(op, "scalars", scalars, torch.float32, (3,), flat.device)
    one(op, "steps", steps, torch.float32, (segments.shape[0],), flat.device)
    one(op, "groups", groups, torch.int64, (segments.shape[0],), flat.device)
    one(op, "hyper", hyper, torch.float64, (hyper.shape[0], len(columns)), flat.device)
    if random is not None:
        one(op, "random", random, torch.int64, (segments.shape[0] + 2,), flat.device)


def window(
    op: str, scalars: Tensor, steps: Tensor, marks: Tensor, live: Tensor | None, total: Tensor, divisor: Tensor
) -> None:
    """The arguments of `close_window`, which has no flat buffer to compare them with."""
    one(op, "scalars", scalars, torch.float32, (3,), scalars.device)
    one(op, "steps", steps, torch.float32, (marks.numel(),), scalars.device)
    one(op, "marks", marks, torch.uint8, (marks.numel(),), torch.device("cpu"))
    if live is not None:
        one(op, "live", live, torch.uint8, (marks.numel(),), scalars.device)
    one(op, "total", total, torch.float64, (1,), scalars.device)
    one(op, "divisor", divisor, torch.float64, (1,), scalars.device)
