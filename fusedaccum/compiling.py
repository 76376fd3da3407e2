"""`torch.compile` around the wrapper: it runs between graphs, never inside one."""

from __future__ import annotations

import inspect
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
