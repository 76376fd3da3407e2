"""Backward passes as hooks on parameters see them: which have begun, and whether they came to their end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

# What the engine calls to run the backward of a custom function.
_APPLY = tuple(
    getattr(BackwardCFunction, name).__code__ for name in ("apply", "apply_boxed") if hasattr(BackwardCFunction, name)
)


class Passes:
    """The backward passes in which hooks of one wrapper have run.

    A pass inside a pass (reentrant checkpointing runs the backward of a segment inside a node of another) has not come
    to its end before the one around it has.
    """

    def __init__(self) -> None:
        self._known = -1  # the pass that the last hook ran in
        self._open: set[object] = set()
        self.failed = False  # one ended with an exception

    @property
    def unfinished(self) -> bool:
        """Whether a pass has begun and not ended, or ended with an exception."""
        return self.failed or bool(self._open)

    @property
    def is_known(self) -> bool:
        """Whether this hook runs in the pass that the last one ran in, and that one entered it."""
        return self._known == torch._C._current_graph_task_id() != -1

    def enter(self, ended: Callable[[], None], failed: Callable[[], None]) -> bool:
        """To be called in every hook; returns whether it is the first of its pass.

        Afterwards `ended` is called where the pass, and every one around it, came to its end, with the streams of its
        caller current; `failed` where one was left with an exception.
        """
        this = torch._C._current_graph_task_id()
        if this == self._known:
            return False
        self._known = this
        end = _End(self, ended, failed)
        self._open.add(end.token)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        if (node := _node_around()) is not None:
            self._follow(node, this, ended, failed)
        return True

    def _follow(self, node: Any, inside: int, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        """Enter the pass that `node` belongs to as soon as the pass `inside` of it is over."""
        link = object()
        self._open.add(link)

        def after(grad_inputs: Any, grad_outputs: Any) -> None:
            handle.remove()
            if link not in self._open:
                return
            if torch._C._current_graph_task_id() > inside:  # a later pass: the one around it was left by an exception
                self.failed = True
                return
            self.enter(ended, failed)
            self._open.discard(link)

        handle = node.register_hook(after)

    def close(self, token: object, failed: bool) -> bool:
        """A pass is over. Returns whether it is one that has not been forgotten."""
        known = token in self._open
        self._open.discard(token)
        self.failed = self.failed or (known and failed)
        if known:
            self._known = -1
        return known

    def forget(self) -> None:
        """Have no part any more in passes that have begun."""
        self._open = set()
        self._known, self.failed = -1, False


class _End:
    """What the engine calls at the end of a pass that succeeds, and drops with the others."""

    def __init__(self, passes: Passes, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self.passes = passes
        self.token = object()
        self.ended, self.failed = ended, failed

    def __call__(self) -> None:
        if self.passes.close(self.token, failed=False) and not self.passes.unfinished:
            self.ended()

    def __del__(self) -> None:
        if self.passes.close(self.token, failed=True):
            self.failed()


def is_compiled() -> bool:
    """Whether hooks are called by compiled autograd, which drops what was queued for the end of a pass."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and module.in_compiled_autograd_region


def _node_around() -> Any:
    """The node of a custom function in whose backward this pass was begun; None where it is the outermost."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _APPLY:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
