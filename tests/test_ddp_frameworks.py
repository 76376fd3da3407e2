"""Frameworks on two ranks: what they make of DistributedDataParallel and accumulation is the same with us."""

from __future__ import annotations

import contextlib
import os
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from framework_cases import ROWS, TinyLM, falling, optimizer_for, texts, watch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from processes import on_ranks
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from wrapper_helpers import assert_within_budget, bits

import fusedaccum
from fusedaccum import GatedScheduler

WINDOW, BATCHES = 4, 8


@contextlib.contextmanager
def launched():
    """As torchrun would have started this process. The process group is there already."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    before = dict(os.environ)
    os.environ.update(told)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def data():
    """Every rank's part."""
    return texts(BATCHES * ROWS * dist.get_world_size())


def _forget_accelerate():
    """Accelerate keeps its settings for the whole process, which is to run other tests."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def accelerated(kind, dtype=torch.float32, steps=None, **options):
    """Two windows of 4 in Accelerate's loop: bits of the parameters, norms, rates; and the parameters."""
    _forget_accelerate()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=WINDOW if steps is None else 1,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    bare = TinyLM(dtype)
    opt = optimizer_for(bare, kind, steps=steps, **options)
    run = watch(opt, bare)
    schedule = GatedScheduler(falling(opt), opt) if steps else falling(opt)
    model, optimizer, loader = accelerator.prepare(bare, opt, DataLoader(data(), batch_size=ROWS))
    if steps:
        model.register_comm_hook(optimizer, fusedaccum.ddp_hook)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch)["loss"])
            if accelerator.sync_gradients and steps is None:
                run.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
            if steps and opt.updated:
                run.norms.append(opt.grad_norm)
    _forget_accelerate()
    return [bits(p) for p in bare.parameters()], run.norms, run.rates, [p.detach() for p in bare.parameters()]


def all_accelerated():
    with launched():
        runs = [accelerated("native"), accelerated("wrapped")]
        for fold in ("step", "backward"):
            runs.append(accelerated("wrapped", steps=WINDOW, process_group=dist.group.WORLD, max_norm=0.5, fold=fold))
        return [*runs, accelerated("native", torch.float64)]


def test_accelerate():
    """steps=None under its accumulate() and no_sync(), and steps=N with ddp_hook."""
    one, other = on_ranks(2, all_accelerated)
    native, live, *reduced, truth = one
    assert [run[:3] for run in one] == [run[:3] for run in other]
    assert live[:3] == native[:3]
    assert len(native[2]) == 2
    for ours in reduced:
        assert ours[2] == native[2]
        flat = [torch.cat([p.flatten() for p in run[3]]) for run in (ours, native, truth)]
        assert_within_budget(*flat)
        norms = [torch.tensor(run[1], dtype=torch.float64) for run in (ours, native, truth)]
        assert_within_budget(norms[0].float(), norms[1].float(), norms[2])
    assert reduced[0][0] == reduced[1][0]


def fabric_runs():
    """Two windows of 4 with no_backward_sync() on all but their last micro-batch."""
    results = []
    with launched():
        for kind in ("native", "wrapped"):
            fabric = Fabric(
                accelerator="cpu", devices=dist.get_world_size(), strategy=DDPStrategy(find_unused_parameters=True)
            )
            fabric.launch()
            assert fabric.world_size == 2
            bare = TinyLM()
            model, opt = fabric.setup(bare, optimizer_for(bare, kind))
            norms = []
            for k, batch in enumerate(fabric.setup_dataloaders(DataLoader(data(), batch_size=ROWS))):
                last = k % WINDOW == WINDOW - 1
                with fabric.no_backward_sync(model, enabled=not last):
                    fabric.backward(model(batch)["loss"] / WINDOW)
                if last:
                    norms.append(float(fabric.clip_gradients(model, opt, max_norm=0.5)))
                    opt.step()
                    opt.zero_grad()
            results.append((norms, [bits(p) for p in bare.parameters()]))
    return results


def test_fabric():
    one, other = on_ranks(2, fabric_runs)
    assert one == other
    assert one[0] == one[1]
    assert len(one[0][0]) == 2


def trained():
    """The Trainer, which accumulates through Accelerate and clips."""
    results = []
    with launched(), tempfile.TemporaryDirectory() as folder:
        for kind in ("native", "wrapped"):
            bare = TinyLM()
            settings = {"gradient_accumulation_steps": WINDOW, "max_grad_norm": 0.5, "num_train_epochs": 1}
            quiet = {"use_cpu": True, "disable_tqdm": True, "log_level": "error", "report_to": [], "logging_steps": 1}
            trainer = Trainer(
                bare,
                TrainingArguments(
                    folder,
                    per_device_train_batch_size=ROWS,
                    ddp_find_unused_parameters=True,
                    save_strategy="no",
                    **settings,
                    **quiet,
                ),
                train_dataset=[{"ids": ids, "labels": ids} for ids in data()],
                optimizers=(optimizer_for(bare, kind), None),
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            assert trainer.args.world_size == 2
            norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
            results.append((norms, [bits(p) for p in bare.parameters()]))
            _forget_accelerate()
    return results


def test_trainer():
    one, other = on_ranks(2, trained)
    assert one == other
    assert one[0] == one[1]
    assert len(one[0][0]) == 2
