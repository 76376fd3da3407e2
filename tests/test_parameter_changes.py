"""Everything that may change about parameters and their state while training goes on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    DTYPES,
    LOW_PRECISION,
    MAKERS,
    assert_within_budget,
    bits,
    both_updates,
    make_params,
    make_windows,
    mean64,
    params_of,
    set_grads,
    tidy,  # noqa: F401
    train_stock,
    train_wrapped,
    uniform,
    update_in_use,
    wrap,
)

pytestmark = LOW_PRECISION


@both_updates
def test_a_replaced_parameter(update):
    p, q, new = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    w = wrap(SGD([p, q], lr=1.0), steps=2, update=update)
    train_wrapped(w, [[[torch.ones(2), torch.ones(2)]] * 2])
    set_grads([p, q], [None, torch.full((2,), 3.0)])
    w.step()
    w.param_groups[0]["params"][0] = new
    set_grads([new, q], [torch.full((2,), 8.0), torch.ones(2)])
    w.step()
    assert (p.tolist(), new.tolist(), q.tolist()) == ([-1.0] * 2, [-4.0] * 2, [-3.0] * 2)


@both_updates
@pytest.mark.parametrize("moment", ["between windows", "inside a window"])
def test_data_swapped_for_another_storage(moment, update):
    p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    w = wrap(SGD([p, q], lr=1.0), steps=2, update=update)
    old = p.data
    for k in range(4):
        if k == (2 if moment == "between windows" else 3):
            p.data = torch.full((3,), 10.0)
        set_grads([p, q], [torch.full((3,), k + 1.0), torch.ones(3)])
        w.step()
    assert old.tolist() == [-1.5] * 3
    assert (p.tolist(), q.tolist()) == ([6.5] * 3, [-2.0] * 3)


@both_updates
def test_data_of_another_shape_between_windows(update):
    p, q = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))
    w = wrap(SGD([p, q], lr=1.0), steps=1, update=update)
    for shape in ((3,), (200,), (0,), (4, 5), (5, 4), (20,)):
        p.data = torch.zeros(shape)
        set_grads([p, q], [torch.ones(shape), torch.ones(2)])
        w.step()
        assert torch.equal(p.detach(), torch.full(shape, -1.0))
    assert q.tolist() == [-6.0] * 2


@pytest.mark.parametrize("moment", ["before the first fold", "between windows"])
def test_storage_that_comes_to_be_shared(moment):
    """One launch over both would race: the update is chosen by what the parameters are now."""
    p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    w = wrap(SGD([p, q], lr=1.0), steps=1)
    if moment == "between windows":
        train_wrapped(w, [[[torch.zeros(3), torch.zeros(3)]]])
    q.data = p.data
    train_wrapped(w, [[[torch.ones(3), torch.full((3,), 2.0)]]])
    assert update_in_use(w) == "wrapped"
    assert p.tolist() == [-3.0] * 3


@both_updates
def test_a_model_that_changes_its_dtype(update):
    model = torch.nn.Linear(3, 1, bias=False)
    model.weight.data.zero_()
    w = wrap(SGD(model.parameters(), lr=1.0), steps=2, update=update)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
        model.to(dtype)
        for _ in range(2):
            model(torch.ones(1, 3, dtype=dtype)).sum().backward()
            w.step()
            w.zero_grad()
    assert model.weight.dtype == torch.float32
    assert model.weight.tolist() == [[-4.0] * 3]


@both_updates
def test_changes_between_the_last_fold_and_a_flush(update):
    """Another storage, another order in memory, another group: the sum finds its parameter."""
    p, q, r = (torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(3))
    w = wrap(SGD([p, q, r], lr=1.0), steps=4, update=update)
    g = torch.arange(6.0).view(2, 3)
    for zero_first in (0, 1):
        set_grads([p, q, r], [g * zero_first] * 3)
        w.step()
        if not zero_first:
            w.flush()
    p.data = torch.full((2, 3), 10.0)
    q.data = torch.zeros(3, 2).t()
    assert w.param_groups[0]["params"].pop() is r
    w.add_param_group({"params": [r], "lr": 2.0})
    w.flush()
    assert torch.equal(p.detach(), 10 - g)
    assert torch.equal(q.detach(), -g)
    assert torch.equal(r.detach(), -2 * g)


@both_updates
def test_another_shape_between_the_last_fold_and_a_flush(update):
    p, q = torch.nn.Parameter(torch.zeros(70)), torch.nn.Parameter(torch.zeros(3))
    w = wrap(SGD([p, q], lr=1.0), steps=4, update=update)
    set_grads([p, q], [torch.ones(70), torch.ones(3)])
    w.step()
    p.data = torch.zeros(5)
    with pytest.warns(UserWarning, match="(?s)window.*(reset|flush)"):
        w.flush()
    assert (p.tolist(), q.tolist()) == ([0.0] * 5, [-1.0] * 3)


@both_updates
def test_a_frozen_parameter_whose_gradient_is_set_by_hand(update):
    """torch.optim asks for a gradient, not for requires_grad."""
    p, frozen = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    w = wrap(SGD([p, frozen], lr=1.0), steps=2, update=update)
    train_wrapped(w, [[[torch.ones(2), None]] * 2, [[torch.ones(2), torch.full((2,), 3.0)]] * 2])
    assert (p.tolist(), frozen.tolist()) == ([-2.0] * 2, [-3.0] * 2)


@both_updates
def test_frozen_inside_a_window(update):
    """What was summed before is applied, also where the buffer is built anew after it."""
    p, q, new = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    w = wrap(SGD([p, q], lr=1.0), steps=2, update=update)
    set_grads([p, q], [torch.full((2,), 4.0), torch.ones(2)])
    w.step()
    p.requires_grad_(False)
    w.add_param_group({"params": [new]})
    set_grads([q, new], [torch.ones(2), torch.ones(2)])
    w.step()
    assert (p.tolist(), q.tolist(), new.tolist()) == ([-2.0] * 2, [-1.0] * 2, [-0.5] * 2)


def test_masters_survive_a_buffer_that_is_built_anew():
    """12 updates of 2^-12 round to 2^-8; the first 6 alone to 0, and a master derived again would lose them."""
    p = torch.nn.Parameter(torch.full((70,), 0.75, dtype=torch.bfloat16))
    w = wrap(SGD([p], lr=2.0**-12), steps=1, master_weights=True)
    for k in range(12):
        if k == 6:
            w.add_param_group({"params": [torch.nn.Parameter(torch.zeros(130, dtype=torch.bfloat16))]})
        set_grads([p], [torch.ones(70)])
        w.step()
    assert torch.equal(p.detach(), torch.full((70,), 0.75 - 2.0**-8).bfloat16())


@both_updates
def test_unfrozen_in_the_middle(update):
    p, q = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    w = wrap(AdamW([p, q], lr=0.1, weight_decay=0.5), steps=2, update=update)
    for k in range(4):
        q.requires_grad_(k >= 2)
        (p.sum() + q.sum()).backward()
        w.step()
        assert (w.state.get(q) or {}).get("step", torch.tensor(0)).item() == (1 if k == 3 else 0)
    assert w.state[p]["step"].item() == 2
    torch.testing.assert_close(q.detach(), torch.full((2,), 1 - 0.05 - 0.1), rtol=1e-5, atol=0)


@both_updates
@pytest.mark.parametrize("through", ["wrapper", "inner"])
def test_a_group_added_inside_a_window(through, update):
    p, new = torch.nn.Parameter(torch.zeros(70)), torch.nn.Parameter(torch.zeros(130))
    w = wrap(SGD([p], lr=1.0), steps=4, update=update)
    for k in range(4):
        set_grads([p], [torch.full((70,), float(k))])
        if k == 2:
            (w if through == "wrapper" else w.optimizer).add_param_group({"params": [new], "lr": 2.0})
        if k >= 2:
            set_grads([new], [torch.full((130,), 4.0)])
        w.step()
    assert torch.equal(p.detach(), torch.full((70,), -1.5))
    assert torch.equal(new.detach(), torch.full((130,), -4.0))
    assert w.updates == 1


@both_updates
def test_a_parameter_that_moves_to_another_group(update):
    p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    w = wrap(
        SGD([{"params": [p, q]}, {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 3.0}], lr=1.0), 1, update=update
    )
    train_wrapped(w, [[[torch.ones(3), torch.ones(3), None]]])
    assert w.param_groups[0]["params"].pop() is q
    w.param_groups[1]["params"].insert(0, q)
    train_wrapped(w, [[[torch.ones(3), torch.ones(3), None]]])
    assert (p.tolist(), q.tolist()) == ([-2.0] * 3, [-4.0] * 3)


def put_back(optimizer):
    """State of the user's own: other tensors with other values, a step count edited in place."""
    for p in params_of(optimizer):
        entry = optimizer.state[p]
        entry["exp_avg"] = torch.full_like(p, 0.25)
        entry["exp_avg_sq"].fill_(0.5)
        entry["step"].fill_(7)


def clear_one(optimizer):
    optimizer.state.pop(params_of(optimizer)[0])


def replace_steps(optimizer):
    for p in params_of(optimizer):
        optimizer.state[p]["step"] = torch.tensor(20.0)


CHANGES_OF_STATE = {
    "cleared": lambda o: o.state.clear(),
    "replaced": put_back,
    "steps replaced": replace_steps,
    "one popped": clear_one,
}


@both_updates
@pytest.mark.parametrize("change", CHANGES_OF_STATE.values(), ids=CHANGES_OF_STATE)
def test_state_changed_by_the_user(change, update):
    shapes = [(33,), (70,)]
    start = [uniform(*s) for s in shapes]
    windows = make_windows(shapes, 6, 2, torch.float32)
    optimizers = [MAKERS["adamw"](make_params(start, d)) for d in (torch.float32, torch.float32, torch.float64)]

    def change_once(optimizer, window):
        if window == 2:
            change(optimizer)

    train_wrapped(wrap(optimizers[0], 2, update=update), windows, change_once)
    for optimizer in optimizers[1:]:
        train_stock(optimizer, windows, change_once)
    for mine, stock, truth in zip(*map(params_of, optimizers), strict=True):
        assert_within_budget(mine, stock, truth)
    steps = [[o.state[p]["step"].item() for p in params_of(o)] for o in optimizers]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("start_again", ["load_state_dict", "copy_", "data"])
def test_118_values_from_outside_are_taken_into_the_master(start_again):
    model = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    w = wrap(SGD(model.parameters(), lr=2.0**-12), steps=1, master_weights=True)
    set_grads([model.weight], [torch.ones(4, 4)])
    w.step()
    other = copy.deepcopy(model)
    torch.nn.init.constant_(other.weight, 0.75)
    if start_again == "load_state_dict":
        model.load_state_dict(other.state_dict())
    elif start_again == "copy_":
        with torch.no_grad():
            model.weight.copy_(other.weight)
    else:
        model.weight.data = other.weight.data.clone()
    for _ in range(16):
        set_grads([model.weight], [torch.ones(4, 4)])
        w.step()
    assert torch.equal(model.weight.detach(), torch.full((4, 4), 0.75 - 2.0**-8).bfloat16())


def test_20001_tensors():
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(20_001)]
    w = wrap(SGD(params, lr=1.0), steps=2)
    for g in (1.0, 3.0):
        set_grads(params, [torch.full((1,), g)] * len(params))
        w.step()
    assert torch.stack([p.detach() for p in params]).eq(-2).all()


def test_uneven_touch_in_one_window():
    """Each parameter's mean counts every call of the window, with or without a gradient of its own."""
    shapes = [(3,), (65,), (0,), (4096,)]
    params = [torch.nn.Parameter(torch.zeros(s)) for s in shapes]
    w = wrap(SGD(params, lr=1.0), steps=4)
    window = [[torch.full(s, float(k + 1)) if (k + n) % 3 else None for n, s in enumerate(shapes)] for k in range(4)]
    train_wrapped(w, [window])
    for p, mean in zip(params, mean64(window), strict=True):
        assert torch.equal(p.detach(), -mean.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.float32}, {"update": "wrapped"}], ids=str)
def test_an_optimizer_that_was_used_before_it_is_wrapped(options, dtype):
    """Moments and step counts go on where they were, in the dtype that was asked for."""
    shapes = [(33,), (70,)]
    windows = make_windows(shapes, 6, 2, dtype)
    ours, stock, truth = (
        MAKERS["adamw"](make_params([uniform(*s) for s in shapes], d)) for d in (dtype, dtype, torch.float64)
    )
    for optimizer in (ours, stock, truth):
        train_stock(optimizer, windows[:3])
    train_wrapped(wrap(ours, 2, **options), windows[3:])
    for optimizer in (stock, truth):
        train_stock(optimizer, windows[3:])
    for mine, theirs, exact in zip(*map(params_of, (ours, stock, truth)), strict=True):
        assert_within_budget(mine, theirs, exact)
        assert ours.state[mine]["step"].item() == 6
        assert ours.state[mine]["exp_avg"].dtype == options.get("state_dtype", dtype)


@pytest.mark.parametrize("through", ["group", "load"])
@pytest.mark.parametrize("kind", ["complex", "shared"])
def test_what_cannot_be_fused_is_frozen_inside_a_window(kind, through):
    """It still holds a sum, so the update stays the wrapped one until the window is over."""

    def make():
        if kind == "complex":
            frozen = [torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))]
        else:
            storage = torch.ones(3)
            frozen = [torch.nn.Parameter(storage[:2]), torch.nn.Parameter(storage[1:])]
        q = torch.nn.Parameter(torch.ones(2))
        return frozen, q, wrap(AdamW([*frozen, q], lr=0.1), 2)

    frozen, q, w = make()
    for p in (*frozen, q):
        p.grad = torch.ones_like(p)
    w.step()
    if through == "group":
        frozen[0].requires_grad_(False)
        w.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    else:
        saved = w.state_dict()
        frozen, q, w = make()
        frozen[0].requires_grad_(False)
        w.load_state_dict(saved)
    q.grad = torch.ones(2)
    w.step()
    assert (w.updates, w.pending) == (1, 0)
    assert q.tolist() == pytest.approx([0.899] * 2, abs=1e-6)
    assert frozen[0][0].item() == pytest.approx(0.899, abs=1e-6)
    assert update_in_use(w) == "wrapped" or through == "group"


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@both_updates
def test_a_parameter_that_is_negated_lazily(make, update):
    results = []
    for start in (torch._neg_view(-torch.ones(4)), torch.ones(4)):
        p = torch.nn.Parameter(start)
        w = wrap(make([p]), 1, update=update)
        for _ in range(2):
            p.grad = torch.full((4,), 0.5)
            w.step()
        results.append(bits(p.detach().resolve_neg()))
    assert results[0] == results[1]
