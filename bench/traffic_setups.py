"""One window of training over several ranks, in each way that is compared: what bench.traffic counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

import fusedaccum
from bench.cases import MICRO_BATCHES
from fusedaccum import FusedAccumOptimizer
from fusedaccum.demo.model import GPT

Window = Callable[[], None]
TOKENS, WIDTH, LAYERS, CONTEXT, ROWS = 512, 128, 2, 32, 2


def make(dtype: torch.dtype) -> GPT:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return GPT(TOKENS, WIDTH, LAYERS, CONTEXT).to(dtype)


def batches() -> Iterator[tuple[bool, Tensor]]:
    """One window's micro-batches, others on each rank, and whether each is the last."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for index in range(MICRO_BATCHES):
        yield index == MICRO_BATCHES - 1, torch.randint(TOKENS, (ROWS, CONTEXT + 1), generator=generator)


def loss_of(model: Module, rows: Tensor) -> Tensor:
    """Through `forward`, which DistributedDataParallel and FSDP2 have to see."""
    return torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def native(model: Module, without: Callable[[bool], object]) -> Window:
    """PyTorch's own accumulation. without: is told whether the micro-batch is the last, and returns its context."""
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def window() -> None:
        for last, rows in batches():
            with without(last):
                (loss_of(model, rows) / MICRO_BATCHES).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return window


def ddp(model: Module, every: bool, hook: Callable | None = None) -> Window:
    shared = DistributedDataParallel(model)
    if hook is not None:
        shared.register_comm_hook(None, hook)
    return native(shared, lambda last: nullcontext() if every or last else shared.no_sync())


def wrapped(model: Module, optimizer: FusedAccumOptimizer, overlap: bool = False) -> Window:
    def window() -> None:
        for last, rows in batches():
            if overlap and last:
                optimizer.micro_batch(last=True)
            loss_of(model, rows).backward()
            optimizer.step()
            optimizer.zero_grad()

    return window


def ours(model: Module, hook: bool = False, overlap: bool = False, **options: object) -> Window:
    optimizer = FusedAccumOptimizer(
        AdamW(model.parameters(), lr=1e-3),
        steps=MICRO_BATCHES,
        max_norm=1.0,
        process_group=dist.group.WORLD,
        fold="backward" if overlap else "step",
        **options,
    )
    if hook:
        model = DistributedDataParallel(model)
        model.register_comm_hook(optimizer, fusedaccum.ddp_hook)
    return wrapped(model, optimizer, overlap)


def sharded(model: GPT) -> GPT:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def fsdp(model: GPT, every: bool) -> Window:
    shared = sharded(model)

    def context(last: bool) -> object:
        shared.set_requires_gradient_sync(every or last)
        return nullcontext()

    return native(shared, context)


def ours_on_fsdp(model: GPT, every: bool) -> Window:
    shared = sharded(model)
    optimizer = FusedAccumOptimizer(AdamW(shared.parameters(), lr=1e-3), steps=MICRO_BATCHES, max_norm=1.0)

    def window() -> None:
        for last, rows in batches():
            shared.set_requires_gradient_sync(every or last)
            loss_of(shared, rows).backward()
            optimizer.step()
            optimizer.zero_grad()

    return window


BF16 = torch.bfloat16
SETUPS: dict[str, Callable[[GPT], Window]] = {
    "DDP, every micro-batch": lambda model: ddp(model, every=True),
    "DDP, `no_sync` but for the last": lambda model: ddp(model, every=False),
    "DDP, the same, `fp16_compress_hook`": lambda model: ddp(model, every=False, hook=fp16_compress_hook),
    "`process_group`": ours,
    "`process_group`, `last=True`": lambda model: ours(model, overlap=True),
    "`process_group`, `wire_dtype=bfloat16`": lambda model: ours(model, wire_dtype=BF16),
    "DDP, `ddp_hook`": lambda model: ours(model, hook=True),
    '`shard="zero1"`': lambda model: ours(model, shard="zero1"),
    '`shard="zero1"`, `wire_dtype=bfloat16`': lambda model: ours(model, shard="zero1", wire_dtype=BF16),
    "FSDP2, every micro-batch": lambda model: fsdp(model, every=True),
    "FSDP2, last micro-batch": lambda model: fsdp(model, every=False),
    "FSDP2 and the wrapper, every micro-batch": lambda model: ours_on_fsdp(model, every=True),
    "FSDP2 and the wrapper, last micro-batch": lambda model: ours_on_fsdp(model, every=False),
}
