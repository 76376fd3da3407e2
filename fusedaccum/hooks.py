"""Step hooks, fired once per update: the wrapper's, and those that the wrapped optimizer will not fire itself. And our
own hooks on parameters.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from fusedaccum.modes import REASON
from fusedaccum.options import NAME, parameters

if TYPE_CHECKING:
    from fusedaccum.optimizer import FusedAccumOptimizer
    from fusedaccum.window import Window

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


class ParameterHooks:
    """Hooks on the parameters of one wrapper, by which it hears of gradients as they appear.

    They hold the wrapper's window by a weak reference: where it is gone they do nothing.
    """

    def __init__(self) -> None:
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._before: dict[Tensor, tuple[RemovableHandle, int]] = {}
        self._inside: dict[Tensor, int] = {}  # what `torch.utils.swap_tensors` takes away, and the hooks with it
        self._params: dict[int, Tensor] = {}  # a weak reference would keep torch.utils.swap_tensors from a parameter
        self._keys = itertools.count()
        self._behind: list[Tensor] = []  # whose hooks of others were registered after ours

    def fit(self, window: Window, listener: str, around: bool = False) -> None:
        """Hook every parameter that can get a gradient, and no other, with `arrive` of the window's `listener`.

        One that was frozen keeps its hooks: nobody says so when it is not any more.

        around: also with its `before`, which runs ahead of autograd's addition and behind the hooks of others; its
        `arrive` then runs ahead of those, which see `p.grad` as if there were no hook of ours.
        """
        there = dict.fromkeys(parameters(window.optimizer))
        for p in [p for p in self._handles if p not in there]:
            self._remove(p)
        for p in [p for p, inside in self._inside.items() if p._cdata != inside]:
            self._remove(p)
            p._post_accumulate_grad_hooks = None  # what stood there belongs to another tensor now
            if around:
                p._backward_hooks = None
        new = [p for p in there if p.requires_grad and p not in self._handles and p.is_leaf and not is_lazy(p)]
        if not new:
            return
        known = weakref.ref(window)

        def arrive(p: Tensor) -> None:
            if (window := known()) is not None:
                getattr(window, listener).arrive(window, p)

        arrive = torch.compiler.disable(arrive, reason=REASON)
        for p in new:
            self._inside[p] = p._cdata
            self._handles[p] = p.register_post_accumulate_grad_hook(arrive)
            if around:
                hooks = p._post_accumulate_grad_hooks
                _put_last(hooks, [key for key in hooks if key != self._handles[p].id])
                key = next(self._keys)
                self._params[key] = p
                self._before[p] = p.register_hook(_before(known, listener, key)), key

    def param(self, key: int) -> Tensor | None:
        """The parameter of a `before`; None where its hook is not ours any more."""
        return self._params.get(key)

    def number(self, p: Tensor) -> int:
        """The number of our hook among those of `p`; -1 where `p` has none."""
        return self._handles[p].id if p in self._handles else -1

    def is_last(self, p: Tensor, number: int) -> bool:
        """Whether nobody else's hook on `p` runs after ours, and may look at its gradient; `come_last` mends it."""
        last = next(reversed(p._post_accumulate_grad_hooks)) == number
        if not last:
            self._behind.append(p)
        return last

    def come_last(self) -> None:
        """Run after the hooks of others, which were registered later."""
        for p in self._behind:
            if (handle := self._handles.get(p)) is not None:
                _put_last(p._post_accumulate_grad_hooks, [handle.id])
        self._behind.clear()

    def come_around(self) -> None:
        """Have our `before` run behind hooks of others that were registered later."""
        for p, (handle, _) in self._before.items():
            hooks = p._backward_hooks
            if hooks and handle.id in hooks and next(reversed(hooks)) != handle.id:
                _put_last(hooks, [handle.id])

    def _remove(self, p: Tensor) -> None:
        self._handles.pop(p).remove()
        del self._inside[p]
        if p in self._before:
            handle, key = self._before.pop(p)
            handle.remove()
            del self._params[key]

    def remove(self) -> None:
        """Remove them all."""
        for p in list(self._handles):
            self._remove(p)

    def __del__(self) -> None:
        self.remove()


def _put_last(hooks: dict[int, Any], keys: list[int]) -> None:
    """Autograd calls hooks in the order in which they were put into the dict; `move_to_end` does not change that."""
    for key in keys:
        hooks[key] = hooks.pop(key)


def _before(known: weakref.ref[Window], listener: str, key: int) -> Callable[[Tensor], None]:
    def before(grad: Tensor) -> None:
        if (window := known()) is not None:
            getattr(window, listener).before(key, window)

    return torch.compiler.disable(before, reason=REASON)
