"""Step pre-hooks that change what is about to be updated: seen by the update, or refused with the window as it was."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD
from wrapper_helpers import LOW_PRECISION, both_updates, micro_batch, set_grads, snapshot, tidy, wrap  # noqa: F401

pytestmark = [LOW_PRECISION, pytest.mark.filterwarnings("ignore:.*parameters left the optimizer or changed shape")]


def hooked(change, **options):
    """(p, q, wrapper) with two of four micro-batches folded: sums of 1 and 3, and a hook that changes something."""
    p, q = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(6))
    w = wrap(SGD([p, q], lr=1.0, momentum=0.5), 4, **options)
    w.register_step_pre_hook(lambda *_: change(p, q, w))
    for g in (1.0, 3.0):
        set_grads([p, q], [torch.full_like(p, g), torch.full_like(q, g)])
        w.step()
    return p, q, w


def set_data(tensor):
    def change(p, q, w):
        p.data = tensor.clone()

    return change


# What p is after the update, its sum gone where it is 0; q is -2 in all.
SEEN = {
    "another order in memory": (set_data(torch.zeros(3, 2).t()), -2.0),
    "another storage": (set_data(torch.full((2, 3), 5.0)), 3.0),
    "bfloat16": (set_data(torch.zeros(2, 3, dtype=torch.bfloat16)), -2.0),
    "another shape": (set_data(torch.zeros(5)), 0.0),
    "out of the groups": (lambda p, q, w: w.param_groups[0].update(params=[q]), 0.0),
    "a group more": (lambda p, q, w: w.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]}), -2.0),
}


@both_updates
@pytest.mark.parametrize("case", SEEN.values(), ids=SEEN)
def test_a_change_in_a_hook_is_seen(case, update):
    change, expected = case
    p, q, w = hooked(change, update=update)
    assert w.flush()
    assert torch.equal(p.detach(), torch.full_like(p, expected))
    assert q.tolist() == [-2.0] * 6


def double(p, q, w):
    p.data = p.data.double()


def share(p, q, w):
    q.data = p.data.view(-1)


def other_state(p, q, w):
    w.state[p]["momentum_buffer"] = torch.zeros(5)


REFUSED = {
    "float64": (double, {}, "float64"),
    "shared storage": (share, {"update": "fused"}, "share storage"),
    "state of another shape": (other_state, {"update": "fused"}, r"momentum_buffer.*shape \(5,\)"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_change_in_a_hook_is_refused(weighted, look, case):
    """Sums of which a hook has seen the means are sums again; step counts, moments and norm are as they were."""
    change, options, words = case
    p, q = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(6))
    w = wrap(SGD([p, q], lr=1.0, momentum=0.5), 4, **options)
    for _ in range(4):
        micro_batch(w, p.sum() + q.sum())

    def hook(*_):
        if look:
            assert [w.master_grad(p)[0, 0].item() for _ in range(2)] == [2.0] * 2
        change(p, q, w)

    count = torch.tensor(2.0) if weighted else None
    for g in (1.0, 3.0):
        set_grads([p, q], [torch.full_like(p, g), torch.full_like(q, g)])
        w.step(mean_of=count)
    data, momentum = (p.data, q.data), w.state[p]["momentum_buffer"]
    before = snapshot(w)
    handle = w.register_step_pre_hook(hook)
    with pytest.raises((TypeError, ValueError), match=words):
        w.flush()
    handle.remove()
    (p.data, q.data), w.state[p]["momentum_buffer"] = data, momentum
    assert snapshot(w) == before
    assert w.flush()
    assert (p[0, 0].item(), q[0].item()) == (-1.0 - 2.5, -1.0 - 2.5)


@both_updates
def test_a_hook_that_takes_everything_away(update):
    p, q, w = hooked(lambda p, q, w: w.param_groups[0]["params"].clear(), update=update)
    assert not w.flush()
    assert (w.pending, w.updates, w.updated) == (0, 0, False)
    assert not p.any()
    assert not q.any()
    assert w.grad_norm == 0.0


def test_a_hook_that_looked_in_an_earlier_window():
    """What was divided then is no concern of the window in which a hook raises."""
    p = torch.nn.Parameter(torch.zeros(2))
    w = wrap(SGD([p], lr=1.0), 4)
    handle = w.register_step_pre_hook(lambda *_: (w.master_grad(p) is None) or None)
    micro_batch(w, p.sum())
    w.flush()
    handle.remove()
    handle = w.register_step_pre_hook(lambda *_: "what torch does not allow")
    micro_batch(w, p.sum())
    with pytest.raises(RuntimeError, match="pre-hook must return None"):
        w.flush()
    handle.remove()
    assert w.master_grad(p).tolist() == [0.25] * 2
    w.flush()
    assert p.tolist() == [-2.0] * 2
