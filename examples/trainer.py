"""The Hugging Face Trainer, which decides when there is an update: steps=None. GPT-2 is bf16, its sums are FP32.

python examples/trainer.py
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import fusedaccum
from fusedaccum.demo.data import load_corpus

CONTEXT, ROWS, STEPS = 64, 4, 8  # tokens in a row, rows in a micro-batch, micro-batches in an update


def main(batches: int) -> None:
    torch.manual_seed(0)
    corpus = load_corpus()
    rows = corpus.train.unfold(0, CONTEXT, CONTEXT)[: batches * ROWS]
    config = GPT2Config(
        vocab_size=len(corpus.vocabulary),
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=1,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).to(torch.bfloat16)

    # The Trainer builds the optimizer. One that you have built goes in as optimizers=(FusedAccumOptimizer(...), None).
    optimizer_class = fusedaccum.wrapping(torch.optim.AdamW, steps=None, master_weights=True, state_dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=STEPS,
            max_grad_norm=1.0,
            num_train_epochs=1,
            lr_scheduler_type="cosine",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,  # the log in lines
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            optimizer_cls_and_kwargs=(optimizer_class, {"lr": 3e-3, "betas": (0.9, 0.95)}),
        )
        trainer.train()
    opt = trainer.optimizer.optimizer  # inside Accelerate's
    print(f"{opt.updates} updates")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=449, help="micro-batches to train on (default: all of the text)")
    main(parser.parse_args().batches)
