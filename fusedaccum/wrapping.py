"""`wrapping`: an optimizer class for code that takes a class and builds the optimizer itself."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from fusedaccum.length import Steps, check_steps
from fusedaccum.optimizer import FusedAccumOptimizer
from fusedaccum.options import check_options, check_with_steps


def wrapping(optimizer_class: type[Optimizer], steps: Steps = None, **options: Any) -> type[FusedAccumOptimizer]:
    """A class that builds an `optimizer_class` and wraps it: `cls(params, **kwargs)` is
    `FusedAccumOptimizer(optimizer_class(params, **kwargs), steps, **options)`.

        Trainer(model, args, optimizer_cls_and_kwargs=(fusedaccum.wrapping(torch.optim.AdamW), {"lr": 3e-4}), ...)

    Its instances can be copied and pickled. Raises TypeError or ValueError for what is no optimizer class and for
    options that `FusedAccumOptimizer` refuses, at once.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            f"wrapping: {optimizer_class!r} must be a class derived from torch.optim.Optimizer; an optimizer that "
            "has been built goes to FusedAccumOptimizer"
        )
    if issubclass(optimizer_class, FusedAccumOptimizer):
        raise TypeError(f"wrapping: {optimizer_class.__name__} wraps an optimizer already; wrap the bare class once")
    check_with_steps(check_options(**options), check_steps(steps))

    class Wrapping(FusedAccumOptimizer):
        __doc__ = f"A `{optimizer_class.__name__}` in a `FusedAccumOptimizer`."

        def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(optimizer_class(params, *args, **kwargs), steps, **options)

        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            return _unbuilt, (optimizer_class, steps, options), self.__getstate__()

    Wrapping.__name__ = Wrapping.__qualname__ = f"FusedAccum{optimizer_class.__name__}"
    return Wrapping


def _unbuilt(optimizer_class: type[Optimizer], steps: Steps, options: dict[str, Any]) -> FusedAccumOptimizer:
    """What unpickling fills."""
    cls = wrapping(optimizer_class, steps, **options)
    return cls.__new__(cls)
