"""What the modes that torch can be in mean for the wrapper: `torch.compile`, `torch.inference_mode`, `torch.func`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from fusedaccum.options import NAME

REASON = (
    f"{NAME} counts micro-batches and follows parameters on the host, which a graph would freeze as they are while it "
    "is traced; compile the model and its loss and call the wrapper after them, or compile with fullgraph=False"
)


def keep_out_of_graphs(cls: type) -> None:
    """Have `torch.compile` run every public method and property that `cls` defines as it is, between its graphs.

    To be called once there is an instance: it imports the compiler, which takes as long as importing torch, and which
    building a torch optimizer has imported already.
    """
    if "_out_of_graphs" in vars(cls):
        return
    for name, value in list(vars(cls).items()):
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            setattr(cls, name, property(_outside(value.fget), _outside(value.fset), doc=value.__doc__))
        elif inspect.isfunction(value):
            setattr(cls, name, _outside(value))
    cls._out_of_graphs = True  # type: ignore[attr-defined]


def _outside(function: Any) -> Any:
    return None if function is None else torch.compiler.disable(function, reason=REASON)


def no_grad() -> AbstractContextManager[Any]:
    """`torch.no_grad()`, and out of `torch.inference_mode()`: no tensor made there can be written to later.

    Raises RuntimeError where torch runs code without values: in a `torch.func` transform, under FakeTensorMode.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            f"{NAME}: called inside a torch.func transform (grad, vmap, jvp, functionalize), whose tensors hold no "
            "gradient before it returns; let the transform return the gradients, set `p.grad`, and call it then"
        )
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        raise RuntimeError(
            f"{NAME}: called under FakeTensorMode, whose tensors have no values, and windows are counted by what was "
            "folded; leave that mode first"
        )
    return _out_of_inference_mode() if torch.is_inference_mode_enabled() else torch.no_grad()


_NOTHING = contextlib.nullcontext()


def no_grad_in_hook() -> AbstractContextManager[Any]:
    """`no_grad()` in a backward whose first hook has called that: nothing where gradients are off, as in most."""
    return no_grad() if torch.is_grad_enabled() or torch.is_inference_mode_enabled() else _NOTHING


@contextlib.contextmanager
def _out_of_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield
