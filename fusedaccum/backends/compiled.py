"""The operators in C++ (`csrc/`), reached through torch's dispatcher.

Importing this module raises ImportError where the extension was not built. What a call has written is made known to
autograd: a saved tensor that was changed is then found out in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

try:
    import fusedaccum._C as _C
except ImportError as error:
    raise ImportError(
        f"the C++ operators cannot be loaded ({error}); reinstall fusedaccum with a C++ compiler at hand, or leave the "
        "source directory if they are installed elsewhere"
    ) from error

# Why there are no operators for CUDA tensors, in words; None where there are. A library of its own: one with CUDA code
# does not load beside a torch without CUDA.
_cuda_obstacle: str | None = f"the CUDA kernels are {_C.CUDA_STATUS}"
if _C.CUDA_STATUS == "built":
    try:
        import fusedaccum._cuda as _cuda

        _cuda_obstacle = None
    except ImportError as error:
        _cuda_obstacle = f"the CUDA kernels were built and cannot be loaded ({error}); reinstall for this torch"

# Operators launch kernels and do nothing else on a GPU, so that a CUDA graph can hold them.
CAPTURABLE = True

_OPERATORS = ("fold", "found_inf", "square_total", "close_window", "rescale", "emit", "adam", "sgd")
_ops = torch.ops.fusedaccum
_fold, _found_inf, _square_total, _close_window = (getattr(_ops, name).default for name in _OPERATORS[:4])
_rescale, _emit, _adam, _sgd = (getattr(_ops, name).default for name in _OPERATORS[4:])


def build_info() -> dict[str, Any]:
    """How the extension was built and what it runs on: compiler, isa, isas_built, cuda, torch_target, tile, align.

    Raises RuntimeError where FUSEDACCUM_ISA names an instruction set that is unknown or that this processor lacks.
    """
    facts = _C.build_info()
    if _cuda_obstacle is None:
        built = _cuda.build_info()
        names = ", ".join(f"sm_{architecture // 10}" for architecture in built["architectures"])
        facts["cuda"] = f"built with toolkit {built['toolkit']} for {names}"
    elif facts["cuda"] == "built":
        facts["cuda"] = _cuda_obstacle
    return facts


@cache
def _why_not_there(index: int) -> str | None:
    """Why the CUDA kernels cannot run on one device, in words; None if they can."""
    if _cuda.runs_on(index):
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return (
        f"the CUDA kernels are {build_info()['cuda']} and cuda:{index} is sm_{major}{minor}; reinstall with "
        f"TORCH_CUDA_ARCH_LIST={major}.{minor}"
    )


def why_not(device: torch.device) -> str | None:
    """The reason why this backend cannot serve `device`, in words; None if it can."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None and _cuda_obstacle is None else device.index
        return _cuda_obstacle or _why_not_there(index)
    return f"there are no C++ operators for {device.type}"


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
    _fold(flat, partials, marks, live, segments, tiles, grads, scale, norm)
    increment_version((flat, partials, marks) if live is None else (flat, partials, marks, live))


def found_inf(
    flat: Tensor, marks: Tensor, segments: Tensor, tiles: Tensor, grads: Sequence[Tensor | None], found_inf: Tensor
) -> None:
    _found_inf(flat, marks, segments, tiles, grads, found_inf)
    increment_version(found_inf)


def square_total(flat: Tensor, partials: Tensor, marks: Tensor, segments: Tensor, tiles: Tensor, total: Tensor) -> None:
    _square_total(flat, partials, marks, segments, tiles, total)
    increment_version((partials, marks, total))


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
    _close_window(scalars, steps, marks, live, total, divisor, max_norm, skip_nonfinite)
    increment_version((scalars, steps))


def rescale(flat: Tensor, marks: Tensor, segments: Tensor, tiles: Tensor, factor: Tensor) -> None:
    _rescale(flat, marks, segments, tiles, factor)
    increment_version((flat, marks))


def emit(
    flat: Tensor,
    marks: Tensor,
    live: Tensor | None,
    segments: Tensor,
    tiles: Tensor,
    scalars: Tensor,
    grads: Sequence[Tensor],
) -> None:
    _emit(flat, marks, live, segments, tiles, scalars, grads)
    increment_version(grads)


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
    moments = (exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
    _adam(flat, marks, live, segments, tiles, scalars, steps, groups, hyper, params, *moments, masters, random, zero)
    written = [*params, *exp_avgs, *exp_avg_sqs, *max_exp_avg_sqs, *masters]
    increment_version([flat, *written] if zero else written)


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
    buffers = (momentum_buffers, masters)
    _sgd(flat, marks, live, segments, tiles, scalars, steps, groups, hyper, params, *buffers, random, zero)
    written = [*params, *momentum_buffers, *masters]
    increment_version([flat, *written] if zero else written)


def _fake(name: str, arguments: list[str]) -> Callable[..., None]:
    """What an operator does without data: nothing.

    Tensors with data beside one on the meta device land here too, and would be left unwritten in silence.
    """

    def fake(leader: Tensor, *rest: Any) -> None:
        for argument, value in zip(arguments[1:], rest, strict=True):
            for k, tensor in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                if isinstance(tensor, Tensor) and tensor.is_meta and not leader.is_meta:
                    what = argument if tensor is value else f"{argument}[{k}]"
                    raise RuntimeError(
                        f"{name}: {what} must be on {leader.device}, got meta; pass a tensor that holds data"
                    )

    return fake


def complete(namespace: str) -> torch.library.Library:
    """Give the operators of a C++ library what torch asks of an operator beside its kernels. Keep what is returned."""
    operators = getattr(torch.ops, namespace)

    def resolved(operator: Any) -> Callable[..., None]:
        """The dispatcher comes here where a gradient is marked as negated lazily: a kernel reads memory, not marks."""
        at = [argument.name for argument in operator._schema.arguments].index("grads")

        def call(*arguments: Any) -> None:
            grads = [grad if grad is None else grad.resolve_neg() for grad in arguments[at]]
            operator(*arguments[:at], grads, *arguments[at + 1 :])

        return call

    # No operator has a derivative. Falling through the autograd keys spares a look at every listed tensor.
    library = torch.library.Library(namespace, "IMPL")
    for name in _OPERATORS:
        operator = getattr(operators, name).default
        arguments = [argument.name for argument in operator._schema.arguments]
        torch.library.register_fake(operator, _fake(name, arguments))
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    for name in ("fold", "found_inf"):
        library.impl(name, resolved(getattr(operators, name).default), "Negative")
    return library


_library = complete("fusedaccum")
