"""Each program in examples/ runs as it stands, on less text, and prints what training looks like."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from processes import on_ranks

from fusedaccum import FusedAccumOptimizer
from fusedaccum.demo import data
from fusedaccum.demo.model import GPT

ROOT = Path(__file__).parent.parent
OF_RANKS = ["distributed", "fsdp"]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.stem not in OF_RANKS)
BATCHES, WINDOW = 34, 8
UPDATES = 5  # the last window holds 2

once = functools.cache(data.load_corpus)

pytestmark = [
    pytest.mark.filterwarnings("error:FusedAccum"),
    pytest.mark.filterwarnings("ignore:(?s).*does not have many workers"),
    pytest.mark.filterwarnings("ignore:(?s).*isinstance.*LeafSpec"),
]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """The text is read once, and Accelerate keeps no settings for the next one."""
    monkeypatch.setattr(data, "load_corpus", once)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def printed(request, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(request.param), "--batches", str(BATCHES)])
    runpy.run_path(str(request.param), run_name="__main__")
    return capsys.readouterr().out


def check_training(printed, updates=UPDATES, falls=0.3):
    """A loss and a learning rate for each update, the short last window's too; the loss falls, the rate ends at 0."""
    losses = [float(x) for x in re.findall(r"\bloss(?:': ')? ?([\d.]+)", printed)]
    rates = [float(x) for x in re.findall(r"(?:lr|learning_rate':) '?([\d.e+-]+)", printed)]
    counted = [int(x) for x in re.findall(r"update +(\d+)", printed)] or [
        *range(1, int(re.search(r"(\d+) updates", printed)[1]) + 1)
    ]
    assert counted == [*range(1, updates + 1)]
    assert len(rates) == updates
    assert losses[updates - 1] < losses[0] - falls
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0] / 5


def test_an_example_trains(printed):
    check_training(printed)


def torchrun(ranks, *arguments):
    """What the ranks print. Exit codes other than 0, of any of them, are torchrun's too."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT / "examples", env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


def runs(name, **arguments):
    """What the example prints on this rank, in processes that are there already."""
    train = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["train"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train(argparse.Namespace(batches=18, **arguments))
    return printed.getvalue()


def runs_ddp(saved):
    return runs("distributed", ddp=True, zero1=False, checkpoint=saved)


def runs_fsdp(saved):
    return runs("fsdp", checkpoint=saved)


def check_ranks(printed, ranks, saved, each):
    """18 micro-batches on each rank: 3 updates. each: bytes per parameter that are sent in one.

    What was saved in the middle loads here, without any rank.
    """
    check_training(printed, updates=3)
    model = GPT(len(once().vocabulary), width=64, layers=2, context=64).to(torch.bfloat16)
    numel = sum(p.numel() for p in model.parameters())
    assert f"{ranks} ranks hold the same {numel:,} parameters, bit by bit" in printed
    for sent in re.findall(r"sent ([\d,]+) bytes", printed):
        assert each * numel <= int(sent.replace(",", "")) <= 1.01 * each * numel
    opt = FusedAccumOptimizer(
        torch.optim.AdamW(model.parameters()), steps=8, master_weights=True, state_dtype=torch.float32
    )
    loaded = torch.load(saved, weights_only=True)
    model.load_state_dict(loaded["model"])
    opt.load_state_dict(loaded["optimizer"])
    assert (opt.pending, opt.updates) == (2, 1)
    assert all(opt.master_grad(p).abs().max() > 0 for p in model.parameters())
    opt.reset()


def test_ranks_train_together(tmp_path):
    saved = tmp_path / "saved.pt"
    printed = torchrun(2, "distributed.py", "--batches", "18", "--checkpoint", str(saved))
    check_ranks(printed, ranks=2, saved=saved, each=4)


def test_ranks_with_a_part_of_the_state_train_together(tmp_path):
    """Half of an all-reduce in FP32, and an all-gather of parameters in bf16."""
    saved = tmp_path / "saved.pt"
    printed = torchrun(4, "distributed.py", "--batches", "18", "--checkpoint", str(saved), "--zero1")
    check_ranks(printed, ranks=4, saved=saved, each=(4 + 2) * 3 / 4)


def test_ranks_train_together_inside_ddp(tmp_path):
    saved = tmp_path / "saved.pt"
    printed, other = on_ranks(2, runs_ddp, saved)
    assert other == ""
    check_ranks(printed, ranks=2, saved=saved, each=4)


def test_shards_train_together(tmp_path):
    printed, other = on_ranks(2, runs_fsdp, tmp_path / "saved")
    assert other == ""
    check_training(printed, updates=3)
    assert (tmp_path / "saved" / ".metadata").exists()


def test_all_of_them_are_run():
    assert [path.stem for path in EXAMPLES] == ["accelerate_loop", "lightning_loop", "plain_loop", "trainer"]
    assert all((ROOT / "examples" / f"{name}.py").exists() for name in OF_RANKS)
