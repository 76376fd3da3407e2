"""The memory behind a tensor: its own, or for a DTensor that of the part which this rank holds."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

# What parameters and gradients nearly always are; other classes are looked at more closely.
COMMON = {Tensor, torch.nn.Parameter, type(None)}


def is_distributed(tensor: Any) -> bool:
    """Whether `tensor` is a `torch.distributed.tensor.DTensor`, which nothing is before somebody imports that."""
    if type(tensor) in COMMON:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The plain tensor that holds the numbers of `tensor` on this rank: itself, unless it is a DTensor.

    No collective, and no copy: it is the same memory.
    """
    return tensor._local_tensor if is_distributed(tensor) else tensor


def like(param: Tensor, values: Tensor) -> Tensor:
    """`values`, of the shape of `local(param)`, as `param` is: a DTensor over the same ranks, or as they are."""
    if not is_distributed(param):
        return values
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = param._spec
    meta = TensorMeta(param.shape, param.stride(), values.dtype)
    make = sys.modules["torch.distributed.tensor"].DTensor
    return make(values, DTensorSpec(spec.mesh, spec.placements, meta), requires_grad=False)


def trace(param: Tensor, memory: Tensor) -> tuple[int, ...]:
    """What changes whenever the values of `param` are, `memory` being where they lie on this rank.

    A DTensor and its local tensor count their versions each for itself.
    """
    return (param._version, memory._version, memory.data_ptr())
