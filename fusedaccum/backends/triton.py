"""The operators as Triton kernels: any GPU that Triton supports, and Triton's interpreter on the CPU.

Each operator is one launch over all tiles of all segments (the norm has a second stage, and torch zeroes the result of
`found_inf` first) and one copy to the device, of what the host alone knows: which segments are touched, where their
tensors are and of which dtype. The copy comes from pinned memory, so that nothing waits for the device. See
`fusedaccum.ops` for what the arguments are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from fusedaccum.backends import _checks as check
from fusedaccum.backends import _triton_kernels as kernels
from fusedaccum.backends import _triton_rules as rules
from fusedaccum.ops import ADAM_COLUMNS, FRESH, SGD_COLUMNS, TOUCHED

_CODES = {
    torch.float32: kernels.FLOAT32.value,
    torch.bfloat16: kernels.BFLOAT16.value,
    torch.float16: kernels.FLOAT16.value,
}
_INTERPRETED = not isinstance(kernels.fold_tiles, triton.JITFunction)

# Elements of a full tile that a program holds at a time: 8 for each of 256 threads. In-place kernels are not autotuned:
# trying a configuration would already change the data.
BLOCK = 2048
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

    # A kernel reads memory, not the mark of a lazily negated tensor.
    grads = [grad.resolve_neg() if grad is not None and grad.is_neg() else grad for grad in grads]
    table = _gradients("fold", grads, marks, flat)
    pointer, has_live = _switch(live, flat)
    arguments = (flat, partials, pointer, tiles, table, len(grads), scale)
    _launch(kernels.fold_tiles, tiles.shape[0], *arguments, LIVE=has_live, NORM=bool(norm), BLOCK=BLOCK)
    present = torch.tensor([grad is not None for grad in grads], dtype=torch.bool, device="cpu")
    marks.masked_fill_(present, TOUCHED | FRESH if norm else TOUCHED)
    torch.autograd.graph.increment_version([flat, partials] if live is None else [flat, partials, live])


def found_inf(
    flat: Tensor, marks: Tensor, segments: Tensor, tiles: Tensor, grads: Sequence[Tensor | None], found_inf: Tensor
) -> None:
    check.plan("found_inf", flat, marks, segments, tiles)
    check.listed("found_inf", "grads", grads, flat, segments, absent="None")
    check.one("found_inf", "found_inf", found_inf, torch.float32, (1,), flat.device)

    table = _gradients("found_inf", grads, marks, flat)
    found_inf.zero_()
    _launch(kernels.found_inf_tiles, tiles.shape[0], found_inf, tiles, table, len(grads), BLOCK=BLOCK)


def square_total(flat: Tensor, partials: Tensor, marks: Tensor, segments: Tensor, tiles: Tensor, total: Tensor) -> None:
    check.plan("square_total", flat, marks, segments, tiles)
    check.norm("square_total", flat, partials, tiles, total)

    known = _to_device("square_total", marks, flat)
    stale = marks == TOUCHED
    if stale.any():
        _launch(kernels.sum_stale_tiles, tiles.shape[0], flat, partials, known, tiles, BLOCK=BLOCK)
    _launch(kernels.sum_partials, 1, partials, known, tiles, total, tiles.shape[0], BLOCK=SUM_BLOCK)
    marks.masked_fill_(stale, TOUCHED | FRESH)
    torch.autograd.graph.increment_version([partials, total])


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

    known = _to_device("close_window", marks, scalars)
    pointer, has_live = _switch(live, scalars)
    constants = {"CLIP": max_norm != float("inf"), "SKIP_NONFINITE": bool(skip_nonfinite), "LIVE": has_live}
    arguments = (scalars, steps, known, pointer, total, divisor, max_norm, marks.numel())
    _launch(kernels.close, 1, *arguments, **constants, BLOCK=SUM_BLOCK)
    torch.autograd.graph.increment_version([scalars, steps])


def rescale(flat: Tensor, marks: Tensor, segments: Tensor, tiles: Tensor, factor: Tensor) -> None:
    check.plan("rescale", flat, marks, segments, tiles)
    check.one("rescale", "factor", factor, torch.float32, (1,), flat.device)

    known = _to_device("rescale", marks, flat)
    _launch(kernels.rescale_tiles, tiles.shape[0], flat, known, tiles, factor, BLOCK=BLOCK)
    marks.bitwise_and_(TOUCHED)
    torch.autograd.graph.increment_version([flat])


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

    words, addresses = _listed([grads], marks)
    pointer, has_live = _switch(live, flat)
    arguments = (flat, pointer, tiles, scalars, _to_device("emit", words + addresses, flat), len(words))
    _launch(kernels.emit_tiles, tiles.shape[0], *arguments, LIVE=has_live, BLOCK=BLOCK)
    torch.autograd.graph.increment_version(list(grads))


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

    lists = [params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters]
    _step("adam", rules.adam_tiles, flat, marks, live, tiles, scalars, steps, groups, hyper, lists, random, zero)


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

    lists = [params, momentum_buffers, masters]
    _step("sgd", rules.sgd_tiles, flat, marks, live, tiles, scalars, steps, groups, hyper, lists, random, zero)


def _step(
    op: str,
    kernel: triton.JITFunction,
    flat: Tensor,
    marks: Tensor,
    live: Tensor | None,
    tiles: Tensor,
    scalars: Tensor,
    steps: Tensor,
    groups: Tensor,
    hyper: Tensor,
    lists: list[Sequence[Tensor]],
    random: Tensor | None,
    zero: bool,
) -> None:
    words, addresses = _listed(lists, marks)
    table = _to_device(op, words + addresses, flat)
    pointer, has_live = _switch(live, flat)
    noise, has_noise = _switch(random, flat)
    arguments = (flat, pointer, tiles, scalars, steps, groups, hyper, noise, table, len(words))
    constants = {"LIVE": has_live, "RANDOM": has_noise, "ZERO": bool(zero)}
    kinds = _kinds(op, words)
    if kinds:
        _launch(kernel, tiles.shape[0], *arguments, KINDS=kinds, **constants, BLOCK=BLOCK)
    written = [tensor for tensors in lists for tensor in tensors]
    torch.autograd.graph.increment_version([flat, *written] if zero else written)


# The list that a group's hyper-parameters can leave out: v_max without amsgrad, the buffer without momentum. Only the
# device sees them.
_OPTIONAL = {"adam": 3, "sgd": 1}


def _kinds(op: str, words: list[int]) -> tuple[int, ...]:
    """The kinds that a kernel must have code for, in an order of their own: one compilation for each set of them."""
    kinds = {word >> 1 for word in set(words) if word & TOUCHED}
    return tuple(sorted(kinds | {kind & ~(3 << 2 * _OPTIONAL[op]) for kind in kinds}))


def _switch(given: Tensor | None, other: Tensor) -> tuple[Tensor, bool]:
    """What a kernel takes as `live` or `random`, at which it does not look where there is none, and LIVE or RANDOM."""
    return (other, False) if given is None else (given, True)


def _gradients(op: str, grads: Sequence[Tensor | None], marks: Tensor, leader: Tensor) -> Tensor:
    """The table of gradients of which some are absent, whatever is touched."""
    codes = [0 if grad is None else _CODES[grad.dtype] for grad in grads]
    addresses = [0 if grad is None else grad.data_ptr() for grad in grads]
    return _to_device(op, _words(codes, marks) + addresses, leader)


def _listed(lists: list[Sequence[Tensor]], marks: Tensor) -> tuple[list[int], list[int]]:
    """The words of all segments, and their tensors' addresses list by list: see `_triton_kernels`."""
    n = marks.numel()
    kinds, addresses = [0] * n, []
    for k, tensors in enumerate(lists):
        if not tensors:
            addresses += [0] * n
            continue
        places = [tensor.data_ptr() for tensor in tensors]  # 0 where there are no elements
        codes = [_CODES[tensor.dtype] << 2 * k for tensor in tensors]
        kinds = [kind + code if place else kind for kind, code, place in zip(kinds, codes, places, strict=True)]
        addresses += places
    return _words(kinds, marks), addresses


def _words(kinds: list[int], marks: Tensor) -> list[int]:
    return [2 * kind + (mark & TOUCHED) for kind, mark in zip(kinds, marks.tolist(), strict=True)]


def _to_device(op: str, facts: Tensor | list[int], leader: Tensor) -> Tensor:
    """What the host knows, uint8 or int64, on `leader`'s device: a copy that the host does not wait for."""
    on_gpu = leader.is_cuda
    if on_gpu:
        _refuse_capture(op, leader)
    if isinstance(facts, list):
        facts = torch.tensor(facts, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
    elif on_gpu:
        facts = facts.pin_memory()
    return facts.to(leader.device, non_blocking=True)


def _refuse_capture(op: str, leader: Tensor) -> None:
    with torch.cuda.device_of(leader):
        if not torch.cuda.is_current_stream_capturing():
            return
    rule = 'be called outside of CUDA graph capture with backend="triton": a replay would read a table that is gone'
    raise RuntimeError(f'{op}: the operator must {rule}, got a stream that is capturing; use backend="compiled"')


def _launch(kernel: triton.JITFunction, programs: int, *arguments: object, **constants: object) -> None:
    if programs == 0:
        return
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **constants, **LAUNCH_OPTIONS)
