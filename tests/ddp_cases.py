"""What the tests of DistributedDataParallel share: a model that ranks use differently, its data, and what is right."""

from __future__ import annotations

import contextlib
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from wrapper_helpers import bits

import fusedaccum
from fusedaccum import FusedAccumOptimizer

FLAGS = ("static_graph", "find_unused_parameters", "gradient_as_bucket_view")
ALL_FLAGS = [dict(zip(FLAGS, on, strict=True)) for on in itertools.product((False, True), repeat=3)]
HOWS = ("no_sync", "hook")  # two ways to keep DDP from reducing
FOLDS = ("step", "backward")
LR, DECAY = 0.25, 0.5


def toy(**flags):
    """One weight, 0 at first, whose gradient is the input."""
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.zero_()
    return DistributedDataParallel(module, **flags)


def micro(model, g, w, x=None, **count):
    """A micro-batch: of a toy, one with the gradient `g` on this rank."""
    model(torch.tensor([[float(g)]]) if x is None else x).sum().backward()
    w.step(**count)
    w.zero_grad()


def wrapped(model, how, fold="step", steps=2, lr=1.0, **options):
    w = FusedAccumOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), steps, fold=fold, process_group=dist.group.WORLD, **options
    )
    if how == "hook":
        model.register_comm_hook(w, fusedaccum.ddp_hook)
    return w, (w.no_sync(model) if how == "no_sync" else contextlib.nullcontext())


class Branches(nn.Module):
    """`maybe` is used where the caller says so, `never` is not.

    reentrant: of the checkpointed layer; None: there is none.
    """

    def __init__(self, dtype=torch.float32, reentrant=None, never=True, plain=False) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(11)
        self.first, self.maybe, self.last = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.never = nn.Parameter(torch.zeros(7), requires_grad=never)
        self.reentrant = reentrant
        for p in self.parameters():
            p.data = (torch.rand(p.shape, generator=random) + 0.5).bfloat16().float()
        self.to(dtype)

    def forward(self, x, use):
        h = self.first(x)
        if use:
            h = h + (
                self.maybe(h) if self.reentrant is None else checkpoint(self.maybe, h, use_reentrant=self.reentrant)
            )
        return self.last(h)


def is_uneven(flags) -> bool:
    """Whether ranks may use different parameters."""
    return flags.get("static_graph", False) or flags.get("find_unused_parameters", False)


def batch(k, rank, dtype):
    """The k-th micro-batch of a rank."""
    random = torch.Generator().manual_seed(1000 * rank + k)
    return (torch.rand((2, 3), generator=random) + 0.5).to(dtype)


def uses(rank, uneven) -> bool:
    return rank == 0 or not uneven


def native_grads(model, k, rank, uneven):
    """What one micro-batch of one rank gives, in one process without DDP: {name: gradient or None}."""
    dtype = model.last.weight.dtype
    params = dict(model.named_parameters())
    held = {name: p.grad for name, p in params.items()}
    for p in params.values():
        p.grad = None
    model(batch(k, rank, dtype), uses(rank, uneven)).sum().backward()
    grads = {name: None if p.grad is None else p.grad.detach().clone() for name, p in params.items()}
    for name, p in params.items():
        p.grad = held[name]
    return grads


def mean_over(model, ks, uneven, world):
    """{name: (mean in float64, mean magnitude)} over the micro-batches `ks` of all ranks; None where nobody has one."""
    plain = Branches(model.last.weight.dtype, never=model.never.requires_grad)
    plain.load_state_dict(model.state_dict())
    all_of = [native_grads(plain, k, rank, uneven) for k in ks for rank in range(world)]
    right = {}
    for name in all_of[0]:
        there = [g[name].double() for g in all_of if g[name] is not None]
        right[name] = None if not there else (sum(there) / len(all_of), sum(g.abs() for g in there) / len(all_of))
    return right


def off_by(got, mean, magnitude, terms, rounding=0.0):
    """How much more than `terms` roundings of float32, and a relative `rounding`, there is between a sum and the truth:
    at most 1 is right.
    """
    allowed = ((terms + 2) * 2.0**-24 + rounding) * magnitude + 1e-30
    return ((got.double() - mean).abs() / allowed).max().item()


class Run:
    """One model on every rank, trained for two windows of 2; what it finds wrong it keeps in `wrong`."""

    STEPS = 2
    rounding = 0.0  # of each micro-batch's gradient, where DDP reduces it

    def __init__(self, flags, dtype, how, fold, group, reentrant=None, make=None, **options) -> None:
        self.uneven = is_uneven(flags)
        self.module = Branches(dtype, reentrant, never=self.uneven)
        self.model = DistributedDataParallel(self.module, **flags)
        # Every parameter decays, so that one that should not be updated shows it.
        inner = (make or torch.optim.SGD)(self.module.parameters(), lr=LR, weight_decay=DECAY)
        pg = dist.group.WORLD if group else None
        self.w = FusedAccumOptimizer(inner, self.STEPS, fold=fold, process_group=pg, **options)
        self.w.register_step_pre_hook(lambda *_: self.look())
        self.how, self.wrong, self.means, self.k = how, [], {}, 0
        if how == "hook":
            self.model.register_comm_hook(self.w, fusedaccum.ddp_hook)

    def look(self):
        self.means = {name: self.w.master_grad(p).clone() for name, p in self.module.named_parameters()}

    def context(self):
        return self.w.no_sync(self.model) if self.how == "no_sync" else contextlib.nullcontext()

    def backward(self):
        rank, dtype = dist.get_rank(), self.module.last.weight.dtype
        self.model(batch(self.k, rank, dtype), uses(rank, self.uneven)).sum().backward()
        self.k += 1

    def window(self):
        before = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        ks = range(self.k, self.k + self.STEPS)
        right = mean_over(self.module, ks, self.uneven, dist.get_world_size())
        with self.context():
            for _ in ks:
                self.backward()
                if self.w._window.in_backward is not None:
                    self.note("p.grad after a backward", [n for n, p in self.named() if p.grad is not None])
                self.w.step()
                self.w.zero_grad()
        if not self.w.updated:
            self.wrong.append("no update")
        terms = self.STEPS * dist.get_world_size()
        for name, p in self.named():
            if right[name] is None:
                if bits(p) != bits(before[name]):
                    self.wrong.append(f"{name} was updated without a gradient")
                continue
            mean, size = right[name]
            if (off := off_by(self.means[name], mean, size, terms, self.rounding)) > 1:
                self.wrong.append(f"mean of {name}: {off}")
            after = before[name].double() * (1 - LR * DECAY) - LR * mean
            eps = torch.finfo(p.dtype).eps / 2
            allowed = eps * after.abs() + ((terms + 8) * 2.0**-24 + self.rounding) * (
                before[name].double().abs() + size
            )
            if ((p.double() - after).abs() > allowed).any():
                self.wrong.append(f"{name} after the update")

    def named(self):
        return self.module.named_parameters()

    def note(self, what, found):
        if found:
            self.wrong.append(f"{what}: {found}")

    def result(self):
        return self.wrong, [bits(p) for p in self.module.parameters()]


def assert_right(results):
    """results: of every rank, {case: (wrong, bits)}."""
    for case in results[0]:
        for rank, result in enumerate(results):
            assert result[case][0] == [], f"rank {rank}, {case}: {result[case][0]}"
            assert result[case][1] == results[0][case][1], f"ranks 0 and {rank} differ: {case}"
