"""Step hooks: fired once per update, those of the wrapper and those that the wrapped optimizer will not fire itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import optimizer as torch_optimizer

from fusedaccum.options import NAME

if TYPE_CHECKING:
    from fusedaccum.optimizer import FusedAccumOptimizer

# The six dictionaries of hooks that `torch.optim.Optimizer` keeps.
NAMES = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def before_update(wrapper: FusedAccumOptimizer) -> bool:
    """Fire the step pre-hooks; returns whether there were any. What they return may not matter, but must be what torch
    allows.
    """
    hooks = _hooks(wrapper, "_optimizer_step_pre_hooks", torch_optimizer._global_optimizer_pre_hooks)
    for hook, owner in hooks:
        result = hook(owner, (owner,), {})
        if result is not None and not (isinstance(result, tuple) and len(result) == 2):
            raise RuntimeError(f"{NAME}: a step pre-hook must return None or a tuple (args, kwargs), not {result!r}")
    return bool(hooks)


def after_update(wrapper: FusedAccumOptimizer) -> None:
    """Fire the step post-hooks, and let schedulers know that there was a step."""
    wrapper._optimizer_step_code()
    # Schedulers built on either optimizer look for this mark, and flush() is not a call of step().
    wrapper._opt_called = wrapper.optimizer._opt_called = True  # type: ignore[attr-defined]
    for hook, owner in _hooks(wrapper, "_optimizer_step_post_hooks", torch_optimizer._global_optimizer_post_hooks):
        hook(owner, (owner,), {})


def _hooks(wrapper: FusedAccumOptimizer, name: str, everywhere: dict[int, Any]) -> list[tuple[Any, Any]]:
    """(hook, optimizer that it was registered on). In the wrapped update the inner `step()` fires the inner ones."""
    mine = [(hook, wrapper) for hook in getattr(wrapper, name).values()]
    window = wrapper._window
    if window.update.name == "wrapped":
        return mine
    inner = window.optimizer
    theirs = [(hook, inner) for hook in getattr(inner, name).values()]
    return [*((hook, inner) for hook in everywhere.values()), *mine, *theirs]
