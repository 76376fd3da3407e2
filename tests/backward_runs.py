"""What the tests of fold="backward" share: training in both ways of folding, a custom function that fails, buckets."""

from __future__ import annotations

import torch
from torch.optim import SGD
from wrapper_helpers import snapshot, wrap

BYTE = 2.0**-20  # a bucket of one byte: every gradient is folded alone
# Some gradients of SHAPES share a bucket, the largest is larger than it.
BUCKETS = {"1 byte": BYTE, "100 bytes": 100 * BYTE, "20 KiB": 20 * 1024 * BYTE, "25 MiB": 25}
SHAPES = [(5,), (33, 4), (), (4097,), (2, 3, 4), (0,), (1,), (64,)]


def start_values(dtype, shapes=SHAPES):
    random = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter((torch.rand(s, generator=random) + 0.5).to(dtype)) for s in shapes]


def gradients(micro_batch, params, absent=()):
    """Values for each parameter, in its dtype; None for those that get no gradient in this micro-batch."""
    random = torch.Generator().manual_seed(100 + micro_batch)
    values = [torch.randn(p.shape, generator=random).to(p.dtype) for p in params]
    return [None if (micro_batch, k) in absent else g for k, g in enumerate(values)]


def give(params, grads):
    """A backward that leaves `grads`; none at all where there are none."""
    terms = [(p * g).sum().float() for p, g in zip(params, grads, strict=True) if g is not None]
    if terms:
        sum(terms).backward()


def train(fold, make, dtype, calls, **options):
    """Snapshots after each of `calls`: (micro-batch, item counts of it) or the name of a method to be called.

    In fold="backward" counts are given ahead of the backward and every p.grad has to be None after it.
    """
    options = {"steps": 4, "absent": (), "bad": (), "shapes": SHAPES} | options
    absent, bad, shapes = (options.pop(name) for name in ("absent", "bad", "shapes"))
    params = start_values(dtype, shapes)
    w = wrap(make(params), fold=fold, **options)
    seen = []
    for call in calls:
        if isinstance(call, str):
            getattr(w, call)()
        else:
            number, counts = call
            if counts and fold == "backward":
                w.micro_batch(**counts)
            grads = gradients(number, params, absent)
            if number in bad:
                grads[1].view(-1)[3] = torch.nan
            give(params, grads)
            if fold == "backward":
                assert all(p.grad is None for p in params)
            w.step(**(counts if fold == "step" else {}))
        seen.append(snapshot(w) | {"skipped": w.skipped_windows, "updated": w.updated})
    return seen


def assert_alike(make, dtype, calls, bucket, **options):
    """Both ways of folding, call by call, by bits."""
    want = train("step", make, dtype, calls, **options)
    got = train("backward", make, dtype, calls, bucket_mb=bucket, **options)
    for number, (a, b) in enumerate(zip(want, got, strict=True)):
        assert b == a, f"call {number}: {[key for key in a if a[key] != b[key]]}"
    return got


def plain(count):
    return [(k, {}) for k in range(count)]


class Boom(torch.autograd.Function):
    """The identity, whose backward raises while `armed`."""

    armed: BaseException | None = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Boom.armed is not None:
            raise Boom.armed
        return grad


def sgd_pair(n=2, values=(2.0, 3.0), steps=2, **options):
    """(parameters, wrapper) around SGD with rate 1, of as many parameters of `n` elements as there are values."""
    params = [torch.nn.Parameter(torch.full((n,), value)) for value in values]
    return params, wrap(SGD(params, lr=1.0), steps, fold="backward", **options)


def held(w, params):
    """The first element of what the window holds for each."""
    return [w.master_grad(p).view(-1)[0].item() for p in params]
