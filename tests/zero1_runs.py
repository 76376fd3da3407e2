"""What tests of shard="zero1" share: a model with all sorts of parameters, and windows to train it with."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch.optim import SGD, Adam, AdamW

from fusedaccum import FusedAccumOptimizer

BF16 = torch.bfloat16

# (shape, dtype, kind). Shares end inside of several of them, on 2 and on 4 ranks.
SHAPES = [
    ((300, 41), 0, ""),
    ((7,), 0, ""),
    ((), 1, ""),
    ((0, 3), 0, ""),
    ((4, 8, 9, 5), 1, "channels_last"),
    ((9003,), 1, ""),
    ((60, 70), 0, "sliced"),
    ((64,), 0, ""),
    ((90, 50), 1, "transposed"),
]
OPTIMIZERS = {
    "adamw": lambda groups: AdamW(groups, lr=0.01, weight_decay=0.3),
    "amsgrad": lambda groups: Adam(groups, lr=0.01, weight_decay=0.1, amsgrad=True, maximize=True),
    "sgd": lambda groups: SGD(groups, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "nesterov": lambda groups: SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "plain": lambda groups: SGD(groups, lr=0.1),
}


def make_params(dtypes=(torch.float32, torch.float32), seed=0):
    """Parameters; dtypes: of the first and of the second kind."""
    g = torch.Generator().manual_seed(seed)
    params = []
    for shape, which, kind in SHAPES:
        values = torch.randn(shape, generator=g).to(dtypes[which])
        if kind == "channels_last":
            values = values.to(memory_format=torch.channels_last)
        elif kind == "sliced":  # not dense in memory
            values = torch.stack((values, values), -1)[..., 0]
        elif kind == "transposed":
            values = values.t()
        params.append(torch.nn.Parameter(values))
    return params


def groups_of(params):
    return [{"params": params[:5], "lr": 0.02}, {"params": params[5:]}]


def wrap(make, params, steps=2, shard="zero1", **options):
    return FusedAccumOptimizer(
        OPTIMIZERS[make](groups_of(params)), steps, process_group=dist.group.WORLD, shard=shard, **options
    )


def gradients(params, window, micro, rank, missing=0.3):
    """Of one micro-batch, another one on each rank. Some are missing; half of those in every micro-batch of a window.

    Multiples of 1/8, whose sums are exact: the order in which ranks are added does not show.
    """
    g = torch.Generator().manual_seed(1000 * window + 10 * micro + rank)
    of_window = torch.Generator().manual_seed(window)
    grads = []
    for p in params:
        absent = float(torch.rand((), generator=of_window)) < missing / 2
        absent |= float(torch.rand((), generator=g)) < missing / 2
        grad = torch.randn(p.shape, generator=g).mul_(8).round_().div_(8).to(p.dtype)
        grads.append(None if absent else grad)
    return grads


def train(opt, params, windows, steps=2, rank=None, missing=0.3, first=0):
    for w in range(first, first + windows):
        for m in range(steps):
            micro_batch(opt, params, gradients(params, w, m, dist.get_rank() if rank is None else rank, missing))


def micro_batch(opt, params, grads):
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    opt.step()


def bits(tensor):
    whole = tensor.detach().contiguous().reshape(-1)
    return whole.view(torch.uint8).numpy().tobytes()


def same_bits(these, those):
    return all(a.dtype == b.dtype and bits(a) == bits(b) for a, b in zip(these, those, strict=True))


def digest(params):
    return [hashlib.sha256(bits(p)).hexdigest() for p in params]


def state_bytes(opt):
    """Of moments, and of masters."""
    moments = [v for s in opt.optimizer.state.values() for key, v in s.items() if key != "step"]
    masters = [t for side in opt._window.update.sides.values() if side.masters for t in side.masters.tensors]
    return sum(t.untyped_storage().nbytes() for t in moments), sum(t.untyped_storage().nbytes() for t in masters)


def state_bits(opt):
    """The optimizer's state here, parameter after parameter."""
    params = [p for group in opt.param_groups for p in group["params"]]
    return [sorted((key, bits(v)) for key, v in opt.optimizer.state.get(p, {}).items()) for p in params]
