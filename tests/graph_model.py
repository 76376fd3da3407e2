"""A CUDA graph without CUDA: what is captured does not run, and runs on every replay with the same tensors.

On a GPU a captured call does its part on the host at once, and its part on the device only when the graph is replayed.
`Graph` holds torch's operators to that on the CPU: tensors of floats stand for device memory, and so does what is
written to tensors of int64; other tensors of integers are what the host knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from fusedaccum import capture

SYNCS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::item")


class Graph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Callable[[], object]] = []
        self.launched: list[str] = []
        self.allocated: list[str] = []

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowAutograd():  # where they were captured
            for node in self.nodes:
                node()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        assert name not in SYNCS, f"{name} waits for the device, which breaks a capture"
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if func.namespace == "fusedaccum":
            return self._launch(func, args)
        returns = func._schema.returns
        on_device = func._schema.is_mutable and any(t.dtype == torch.int64 for t in tensors)
        if tensors and not on_device and not any(t.is_floating_point() for t in tensors):
            return func(*args, **kwargs)
        if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return func(*args, **kwargs)  # a view
        self.launched.append(name)
        if func._schema.is_mutable:
            self.nodes.append(lambda: func(*args, **kwargs))
            return args[0]
        out = func(*args, **kwargs)
        self.allocated.append(name)
        self.nodes.append(lambda: self._again(func, args, kwargs, out))
        return out

    @staticmethod
    def _again(func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        for old, new in zip(tree_flatten(out)[0], tree_flatten(func(*args, **kwargs))[0], strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)

    def _launch(self, func: Any, args: tuple) -> None:
        """One of our operators: marks go to the kernel by value and change at once, all else waits for the replay."""
        names = [argument.name for argument in func._schema.arguments]
        by_value = [arg.clone() if name == "marks" else arg for name, arg in zip(names, args, strict=True)]
        copies = [
            arg if name == "marks" else tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, arg)
            for name, arg in zip(names, args, strict=True)
        ]
        func(*copies)
        self.launched.append(func._schema.name)
        # A kernel changes no mark, so each replay gets them as they were.
        self.nodes.append(
            lambda: func(*[a.clone() if n == "marks" else a for n, a in zip(names, by_value, strict=True)])
        )


@contextmanager
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graph]:
    """Capture what the block does."""
    graph = Graph()
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    try:
        with graph:
            yield graph
    finally:
        monkeypatch.setattr(capture, "is_capturing", lambda: False)


def rates_are_tensors(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """`capture.rates_on_device` where the CPU stands for the device."""
    return all(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
