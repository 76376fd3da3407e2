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


def why_not_taken(param: Tensor) -> str | None:
    """Why a DTensor cannot be a parameter here, in words that complete "because", and the way out; None if it can."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    other = [p for p in param.placements if not isinstance(p, Shard | _StridedShard | Replicate)]
    if other:
        return (
            f"its placements {tuple(param.placements)} hold {other[0]}, and a parameter is sharded or replicated over "
            "each mesh dimension; redistribute() it"
        )
    if param.device_mesh.get_coordinate() is None:
        return "this rank is not in its mesh; build the optimizer on the ranks that hold it, over their parameters"
    if (inner := type(param._local_tensor)).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return (
            f"its local tensor is a {inner.__name__}, whose numbers are where only the class knows; give DTensors of "
            "plain tensors, or leave it to another optimizer"
        )
    return None


def is_shared(param: Tensor) -> bool:
    """Whether `param` is a DTensor over several ranks."""
    return is_distributed(param) and param.device_mesh.size() > 1
