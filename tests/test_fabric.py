"""Lightning's Fabric wraps optimizers in a proxy whose methods run with the proxy as self."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from torch.optim import SGD
from wrapper_helpers import both_updates, tidy, wrap  # noqa: F401


@both_updates
def test_99_fabric(update):
    fabric = Fabric(accelerator="cpu", devices=1)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    w = wrap(SGD(model.parameters(), lr=1.0), 2, update=update)
    proxied, fo = fabric.setup(model, w)
    seen = []
    for g in (1.0, 3.0, 5.0):
        fabric.backward(proxied(torch.tensor([[g]])).sum())
        fo.step()
        fo.zero_grad()
        state = fo.state_dict()
        assert (fo.pending, fo.updates, fo.updated) == (w.pending, w.updates, w.updated)
        assert (state["fusedaccum"]["pending"], state["fusedaccum"]["updates"]) == (w.pending, w.updates)
        seen.append((w.pending, w.updates, model.weight.item()))
    assert seen == [(1, 0, 0), (0, 1, -2), (1, 1, -2)]
    again = wrap(SGD([torch.nn.Parameter(torch.zeros(1, 1))], lr=1.0), 2, update=update)
    again.load_state_dict(state)
    assert (again.pending, again.updates) == (1, 1)


@pytest.mark.parametrize("set_through_proxy", [True, False])
def test_what_is_set_is_set_on_both(set_through_proxy):
    fabric = Fabric(accelerator="cpu", devices=1)
    model = torch.nn.Linear(1, 1, bias=False)
    w = wrap(SGD(model.parameters(), lr=1.0), 2)
    _, fo = fabric.setup(model, w)
    (w if not set_through_proxy else fo.optimizer).steps = 3
    fo.param_groups[0]["lr"] = 0.5
    assert (w.steps, fo.steps, w.param_groups[0]["lr"], w.optimizer.param_groups[0]["lr"]) == (3, 3, 0.5, 0.5)
