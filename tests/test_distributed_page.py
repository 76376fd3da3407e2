"""docs/distributed.md: its recipes run, and its tables are what the scripts print."""

from __future__ import annotations

import itertools
import json
import re
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch.distributed.fsdp import fully_shard
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
