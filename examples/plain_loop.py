"""A plain PyTorch loop. The model is bf16; sums of 8 micro-batches, masters and moments are FP32.

python examples/plain_loop.py
"""

import argparse

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from fusedaccum import FusedAccumOptimizer, GatedScheduler
from fusedaccum.demo.data import load_corpus
from fusedaccum.demo.model import GPT

CONTEXT, ROWS, STEPS = 64, 4, 8  # tokens in a row, rows in a micro-batch, micro-batches in an update


def main(batches: int) -> None:
    torch.manual_seed(0)
    corpus = load_corpus()
    rows = corpus.train.unfold(0, CONTEXT + 1, CONTEXT)[: batches * ROWS]
    loader = DataLoader(rows, batch_size=ROWS, shuffle=True)
    updates = -(-len(loader) // STEPS)

    model = GPT(len(corpus.vocabulary), width=64, layers=2, context=CONTEXT).to(torch.bfloat16)
    opt = FusedAccumOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95)),
        steps=STEPS,
        max_norm=1.0,
        master_weights=True,
        state_dtype=torch.float32,
    )
    scheduler = GatedScheduler(CosineAnnealingLR(opt, updates), opt)

    losses = []
    for batch in loader:
        loss = model.loss(batch)
        loss.backward()  # the loss is not divided by STEPS
        opt.step()  # updates at every 8th call
        scheduler.step()  # moves on with updates
        opt.zero_grad()
        losses.append(loss.item())
        if opt.updated:
            report(opt, losses, scheduler)
    if opt.flush():  # the short last window, divided by what it holds
        scheduler.step()
        report(opt, losses, scheduler)


def report(opt: FusedAccumOptimizer, losses: list[float], scheduler: GatedScheduler) -> None:
    loss = sum(losses) / len(losses)
    losses.clear()
    print(
        f"update {opt.updates:3}  loss {loss:.3f}  norm {opt.grad_norm:.2f}  next lr {scheduler.get_last_lr()[0]:.2e}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=449, help="micro-batches to train on (default: all of the text)")
    main(parser.parse_args().batches)
