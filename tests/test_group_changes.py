"""Groups, parameters, state and dtypes that change under a wrapper, inside and between windows, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    LOW_PRECISION,
    MAKERS,
    assert_within_budget,
    both_updates,
    every_maker,
    make_params,
    make_windows,
    mean64,
    refused,
    set_grads,
    state_bits,
    tidy,  # noqa: F401
    uniform,
    use_two_buffers,
    wrap,
)

from fusedaccum import FusedAccumOptimizer

pytestmark = [LOW_PRECISION, pytest.mark.filterwarnings("ignore:.*parameters left the optimizer or changed shape")]

SHAPES = [(33,), (2, 35), (33,), (5,), (130,)]
SAME = 2  # of the shape that the first one has
SPARE = 4  # the one that is not in the optimizer at first
STEPS, WINDOWS = 3, 6
MOMENTS = {"between windows": (2, 0), "inside a window": (2, 1), "before the last of a window": (2, 2)}
every_moment = pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)

# (options, dtype of the parameters, dtype of the stock optimizer whose error is the measure)
VARIANTS = {
    "fused-fp32": ({"update": "fused"}, torch.float32, torch.float32),
    "fused-bf16": ({"update": "fused"}, torch.bfloat16, torch.bfloat16),
    "fused-bf16-state": ({"update": "fused", "state_dtype": torch.float32}, torch.bfloat16, torch.bfloat16),
    "fused-bf16-masters": (
        {"update": "fused", "state_dtype": torch.float32, "master_weights": True},
        torch.bfloat16,
        torch.float32,
    ),
    "wrapped-fp32": ({"update": "wrapped"}, torch.float32, torch.float32),
    "wrapped-bf16": ({"update": "wrapped"}, torch.bfloat16, torch.bfloat16),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def twin(make, start, dtype):
    """(optimizer, all parameters): two groups of two, the second at half the rate."""
    params = make_params(start, dtype)
    optimizer = make([{"params": params[:2]}, {"params": params[2:SPARE]}])
    optimizer.param_groups[1]["lr"] /= 2
    return optimizer, params


def train_in_windows(w, params, windows, events):
    """events: {(window, micro-batch): function of the optimizer and all parameters}, called before that micro-batch."""
    for k, window in enumerate(windows):
        for m, grads in enumerate(window):
            if (k, m) in events:
                events[k, m](w, params)
            set_grads(params, grads)
            w.step()
            w.zero_grad()
            for p in params:
                p.grad = None


def train_on_means(optimizer, params, windows, events):
    """The bare optimizer, which sees the window's mean after all that happened in the window."""
    for k, window in enumerate(windows):
        for m in range(len(window)):
            if (k, m) in events:
                events[k, m](optimizer, params)
        set_grads(params, mean64(window))
        optimizer.step()
        for p in params:
            p.grad = None


def compare(make, variant, events, silent=lambda k, window, micro: False, gradients=torch.bfloat16):
    """Train ours, the stock optimizer and a float64 one alike. silent: where a parameter gets no gradient."""
    options, dtype, stock_dtype = variant
    start = [uniform(*s, seed=n, dtype=torch.bfloat16) for n, s in enumerate(SHAPES)]
    windows = make_windows(SHAPES, WINDOWS, STEPS, gradients)
    windows = [
        [[None if silent(k, i, m) else g for k, g in enumerate(grads)] for m, grads in enumerate(window)]
        for i, window in enumerate(windows)
    ]
    inner, mine = twin(make, start, dtype)
    w = wrap(inner, STEPS, **options)
    train_in_windows(w, mine, windows, events)
    results = [mine]
    for d in (stock_dtype, torch.float64):
        optimizer, params = twin(make, start, d)
        train_on_means(optimizer, params, windows, events)
        results.append(params)
    for ours, stock, truth in zip(*results, strict=True):
        assert_within_budget(ours, stock, truth)
    assert w.updates == WINDOWS
    return w


def reload(optimizer, params):
    """What is saved and loaded changes nothing, an open window included."""
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


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


def clear_state(optimizer, params):
    optimizer.state.clear()


@every_variant
@every_maker
@every_moment
@pytest.mark.parametrize("change", [exchange_states, clear_state])
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


# Dtypes


def retype(dtype):
    """`model.to(dtype)`. Bare torch needs its moments converted by hand, as its loader does; float64 keeps all bits."""

    def change(optimizer, params):
        exact = params[0].dtype == torch.float64
        for p in params:
            p.data = p.data.to(dtype).to(torch.float64 if exact else dtype)
            for key, value in optimizer.state.get(p, {}).items():
                if key != "step" and not exact and not isinstance(optimizer, FusedAccumOptimizer):
                    optimizer.state[p][key] = value.to(dtype)

    return change


RETYPED = {name: variant for name, variant in VARIANTS.items() if name != "fused-bf16-masters"} | {
    # Masters are derived again from what the conversion has rounded, so that the measure is bf16 as well.
    "fused-bf16-masters": (VARIANTS["fused-bf16-masters"][0], torch.bfloat16, torch.bfloat16)
}


@pytest.mark.parametrize("variant", RETYPED.values(), ids=RETYPED)
@every_maker
@every_moment
@pytest.mark.parametrize("there", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_retyped_there_and_back(there, moment, make, variant):
    """Moments follow the parameter, unless `state_dtype` says otherwise: Adam raises, with some counts advanced."""
    options, dtype, _ = variant
    w = compare(make, variant, {moment: retype(there), (4, 1): retype(dtype)}, lambda k, i, m: k == SPARE)
    for p in w.param_groups[0]["params"]:
        moments = {value.dtype for key, value in w.state[p].items() if key != "step"}
        assert moments == {options.get("state_dtype", dtype)}


def test_moments_with_a_dtype_of_their_own_keep_it_and_their_bits():
    """Those that `state_dtype` asks for, and those that were there when the optimizer was wrapped."""
    p, q = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    w = wrap(SGD([p], lr=1.0, momentum=1.0), 1, state_dtype=torch.float32)
    inner = SGD([q], lr=1.0, momentum=1.0)
    inner.state[q]["momentum_buffer"] = torch.full((3,), 1 / 3)
    used = wrap(inner, 1)
    for wrapper, r, first, dtype in ((w, p, 1 / 3, torch.bfloat16), (used, q, 0.0, torch.float16)):
        set_grads([r], [torch.full((3,), first)])
        wrapper.step()
        r.data = r.data.to(dtype)
        set_grads([r], [torch.zeros(3)])
        wrapper.step()
        assert torch.equal(wrapper.state[r]["momentum_buffer"], torch.full((3,), 1 / 3))


@both_updates
def test_a_scalar_parameter_is_retyped(update):
    """Its step count has its shape, and stays float32."""
    p = torch.nn.Parameter(torch.ones(()))
    w = wrap(AdamW([p], lr=0.5), 1, update=update)
    for dtype in (torch.float32, torch.bfloat16):
        p.data = p.data.to(dtype)
        set_grads([p], [torch.ones(())])
        w.step()
    entries = w.state[p]
    assert (entries["step"].dtype, entries["step"].item()) == (torch.float32, 2)
    assert entries["exp_avg"].dtype == torch.bfloat16


# Loading what was saved before a change


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


@both_updates
@every_maker
def test_a_checkpoint_from_before_a_retyping(make, update):
    """Sums come back in FP32, moments in the dtype that the parameters have now, as in torch."""
    start = [uniform(*s, seed=n, dtype=torch.bfloat16) for n, s in enumerate(SHAPES)]
    windows = make_windows(SHAPES, 3, STEPS, torch.bfloat16)
    results = []
    for early in (True, False):
        inner, params = twin(make, start, torch.float32)
        w = wrap(inner, STEPS, update=update)
        train_in_windows(w, params, windows[:2], {})
        set_grads(params, windows[2][0])
        w.step()
        saved = copy.deepcopy(w.state_dict())
        if early:
            retype(torch.bfloat16)(w, params)
            w.load_state_dict(saved)
        else:
            w.load_state_dict(saved)
            retype(torch.bfloat16)(w, params)
        for grads in windows[2][1:]:
            set_grads(params, grads)
            w.step()
        assert w.updates == 3
        results.append([state_bits(params), state_bits([dict(w.state[p]) for p in params if p in w.state])])
    assert results[0] == results[1]
