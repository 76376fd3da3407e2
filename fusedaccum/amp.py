"""What `torch.amp.GradScaler` says to an optimizer that unscales by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fusedaccum.options import NAME

ATTRIBUTES = ("grad_scale", "found_inf")


def _unscales(wrapper: Any) -> bool:
    """Whether the wrapper unscales by itself: what a GradScaler asks first.

    Raises RuntimeError where gradients are gone before a scaler can look at them.
    """
    options = wrapper._window.options
    if options.fold == "backward":
        raise RuntimeError(
            f"{NAME}: a GradScaler looks at p.grad after the backward, and fold='backward' has folded and freed every "
            "gradient by then; use fold='step', or bfloat16, which needs no scaling"
        )
    return options.amp_scaling


SUPPORT = property(_unscales)


@contextmanager
def verdict(optimizer: Any, wanted: bool) -> Iterator[tuple[Tensor | None, ...]]:
    """(what gradients were multiplied by, whether one is not finite): left on `optimizer` for one call of its `step()`.

    None where the scaler has unscaled already, or where there is none; () where it is not `wanted`. GradScaler
    takes both away when `step()` returns. Where it raises they would stay, and multiply the next scale.
    """
    if not wanted:
        yield ()
        return
    try:
        given = (getattr(optimizer, name, None) for name in ATTRIBUTES)
        yield tuple(value if isinstance(value, Tensor) else None for value in given)  # 0 where there is no gradient
    except BaseException:
        for name in ATTRIBUTES:
            vars(optimizer).pop(name, None)
        raise
