"""Lightning, which decides when there is an update: steps=None. The model is bf16, its sums are FP32.

python examples/lightning_loop.py
"""

import argparse

import lightning
import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from fusedaccum import FusedAccumOptimizer, GatedScheduler
from fusedaccum.demo.data import load_corpus
from fusedaccum.demo.model import GPT

CONTEXT, ROWS, STEPS = 64, 4, 8  # tokens in a row, rows in a micro-batch, micro-batches in an update


class LanguageModel(lightning.LightningModule):
    def __init__(self, tokens: int, updates: int) -> None:
        super().__init__()
        self.model = GPT(tokens, width=64, layers=2, context=CONTEXT).to(torch.bfloat16)
        self.updates = updates
        self.losses: list[float] = []
        self.reported = 0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.model.loss(batch)
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, outputs: object, batch: Tensor, index: int) -> None:
        opt = self.optimizers()
        if opt.updates > self.reported:
            self.reported = opt.updates
            rate, loss = self.lr_schedulers().get_last_lr()[0], sum(self.losses) / len(self.losses)
            print(f"update {opt.updates:3}  loss {loss:.3f}  next lr {rate:.2e}")
            self.losses.clear()

    def configure_optimizers(self) -> dict:
        opt = FusedAccumOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.95)),
            steps=None,
            master_weights=True,
            state_dtype=torch.float32,
        )
        # Built on the wrapper, which is the optimizer that Lightning knows.
        scheduler = GatedScheduler(CosineAnnealingLR(opt, self.updates), opt)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(batches: int) -> None:
    torch.manual_seed(0)
    corpus = load_corpus()
    rows = corpus.train.unfold(0, CONTEXT + 1, CONTEXT)[: batches * ROWS]
    loader = DataLoader(rows, batch_size=ROWS, shuffle=True)
    module = LanguageModel(len(corpus.vocabulary), updates=-(-len(loader) // STEPS))
    trainer = lightning.Trainer(
        max_epochs=1,
        accumulate_grad_batches=STEPS,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=449, help="micro-batches to train on (default: all of the text)")
    main(parser.parse_args().batches)
