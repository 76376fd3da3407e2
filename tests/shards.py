"""What the tests of DTensor parameters share: models that FSDP2 shards, and runs that every rank makes alike."""

from __future__ import annotations

import contextlib
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from fusedaccum import FusedAccumOptimizer

SIZES = (5, 7, 3, 1)  # no two ranks can share these evenly: shards of several lengths, and without elements


def mesh_of(*shape):
    """A mesh of all ranks, or of that shape."""
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def model_of(dtype=torch.float32, device="cpu"):
    torch.manual_seed(3)
    layers = [layer for a, b in itertools.pairwise(SIZES) for layer in (nn.Linear(a, b, device=device), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def shard(model, mesh=None, **options):
    """`fully_shard` on every layer with parameters, then on the rest: the root has none of its own."""
    mesh = mesh or mesh_of()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def data_of(index, rank):
    """The samples that `rank` sees in micro-batch number `index`: float64, so that a reference can be."""
    return torch.randn(4, SIZES[0], generator=torch.Generator().manual_seed(1000 * index + rank), dtype=torch.float64)


def loss_of(model, index, rank=None):
    dtype = next(model.parameters()).dtype
    return model(data_of(index, dist.get_rank() if rank is None else rank).to(dtype)).square().mean()


def whole(tensors):
    """Copies of the full tensors of DTensors, and of plain tensors."""
    return [(t.detach().full_tensor() if hasattr(t, "full_tensor") else t.detach()).clone() for t in tensors]


def policy(reduce_dtype):
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)


def train(model, optimizer, steps, micro_batches, sync="each", scale=1.0, max_norm=None):
    """The loop of the tests: bare optimizers step where a window of `steps` ends, wrappers at every call.

    sync: "each" micro-batch, or the "last" of a window. Returns the norms that `clip_grad_norm_` says.
    """
    norms = []
    each_call = isinstance(optimizer, FusedAccumOptimizer) and optimizer.steps is not None
    for k in range(micro_batches):
        last = k % steps == steps - 1
        if sync == "last":
            model.set_requires_gradient_sync(last)
        (loss_of(model, k) * scale).backward()
        if each_call or last:
            if max_norm is not None:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).full_tensor().item())
            optimizer.step()
            optimizer.zero_grad()
    return norms


def in_one_process(optimizer_of, steps, micro_batches, ranks, dtype=torch.float64):
    """(parameters, norms) of a model that sees all ranks' samples, in float64: what is right."""
    model = model_of(dtype)
    optimizer = optimizer_of(model.parameters())
    norms = []
    for k in range(micro_batches):
        for rank in range(ranks):
            (loss_of(model, k, rank) / steps / ranks).backward()
        if k % steps == steps - 1:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())
            optimizer.step()
            optimizer.zero_grad()
    return whole(model.parameters()), norms


def distributed(tensor, mesh, placements):
    """`tensor`, the same on all ranks, as a DTensor."""
    return distribute_tensor(tensor, mesh, placements)


@contextlib.contextmanager
def closing(wrapper):
    """Leave no open window behind: its warning belongs to no other test."""
    try:
        yield wrapper
    finally:
        wrapper.reset()
