"""Argument checks of the backends written in Python: each rule of `fusedaccum.ops`, said once.

Every check raises RuntimeError naming the operator, the argument with its index, the rule, the value seen and a way
out. All of them run before an operator writes its first element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedaccum.ops import ALIGN, FRESH, TOTAL, TOUCHED, VOID

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


def micro_batches(
    op: str, name: str, scale_name: str, grads: Sequence[Tensor | None], scale: Tensor, flat: Tensor, segments: Tensor
) -> list[Sequence[Tensor | None]]:
    """`grads` cut into micro-batches, of which `scale` has an entry each; every one of them like `fold` takes it."""
    if scale.dtype != torch.float32 or scale.dim() != 1:
        one(op, scale_name, scale, torch.float32, (max(scale.numel(), 1),), flat.device)
    one(op, scale_name, scale, torch.float32, (scale.numel(),), flat.device)
    n, count = segments.shape[0], scale.numel()
    if len(grads) != count * n:
        rule = f"have {count * n} entries, one for each segment and each of the {count} entries of {scale_name}"
        _fail(op, name, rule, len(grads), _PLAN_WAY_OUT)
    listed(op, name, grads, flat, segments.repeat(count, 1), absent="None")
    return [grads[j * n : (j + 1) * n] for j in range(count)]


def fold(
    op: str,
    flat: Tensor,
    partials: Tensor,
    segments: Tensor,
    tiles: Tensor,
    grads: Sequence[Tensor | None],
    scale: Tensor,
) -> list[Sequence[Tensor | None]]:
    """The arguments that only `fold` has; returns the gradients micro-batch by micro-batch."""
    one(op, "partials", partials, torch.float64, (tiles.shape[0],), flat.device)
    batches = micro_batches(op, "grads", "scale", grads, scale, flat, segments)
    if not batches:
        _fail(op, "scale", "have at least 1 entry, one for each micro-batch", 0, "pass the scale of each micro-batch")
    return batches


def late(
    op: str,
    flat: Tensor,
    marks: Tensor,
    segments: Tensor,
    grads: Sequence[Tensor | None],
    scale: Tensor,
    fresh_will_do: bool = False,
) -> list[Sequence[Tensor | None]]:
    """Late gradients and the marks of their segments; returns them micro-batch by micro-batch.

    fresh_will_do: a VOID segment that is FRESH needs none.
    """
    batches = micro_batches(op, "late", "late_scale", grads, scale, flat, segments)
    for k, mark in enumerate(marks.tolist()):
        has = [j for j, batch in enumerate(batches) if batch[k] is not None]
        if has and not mark & TOUCHED:
            what = f"late[{has[0] * len(marks) + k}]"
            rule = f"be of a segment that is TOUCHED, as others are left alone (segment {k})"
            _fail(op, what, rule, f"mark {mark}", "set its mark, or fold the gradient")
        needs = mark & TOUCHED and mark & VOID and not (fresh_will_do and mark & FRESH)
        if needs and not has:
            rule = f"have a gradient for segment {k}, which is VOID"
            _fail(op, "late", rule, None, "pass what was held back of it, or fold that first")
    return batches


def late_update(
    op: str,
    flat: Tensor,
    marks: Tensor,
    live: Tensor | None,
    segments: Tensor,
    tiles: Tensor,
    grads: Sequence[Tensor | None],
    scale: Tensor,
    partials: Tensor | None,
) -> list[Sequence[Tensor | None]]:
    """What the update rules ask of late gradients and partials; returns the gradients micro-batch by micro-batch."""
    for name, is_given in (("late", len(grads) > 0), ("partials", partials is not None)):
        if live is not None and is_given:
            way_out = "fold first, and have square_total take the norm"
            _fail(op, name, "be left out where live is given", "both", way_out)
    if partials is not None:
        one(op, "partials", partials, torch.float64, (tiles.shape[0],), flat.device)
    return late(op, flat, marks, segments, grads, scale)


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
