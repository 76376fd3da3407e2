"""Folding: which parameters have a segment, and reading their gradients in `step()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fusedaccum import backends
from fusedaccum.flat_buffer import FLOAT_DTYPES, FlatBuffer
from fusedaccum.local import is_distributed, like, local
from fusedaccum.notices import warn
from fusedaccum.options import NAME, is_plain, parameters
from fusedaccum.spread import Spread, key_of

if TYPE_CHECKING:
    from fusedaccum.window import Window

# What gradients nearly always are; other classes are looked at more closely.
PLAIN = {Tensor, type(None)}


# What an operator raises where it refuses its arguments: nothing was written then.
REFUSALS = (RuntimeError, TypeError, ValueError)


def build(
    params: list[Tensor], old: list[FlatBuffer], backend: str, also: Tensor | None = None, shares: int = 0
) -> list[FlatBuffer]:
    """One flat buffer a device for those of `params` that can get gradients; one of `old` where it still fits.

    DTensors have buffers of their own, one for all that are spread over the same ranks in the same way.

    shares: ranks that get a share of each. There is one for each dtype too then, so that ranks can send each other the
    parameters of their shares as they are.

    A frozen parameter takes no memory until it is unfrozen or a gradient is set by hand, one of a lazy module
    none until the module knows its shape.
    """
    touched = {buffer.params[k] for buffer in old for k in buffer.touched_segments()}
    alike: dict[tuple[torch.device, Any, Any], dict[Tensor, None]] = {}
    for p in params:
        if not is_lazy(p) and (p.requires_grad or p.grad is not None or p in touched or p is also):
            alike.setdefault((p.device, key_of(p), p.dtype if shares else None), {})[p] = None
    buffers = []
    for (device, key, _), mine in alike.items():
        here = [b for b in old if b.device == device and (b.spread.key if b.spread else None) == key]
        fitting = [buffer for buffer in here if buffer.matches(list(mine))]
        if not fitting:
            spread, chosen = None if key is None else Spread(*key), backends.select(device, backend)
            fitting = [FlatBuffer(list(mine), device, chosen, spread, max(shares, 1))]
        buffers.append(fitting[0])
    return buffers


def carry(old: list[FlatBuffer], new: list[FlatBuffer]) -> None:
    """Take the sums of the open window along into rebuilt buffers."""
    place = {p: (buffer, k) for buffer in new for k, p in enumerate(buffer.params)}
    lost = 0
    for buffer in old:
        for k in buffer.touched_segments() if buffer not in new else ():
            target, j = place.get(buffer.params[k], (None, 0))
            if target is None or (target.shapes[j], target.complex[j]) != (buffer.shapes[k], buffer.complex[k]):
                lost += 1
            else:
                target.put(j, buffer.view(k))
                if buffer.live is not None:
                    target.keep_live()
                    target.live[j].copy_(buffer.live[k])
    if lost:
        warn(
            f"{NAME}: {lost} parameters left the optimizer or changed shape inside a window, and what was summed for "
            "them is gone; flush() or reset() before such a change"
        )


def fold(
    window: Window,
    scale: float | Tensor,
    norm: bool,
    found_inf: Tensor | None = None,
    items: float | Tensor | None = None,
) -> Tensor | None:
    """Fold every `p.grad` and set it to None. Raises before anything is changed.

    scale: a number or a tensor of one element. norm: leave the partial sums of the norm behind. found_inf: a tensor of
    one element; where it is not 0 nothing is folded. items: of the micro-batch. Returns 1 or 0, whether the gradients
    were folded, where only the device knows.
    """
    moved = follow(window, thorough=False)
    # After a move a gradient may be of another shape; on a second device it must be refused before the first is folded.
    if moved or len(window.buffers) > 1:
        repair(window)
    try:
        kept = _fold_all(window, scale, norm, found_inf, items)
    except RuntimeError:
        if not repair(window):
            raise
        kept = _fold_all(window, scale, norm, found_inf, items)
    discard(window.params)
    return kept


def discard(params: list[Tensor]) -> None:
    """Free the gradients."""
    for p in params:
        p.grad = None


def follow(window: Window, thorough: bool) -> bool:
    """Rebuild the buffers if a parameter has changed its place, shape, device or order in memory since they were built.

    thorough: look at all of it; else at the address, which a change of any of it seldom leaves alone. Returns whether
    any has.
    """
    at_new_address = any(buffer.addresses_now() != buffer.addresses for buffer in window.buffers)
    if at_new_address or (thorough and any(buffer.moved() for buffer in window.buffers)):
        window.rebuild()
        return True
    return False


def times(kept: Tensor, value: float | Tensor) -> Tensor:
    """`kept` times a number or a tensor of one element anywhere. One on the CPU is a number to torch: nothing waits."""
    if isinstance(value, Tensor):
        value = value.detach().reshape(()) if value.device.type == "cpu" else value.detach().to(kept.device)
    return kept * value


def _fold_all(
    window: Window, scale: float | Tensor, norm: bool, found_inf: Tensor | None, items: float | Tensor | None
) -> Tensor | None:
    grads = [_gradients(window, buffer) for buffer in window.buffers]
    if not all(PLAIN.issuperset(map(type, given)) for given in grads):
        _check_subclasses(window)
    kept = window.nonfinite.look(window, grads, found_inf, items)
    if kept is not None:
        scale = times(kept, scale)
    window.midway = True
    for i, (buffer, given) in enumerate(zip(window.buffers, grads, strict=True)):
        try:
            buffer.fold(given, scale, norm)
        except REFUSALS:
            window.midway = i > 0
            raise
    return kept


def _gradients(window: Window, buffer: FlatBuffer) -> list[Tensor | None]:
    grads = [p.grad for p in buffer.params]
    if buffer.spread is None:
        return grads
    return [g if g is None else of_this_rank(window, p, g) for p, g in zip(buffer.params, grads, strict=True)]


def of_this_rank(window: Window, p: Tensor, grad: Tensor) -> Tensor:
    """What this rank has of `grad`, the gradient of `p`: `grad` itself unless they are DTensors.

    A collective where a gradient is placed otherwise than its parameter, as those of replicated parameters under
    tensor parallelism are. Raises TypeError for one of another mesh, or that is no DTensor.
    """
    if not is_distributed(p):
        return grad
    if not is_distributed(grad) or grad.device_mesh != p.device_mesh:
        seen = f"over {grad.device_mesh}" if is_distributed(grad) else f"a {type(grad).__name__}"
        raise TypeError(
            f"{NAME}: the gradient of {describe(window, p)} is {seen} and the parameter a DTensor over "
            f"{p.device_mesh}; set `p.grad` to a DTensor over the same mesh"
        )
    if grad.placements != p.placements:
        grad = grad.redistribute(placements=p.placements)
    mine = local(grad)
    if not is_plain(mine) and hasattr(mine, "wait"):  # a collective that nobody has waited for yet
        mine = mine.wait()
    return mine.detach()


def repair(window: Window) -> bool:
    """After an operator refused a list of gradients: say why, or make it acceptable. Returns whether anything was done.

    Raises TypeError or ValueError naming the parameter, the rule and the value seen.
    """
    done = any(buffer.moved() for buffer in window.buffers)
    if done:
        window.rebuild()
    for buffer in window.buffers:
        for k, p in enumerate(buffer.params):
            if (grad := p.grad) is not None:
                grad = of_this_rank(window, p, grad)
                _check(window, p, grad)
                if grad.is_sparse:
                    done = done or k not in buffer.sparse
                    buffer.sparse.add(k)
                elif k not in buffer.special and not grad.is_contiguous():
                    p.grad = like(p, grad.detach().contiguous())
                    done = True
    return done


def acceptable(window: Window, buffer: FlatBuffer, p: Tensor, grad: Tensor) -> Tensor:
    """`grad`, what this rank has of the gradient of `p`, as a buffer's fold takes it.

    Raises TypeError or ValueError as `repair` does.
    """
    k = window.place[p][1]
    _check_subclass(window, p, grad)
    _check(window, p, grad)
    if grad.is_sparse:
        buffer.sparse.add(k)
    elif k not in buffer.special and not grad.is_contiguous():
        return grad.detach().contiguous()
    return grad


def _check_subclasses(window: Window) -> None:
    for p in window.place:
        if p.grad is not None:
            _check_subclass(window, p, of_this_rank(window, p, p.grad))


def _check_subclass(window: Window, p: Tensor, grad: Tensor) -> None:
    if not is_plain(grad):
        raise TypeError(
            f"{NAME}: the gradient of {describe(window, p)} is a {type(grad).__name__}, a tensor subclass with "
            "__torch_dispatch__, whose numbers are where only the class knows; set `p.grad` to a plain tensor"
        )


def _check(window: Window, p: Tensor, grad: Tensor) -> None:
    if torch._C._functorch.is_functorch_wrapped_tensor(grad):
        raise TypeError(
            f"{NAME}: the gradient of {describe(window, p)} is a tensor from inside a torch.func transform, which has "
            "ended; set `p.grad` to what the transform returns"
        )
    if grad.layout not in (torch.strided, torch.sparse_coo):
        raise TypeError(
            f"{NAME}: the gradient of {describe(window, p)} is {grad.layout}; dense and sparse_coo gradients are "
            "folded: convert it, or leave this parameter to another optimizer"
        )
    allowed = (torch.complex64,) if p.is_complex() else FLOAT_DTYPES
    if grad.dtype not in allowed:
        raise TypeError(
            f"{NAME}: the gradient of {describe(window, p)} is {grad.dtype}; gradients are summed in float32, so it "
            f"must be one of {', '.join(map(str, allowed))}: convert the gradient, or the parameter"
        )
    here = local(p)
    if grad.device != here.device or grad.shape != here.shape:
        raise ValueError(
            f"{NAME}: the gradient of {describe(window, p)} has shape {tuple(grad.shape)} on {grad.device} and the "
            f"parameter {tuple(here.shape)} on {here.device}; they must be equal: run the backward again after "
            "changing a parameter"
        )


def describe(window: Window, p: Tensor) -> str:
    """Where a parameter stands: its name if the group has names, its group and position, its shape."""
    for g, group in enumerate(window.optimizer.param_groups):
        for i, q in enumerate(group["params"]):
            if q is p:
                name = f"{group['param_names'][i]!r} " if "param_names" in group else ""
                return f"parameter {name}(param_groups[{g}]['params'][{i}], shape {tuple(p.shape)})"
    return f"a parameter of shape {tuple(p.shape)}"


def is_state_probe(optimizer: Optimizer) -> bool:
    """Whether this `step()` is `torch.distributed.checkpoint`'s, which wants the state created and nothing else.

    It runs before the state exists, with every learning rate 0 and every gradient exactly zero.
    """
    rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
    # A rate on another device is none of theirs, and looking at it would wait for the device.
    if optimizer.state or any((isinstance(lr, Tensor) and lr.device.type != "cpu") or lr != 0 for lr in rates):
        return False
    grads = [p.grad for p in parameters(optimizer) if p.requires_grad]
    if not grads or not all(g is not None and g.layout == torch.strided for g in grads):
        return False
    if not any(map(is_distributed, grads)):
        return not any(bool(g.any()) for g in grads)
    return not _any_anywhere(grads)


def _any_anywhere(grads: list[Tensor]) -> bool:
    """Whether an element of any of `grads` is not 0, on any rank that holds a part of them."""
    found = torch.tensor([any(bool(local(g).any()) for g in grads)], dtype=torch.uint8)
    meshes = {key[0]: Spread(*key) for key in map(key_of, grads) if key is not None}
    for spread in meshes.values():
        spread.largest("the look for a step that is to make state", found)
    return bool(found)
