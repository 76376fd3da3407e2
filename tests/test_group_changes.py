"""Groups, parameters and state that change under a wrapper, inside windows and between them, against float64."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from change_runs import (
    SAME,
    SHAPES,
    SPARE,
    STEPS,
    compare,
    every_moment,
    every_variant,
    reload,
    train_in_windows,
    twin,
)
from torch.optim import SGD
from wrapper_helpers import (
    LOW_PRECISION,
    MAKERS,
    both_updates,
    every_maker,
    make_params,
    make_windows,
    refused,
    set_grads,
    tidy,  # noqa: F401
    uniform,
    use_two_buffers,
    wrap,
)

pytestmark = [LOW_PRECISION, pytest.mark.filterwarnings("ignore:.*parameters left the optimizer or changed shape")]


# Groups


def add_group(optimizer, params):
    optimizer.add_param_group({"params": [params[SPARE]], "lr": optimizer.param_groups[0]["lr"] * 2})


def append_to_group(optimizer, params):
    optimizer.param_groups[0]["params"].append(params[SPARE])


def replace_group_list(optimizer, params):
    first, second = optimizer.param_groups
    optimizer.param_groups[:] = [{**second}, {**first, "params": [params[SPARE], *first["params"]]}]


def replace_groups(optimizer, params):
    first, second = optimizer.param_groups
    optimizer.param_groups = [
        {**first, "params": [params[1], params[SPARE], params[2]]},
        {**second, "params": [params[3], params[0]]},
    ]


def reorder(optimizer, params):
    optimizer.param_groups[0]["params"].reverse()
    append_to_group(optimizer, params)


def merge(optimizer, params):
    first, second = optimizer.param_groups
    first["params"] += second["params"] + [params[SPARE]]
    optimizer.param_groups.remove(second)


def move_the_border(optimizer, params):
    """The parameters, and their order, are the same in all."""
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())


def silence(change, moment):
    return lambda k, i, m: k == SPARE and (change is move_the_border or (i, m) < moment)


GROUP_CHANGES = (add_group, append_to_group, replace_group_list, replace_groups, reorder, merge, move_the_border)


@every_variant
@every_maker
@every_moment
@pytest.mark.parametrize("change", GROUP_CHANGES)
def test_groups(change, moment, make, variant):
    compare(make, variant, {moment: change, (4, 1): reload}, silence(change, moment))


@pytest.mark.parametrize("options", [{"update": "fused", "master_weights": True}, {"update": "wrapped"}], ids=str)
@every_maker
@every_moment
@pytest.mark.parametrize("change", GROUP_CHANGES)
def test_groups_on_two_devices(change, moment, make, options, monkeypatch):
    """Most changes move a parameter from one buffer to the other, with its sum."""
    use_two_buffers(monkeypatch)
    variant = (options, torch.float32, torch.float32)
    compare(make, variant, {moment: change, (4, 1): reload}, silence(change, moment))


# Parameters


def take_out(optimizer, params):
    group = optimizer.param_groups[0]["params"]
    del group[[id(p) for p in group].index(id(params[1]))]


def put_back(optimizer, params):
    optimizer.param_groups[1]["params"].append(params[1])


@every_variant
@every_maker
@pytest.mark.parametrize("back", [(2, 2), (3, 0), (3, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("out", [(2, 0), (2, 1)], ids=str)
def test_taken_out_and_put_back(out, back, make, variant):
    """Its moments stay where torch keeps them; its sums from before are gone, with the warning that says so."""
    lost = (lambda i, m: (2, 0) <= (i, m) < back) if out == (2, 1) else (lambda i, m: out <= (i, m) < back)
    compare(make, variant, {out: take_out, back: put_back, (5, 1): reload}, lambda k, i, m: k == 1 and lost(i, m))


@both_updates
def test_taken_out_inside_a_window_warns_once(update):
    params = make_params([torch.zeros(n) for n in (3, 70)], torch.float32)
    w = wrap(SGD(params, lr=1.0), 3, update=update)
    set_grads(params, [torch.ones(3), torch.ones(70)])
    w.step()
    taken = w.param_groups[0]["params"].pop()
    set_grads(params, [torch.ones(3), None])
    with pytest.warns(UserWarning, match=r"1 parameters left the optimizer.*flush\(\) or reset\(\)") as caught:
        w.step()
    assert len(caught) == 1
    w.param_groups[0]["params"].append(taken)
    set_grads(params, [torch.ones(3), torch.full((70,), 6.0)])
    w.step()
    assert (params[0].tolist(), taken.tolist()) == ([-1.0] * 3, [-2.0] * 70)


def replace(optimizer, params):
    """torch saves no state that belongs to none of its parameters: it raises."""
    optimizer.param_groups[0]["params"][0] = params[SPARE]
    return optimizer.state.pop(params[0])


def replace_with_state(optimizer, params):
    """The user hands the new parameter moments of its own, and the old one's step count."""
    entries = replace(optimizer, params)
    optimizer.state[params[SPARE]] = {
        key: value if key == "step" else torch.full_like(params[SPARE], 0.25, dtype=value.dtype)
        for key, value in entries.items()
    }


@every_variant
@every_maker
@every_moment
@pytest.mark.parametrize("change", [replace, replace_with_state])
def test_replaced(change, moment, make, variant):
    compare(make, variant, {moment: change, (4, 1): reload}, lambda k, i, m: k == (SPARE if (i, m) < moment else 0))


def exchange_states(optimizer, params):
    a, b = params[0], params[SAME]
    optimizer.state[a], optimizer.state[b] = optimizer.state[b], optimizer.state[a]


def exchange_keys(optimizer, params):
    """A state with the same entries in the same order, of other parameters."""
    other = {params[0]: params[SAME], params[SAME]: params[0]}
    optimizer.state = defaultdict(dict, {other.get(p, p): entries for p, entries in optimizer.state.items()})


def clear_state(optimizer, params):
    optimizer.state.clear()


@every_variant
@every_maker
@every_moment
@pytest.mark.parametrize("change", [exchange_states, exchange_keys, clear_state])
def test_state(change, moment, make, variant):
    compare(make, variant, {moment: change, (4, 1): reload}, lambda k, i, m: k == SPARE)


def freeze(optimizer, params):
    params[1].requires_grad_(False)


def unfreeze(optimizer, params):
    params[1].requires_grad_(True)


@every_variant
@every_maker
@pytest.mark.parametrize("back", [(2, 2), (3, 0), (4, 1)], ids=str)
@pytest.mark.parametrize("out", [(0, 0), (2, 0), (2, 1)], ids=str)
def test_frozen_and_unfrozen(out, back, make, variant):
    """What was summed before is applied, and other parameters come in between."""
    events = {out: freeze, (3, 1): add_group, back: unfreeze, (5, 1): reload}

    def silent(k, i, m):
        return (k == 1 and out <= (i, m) < back) or (k == SPARE and (i, m) < (3, 1))

    compare(make, variant, events, silent)


# Loading what was saved before


@both_updates
@pytest.mark.parametrize("change", [add_group, append_to_group, merge, take_out])
def test_a_checkpoint_from_before_a_change_of_groups_is_refused(change, update):
    start = [uniform(*s, seed=n) for n, s in enumerate(SHAPES)]
    inner, params = twin(MAKERS["adamw"], start, torch.float32)
    w = wrap(inner, STEPS, update=update)
    windows = make_windows(SHAPES, 2, STEPS, torch.float32)
    train_in_windows(w, params, windows, {})
    set_grads(params, windows[0][0])
    w.step()
    saved = copy.deepcopy(w.state_dict())
    change(w, params)
    with refused(w, "(?i)param"):
        w.load_state_dict(saved)
