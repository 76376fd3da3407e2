"""FSDP2 in several processes: parameters, gradients, sums and optimizer state in shards, FP32; computing in bf16.

torchrun --nproc-per-node 2 examples/fsdp.py
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler

from fusedaccum import FusedAccumOptimizer, GatedScheduler
from fusedaccum.demo.comms import Collectives
from fusedaccum.demo.data import load_corpus
from fusedaccum.demo.model import GPT

CONTEXT, ROWS, STEPS = 64, 4, 8  # tokens in a row, rows in a micro-batch, micro-batches of each rank in an update


def train(given: argparse.Namespace) -> None:
    torch.manual_seed(0)  # the same model on every rank, before it is cut
    corpus = load_corpus()
    rows = corpus.train.unfold(0, CONTEXT + 1, CONTEXT)[: given.batches * ROWS * dist.get_world_size()]
    loader = DataLoader(rows, batch_size=ROWS, sampler=DistributedSampler(rows))  # equally many on every rank
    updates = -(-len(loader) // STEPS)

    model = GPT(len(corpus.vocabulary), width=64, layers=2, context=CONTEXT)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    # FSDP2 reduces the gradients over its own ranks: no process_group.
    opt = FusedAccumOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95)), steps=STEPS, max_norm=1.0
    )
    scheduler = GatedScheduler(CosineAnnealingLR(opt, updates), opt)

    counted = Collectives()  # of what is inside `with counted`
    losses = []
    for index, batch in enumerate(loader):
        with counted:
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            opt.step()
        scheduler.step()
        opt.zero_grad()
        losses.append(loss.item())
        if opt.updated:
            report(opt, losses, scheduler, counted)
        if given.checkpoint and index == len(loader) // 2:  # in the middle of a window; each rank writes its shards
            dcp.save({"model": model, "optimizer": opt}, checkpoint_id=given.checkpoint)
    with counted:
        short = opt.flush()  # the last window; on every rank, as step()
    if short:
        scheduler.step()
        report(opt, losses, scheduler, counted)


def report(opt: FusedAccumOptimizer, losses: list[float], scheduler: GatedScheduler, counted: Collectives) -> None:
    loss = torch.tensor(sum(losses) / len(losses))
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    norm, rate, sent = opt.grad_norm, scheduler.get_last_lr()[0], counted.sent
    if dist.get_rank() == 0:
        print(f"update {opt.updates:3}  loss {loss:.3f}  norm {norm:.2f}  next lr {rate:.2e}  sent {sent:,.0f} bytes")
    losses.clear()
    counted.calls.clear()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=112, help="micro-batches of each rank")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to in the middle")
    dist.init_process_group("gloo")
    train(parser.parse_args())
    dist.destroy_process_group()
