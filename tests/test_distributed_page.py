"""docs/distributed.md: its recipes run, and its tables are what the scripts print."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import re
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch.distributed.fsdp import fully_shard
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import fusedaccum
from bench import scaling_model
from bench.traffic import table
from fusedaccum import FusedAccumOptimizer
from fusedaccum.demo.model import GPT
from fusedaccum.local import is_distributed, local

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "distributed.md").read_text()
RECIPES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SYNC = "model.set_requires_gradient_sync"
RECIPES += [recipe.replace(f"# {SYNC}", SYNC) for recipe in RECIPES if SYNC in recipe]
Output = namedtuple("Output", ["loss"])


class Model(GPT):
    """Returns its loss, as models of transformers do."""

    def forward(self, rows):
        logits = super().forward(rows[:, :-1])
        return Output(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def run_recipe(number, path):
    """(updates, pending, whether something was learned, this rank's parameters) at the end of a recipe."""
    torch.manual_seed(0)
    model = Model(64, width=64, layers=2, context=8)
    before = [p.detach().clone() for p in model.parameters()]
    batches = torch.randint(64, (19, 2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    names = {
        "AdamW": AdamW,
        "DistributedDataParallel": DistributedDataParallel,
        "FusedAccumOptimizer": FusedAccumOptimizer,
        "dist": dist,
        "fully_shard": fully_shard,
        "fusedaccum": fusedaccum,
        "group": dist.group.WORLD,
        "itertools": itertools,
        "loader": list(batches),
        "model": model,
        "path": path,
        "torch": torch,
    }
    exec(compile(RECIPES[number], f"recipe {number}", "exec"), names)
    opt = names["opt"]
    counts = (opt.updates, opt.pending)
    opt.reset()
    after = list(model.parameters())
    shared = [is_distributed(p) for p in after]
    moved = [False if s else not torch.equal(p, q) for p, q, s in zip(before, after, shared, strict=True)]
    return counts, all(moved), None if any(shared) else torch.cat([local(p).detach().flatten() for p in after])


def run_all(path):
    return [run_recipe(number, path) for number in range(len(RECIPES))]


def test_recipes_run(tmp_path):
    """19 micro-batches in windows of 8, on each rank; where the ranks hold the same, they hold the same bits."""
    first, second = on_ranks(2, run_all, tmp_path / "saved.pt")
    assert len(first) == 8
    for number, ((counts, moved, mine), (others, _, theirs)) in enumerate(zip(first, second, strict=True)):
        flushed, saves = "flush()" in RECIPES[number], "consolidate" in RECIPES[number]
        assert counts == others == ((3, 0) if flushed else (0, 3) if saves else (2, 3))
        assert moved == (not saves and "fully_shard" not in RECIPES[number])
        assert mine is None or torch.equal(mine, theirs)


def wrap(net=None, make=AdamW, steps=2, **options):
    return FusedAccumOptimizer(make((net or Linear(4, 4)).parameters()), steps=steps, **options)


def in_group(**options):
    return wrap(process_group=dist.group.WORLD, **options)


def backward_of_ddp(model=None, **options):
    """One micro-batch of DDP, under no_sync() where a model is given already."""
    shared = model or DistributedDataParallel(Linear(4, 4))
    opt = wrap(shared, **options)
    with shared.no_sync() if model else contextlib.nullcontext():
        shared(torch.ones(1, 4, dtype=next(shared.parameters()).dtype)).sum().backward()
    opt.step()


def consolidate_unequal():
    opt = in_group()
    for _ in range(dist.get_rank()):
        opt.step()
    opt.consolidate()


ZERO1 = {"shard": "zero1"}
REFUSED = [
    [lambda: in_group(steps=None)],
    [lambda: in_group(nonfinite="skip_micro"), lambda: in_group(amp_scaling=True)],
    [lambda: wrap(fully_shard(Linear(4, 4)), process_group=dist.group.WORLD)],
    [
        lambda: wrap(wire_dtype=torch.bfloat16),
        lambda: wrap(**ZERO1),
        lambda: wrap().no_sync(DistributedDataParallel(Linear(4, 4))),
        lambda: wrap(fold="backward").micro_batch(last=True),
    ],
    [
        lambda: in_group(fold="backward", **ZERO1).micro_batch(last=True),
        lambda: in_group(make=torch.optim.RMSprop, **ZERO1),
    ],
    [lambda: backward_of_ddp(DistributedDataParallel(Linear(4, 4)))],
    [lambda: backward_of_ddp(fold="backward")],
    [lambda: backward_of_ddp(DistributedDataParallel(Linear(4, 4).bfloat16()), steps=None)],
    [consolidate_unequal],
    [lambda: pickle.dumps(in_group())],
]


def refusals():
    """What each of REFUSED raises; None where nothing is."""
    raised = []
    for calls in REFUSED:
        for call in calls:
            try:
                call()
                raised.append(None)
            except (RuntimeError, TypeError, ValueError) as error:
                raised.append(str(error))
    return raised


def test_what_the_page_lists_as_refused_is_refused():
    rows = re.search(r"is refused, before anything.*?\n\n\| \|.*?\n\n", PAGE, re.DOTALL)[0].count("\n| ") - 1
    assert rows == len(REFUSED)
    for raised in on_ranks(2, refusals):
        assert [error for error in raised if not (error or "").startswith("FusedAccumOptimizer: ")] == []


def section(name):
    return re.search(f"<!-- {name}: begin -->\n(.*?)\n<!-- {name}: end -->", PAGE, re.DOTALL)[1]


def test_the_counts_are_the_published_ones():
    published = json.loads((ROOT / "bench" / "results" / "traffic.json").read_text())
    assert section("counts") == table(published["lines"])


def test_the_model_is_what_the_script_prints(capsys):
    assert scaling_model.main([]) == 0
    assert capsys.readouterr().out.strip() == section("model")


@pytest.mark.parametrize("name", re.findall(r"\]\((\.\./[^)#]+)\)", PAGE))
def test_links_lead_somewhere(name):
    assert (ROOT / "docs" / name).exists()
