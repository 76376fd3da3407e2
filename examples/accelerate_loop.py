"""A loop with Accelerate, which decides when there is an update: steps=None. The model is bf16, its sums are FP32.

python examples/accelerate_loop.py
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from fusedaccum import FusedAccumOptimizer
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
        steps=None,
        master_weights=True,
        state_dtype=torch.float32,
    )
    scheduler = CosineAnnealingLR(opt, updates)

    accelerator = Accelerator(gradient_accumulation_steps=STEPS)
    model, optimizer, loader, scheduler = accelerator.prepare(model, opt, loader, scheduler)

    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            rate, loss = scheduler.get_last_lr()[0], sum(losses) / len(losses)
            accelerator.print(f"update {opt.updates:3}  loss {loss:.3f}  norm {norm:.2f}  next lr {rate:.2e}")
            losses.clear()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=449, help="micro-batches to train on (default: all of the text)")
    main(parser.parse_args().batches)
