"""Training in several processes. Each takes other parts of the text, and every window is reduced over them once.

torchrun --nproc-per-node 2 examples/distributed.py            # the model as it is; the last backward overlaps
torchrun --nproc-per-node 2 examples/distributed.py --ddp      # inside DistributedDataParallel, with our hook
torchrun --nproc-per-node 4 examples/distributed.py --zero1    # each rank holds and updates a part of the state
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler

import fusedaccum
from fusedaccum import FusedAccumOptimizer, GatedScheduler
from fusedaccum.demo.comms import Collectives
from fusedaccum.demo.data import load_corpus
from fusedaccum.demo.model import GPT

CONTEXT, ROWS, STEPS = 64, 4, 8  # tokens in a row, rows in a micro-batch, micro-batches of each rank in an update


def train(given: argparse.Namespace) -> None:
    torch.manual_seed(0)  # the same model on every rank
    corpus = load_corpus()
    rows = corpus.train.unfold(0, CONTEXT + 1, CONTEXT)[: given.batches * ROWS * dist.get_world_size()]
    loader = DataLoader(rows, batch_size=ROWS, sampler=DistributedSampler(rows))  # equally many on every rank
    updates = -(-len(loader) // STEPS)

    model = GPT(len(corpus.vocabulary), width=64, layers=2, context=CONTEXT).to(torch.bfloat16)
    opt = FusedAccumOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95)),
        steps=STEPS,
        max_norm=1.0,
        master_weights=True,
        state_dtype=torch.float32,
        process_group=dist.group.WORLD,
        fold="step" if given.zero1 else "backward",
        shard="zero1" if given.zero1 else None,
    )
    scheduler = GatedScheduler(CosineAnnealingLR(opt, updates), opt)
    if given.ddp:
        model = DistributedDataParallel(model)
        model.register_comm_hook(opt, fusedaccum.ddp_hook)  # DDP leaves the gradients to us

    counted = Collectives()  # of what is inside `with counted`
    losses = []
    for index, batch in enumerate(loader):
        with counted:
            if opt.will_update and not given.zero1:
                opt.micro_batch(last=True)  # its backward sends what is complete
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            opt.step()
        scheduler.step()
        opt.zero_grad()
        losses.append(loss.item())
        if opt.updated:
            report(opt, losses, scheduler, counted)
        if given.checkpoint and index == len(loader) // 2:
            save(model, opt, given.checkpoint)
    with counted:
        short = opt.flush()  # the last window; on every rank, as step()
    if short:
        scheduler.step()
        report(opt, losses, scheduler, counted)
    check_identical(model)


def report(opt: FusedAccumOptimizer, losses: list[float], scheduler: GatedScheduler, counted: Collectives) -> None:
    loss = torch.tensor(sum(losses) / len(losses))
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        norm, rate, sent = opt.grad_norm, scheduler.get_last_lr()[0], counted.sent
        print(f"update {opt.updates:3}  loss {loss:.3f}  norm {norm:.2f}  next lr {rate:.2e}  sent {sent:,.0f} bytes")
    losses.clear()
    counted.calls.clear()


def save(model: torch.nn.Module, opt: FusedAccumOptimizer, path: Path) -> None:
    """In the middle of a window, which any number of ranks may go on with."""
    opt.consolidate()  # on every rank, as it collects what is theirs
    if dist.get_rank() == 0:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        torch.save({"model": inner.state_dict(), "optimizer": opt.state_dict()}, path)


def check_identical(model: torch.nn.Module) -> None:
    mine = torch.cat([p.detach().flatten() for p in model.parameters()]).view(torch.int16)
    everybody = [torch.empty_like(mine.int()) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine.int())
    if not all(torch.equal(mine.int(), other) for other in everybody):
        raise SystemExit("the ranks hold different parameters")
    if dist.get_rank() == 0:
        print(f"{len(everybody)} ranks hold the same {len(mine):,} parameters, bit by bit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=112, help="micro-batches of each rank")
    parser.add_argument("--checkpoint", type=Path, help="where to save in the middle")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--ddp", action="store_true", help="inside DistributedDataParallel")
    ways.add_argument("--zero1", action="store_true", help="optimizer state in shards")
    dist.init_process_group("gloo")
    train(parser.parse_args())
    dist.destroy_process_group()
