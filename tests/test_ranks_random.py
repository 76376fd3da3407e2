"""Random calls on several ranks, against a model in float64 that sees the micro-batches of all of them."""

from __future__ import annotations

import copy
import math
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from conftest import LONG
from processes import on_ranks
from torch.optim import SGD

from fusedaccum import FusedAccumOptimizer

SHAPES = [(3,), (70, 65), (0,), (4097,)]


class Model:
    """What `process_group` promises, in float64: SGD with momentum on the mean over ranks."""

    def __init__(self, size, options):
        self.size, self.options = size, options
        self.params = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        self.momentum = [0.0] * len(SHAPES)
        self.updates = self.skipped = 0
        self.norm = None
        self.begin()

    def begin(self):
        self.sums, self.count, self.items = [None] * len(SHAPES), [0] * self.size, [0.0] * self.size
        self.weighted, self.dropped = None, False

    def micro_batch(self, rank, gradients, items):
        self.count[rank] += 1
        self.items[rank] += items or 0.0
        self.weighted = items is not None
        for k, g in enumerate(gradients):
            if g is not None and items == 0:
                self.dropped = True
            elif g is not None:
                g = g.double() * (1.0 if items is None else items)
                self.sums[k] = g if self.sums[k] is None else self.sums[k] + g

    def close(self):
        total, touched = sum(self.count), [s for s in self.sums if s is not None]
        if not total:
            return
        divisor = sum(self.items) if self.weighted else total
        if self.options.get("reduction") == "sum":
            divisor = self.size
        if divisor == 0 or (self.dropped and not touched):
            self.norm, self.skipped = 0.0, self.skipped + 1
        elif not touched:
            self.norm = 0.0
        else:
            means = [None if s is None else s / divisor for s in self.sums]
            self.norm = math.sqrt(sum(float(m.pow(2).sum()) for m in means if m is not None))
            if not math.isfinite(self.norm) and self.options.get("nonfinite") == "skip_window":
                self.skipped += 1
            else:
                clip = min(1.0, self.options.get("max_norm", math.inf) / (self.norm + 1e-6))
                for k, m in enumerate(means):
                    if m is not None:
                        self.momentum[k] = 0.25 * self.momentum[k] + clip * m
                        self.params[k].sub_(0.5 * self.momentum[k])
                self.updates += 1
        self.begin()


def walk(seed, calls):
    """One random life of a wrapper. Every rank draws the same numbers, and so knows what all of them do."""
    rank, size = dist.get_rank(), dist.get_world_size()
    draw = random.Random(seed)
    options = draw.choice(
        [{}, {"reduction": "sum"}, {"max_norm": 0.7}, {"nonfinite": "skip_window"}, {"update": "wrapped"}]
    )
    if draw.random() < 0.4 and "update" not in options:
        options = {**options, "shard": "zero1"}
    fold = draw.choice(["step", "backward"])
    weights = draw.choice(["none", "none", "float", "tensor", "mixed"]) if "reduction" not in options else "none"
    nan_allowed = options.get("nonfinite") == "skip_window"
    bucket = {"bucket_mb": 0.01} if fold == "backward" else {}

    def wrapper(params):
        return FusedAccumOptimizer(
            SGD(params, lr=0.5, momentum=0.25), steps, process_group=dist.group.WORLD, fold=fold, **bucket, **options
        )

    steps = draw.randint(1, 4)
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    opt, model = wrapper(params), Model(size, options)
    loose = False  # flush() on counts that differ, next
    for call in range(calls):
        what = draw.choices(["micro", "flush", "uneven", "reset", "copy", "save"], [16, 1, 2, 1, 1, 2])[0]
        pending = model.count[rank]
        if what == "uneven" and max(model.count) + 1 < steps:
            ranks, loose = [r for r in range(size) if draw.random() < 0.5], True
        else:
            ranks = range(size)
        if what in ("micro", "uneven"):
            last = pending + 1 == steps and fold == "backward" and what == "micro" and draw.random() < 0.5
            last = last and "shard" not in options
            for r in ranks:
                g = torch.Generator().manual_seed(draw.randrange(2**31))
                grads = [torch.randn(s, generator=g) if draw.random() < 0.7 else None for s in SHAPES]
                if nan_allowed and draw.random() < 0.05:
                    grads = [x if x is None or not x.numel() else x.fill_(math.nan) for x in grads]
                items = None if weights == "none" else draw.choice([0, 1, 3, 12])
                model.micro_batch(r, grads, items)
                if r == rank:
                    on_device = weights == "tensor" or (weights == "mixed" and (r + call) % 2)
                    count = {} if items is None else {"mean_of": torch.tensor(float(items)) if on_device else items}
                    one_micro_batch(opt, params, grads, count, fold, last)
            if max(model.count) >= steps:
                model.close()
                loose = False
        elif what == "flush":
            opt.flush()
            model.close()
            loose = False
        elif what == "reset":
            opt.reset()
            model.begin()
            loose = False
        elif what == "copy":
            opt, params = copy.deepcopy((opt, params))
        elif what == "save" and not loose:
            opt.consolidate()
            saved = copy.deepcopy(opt.state_dict())
            opt.close()
            opt = wrapper(params)
            opt.load_state_dict(saved)
        if loose and max(model.count) + 1 >= steps:  # only flush() is right now
            opt.flush()
            model.close()
            loose = False
        compare(opt, params, model, rank, f"seed {seed}, call {call}: {what}")
    opt.reset()


def one_micro_batch(opt, params, grads, count, fold, last):
    if fold == "step":
        for p, g in zip(params, grads, strict=True):
            p.grad = None if g is None else g.clone()
        opt.step(**count)
        return
    opt.micro_batch(**count, last=last)
    used = [(p * g).sum() for p, g in zip(params, grads, strict=True) if g is not None]
    if used:
        sum(used).backward()
    opt.step()


def compare(opt, params, model, rank, where):
    assert (opt.updates, opt.skipped_windows, opt.pending) == (model.updates, model.skipped, model.count[rank]), where
    for p, q in zip(params, model.params, strict=True):
        error = (p.double() - q).abs().max().item() if p.numel() else 0.0
        assert error < 2e-5 * (1 + (q.abs().max().item() if q.numel() else 0)), (where, error)
    norm = opt.grad_norm
    if norm is not None and model.norm is not None:  # a loaded wrapper has none yet
        same = norm == pytest.approx(model.norm, rel=1e-5) if math.isfinite(model.norm) else not math.isfinite(norm)
        assert same, (where, norm, model.norm)


def walks(first, count, calls):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for seed in range(first, first + count):
            walk(seed, calls)


@pytest.mark.parametrize("size", [2, 4])
def test_random_lives(size):
    on_ranks(size, walks, 1000 * size, LONG or 48 // size, 30)
