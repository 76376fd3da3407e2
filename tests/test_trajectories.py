"""The fused update, 20 windows long, element by element against stock torch, in both directions of a checkpoint."""

from __future__ import annotations

import functools

import pytest
import torch
from wrapper_helpers import (
    DTYPES,
    LOW_PRECISION,
    adam_or_sgd_states,
    assert_within_budget,
    bits,
    extra_key,
    make_params,
    make_windows,
    mean64,
    set_grads,
    tidy,  # noqa: F401
    train_stock,
    train_wrapped,
    update_in_use,
    wrap,
)

pytestmark = LOW_PRECISION

SHAPES = [(33,), (7, 5), (130,)]
STEPS = 4
ADAM = {"betas": (0.8, 0.95)}
ADAMW = {**ADAM, "weight_decay": 0.3}
SGD = {"weight_decay": 0.3}
ADAM_LR, SGD_LR = 0.05, 0.1

# name: (class, learning rate, options that hold for all groups)
RULES = {
    "adamw": (torch.optim.AdamW, ADAM_LR, ADAMW),
    "adamw-amsgrad": (torch.optim.AdamW, ADAM_LR, {**ADAMW, "amsgrad": True}),
    "adamw-maximize": (torch.optim.AdamW, ADAM_LR, {**ADAMW, "maximize": True}),
    "adamw-eps": (torch.optim.AdamW, ADAM_LR, {**ADAMW, "eps": 0.1}),
    "adamw-foreach": (torch.optim.AdamW, ADAM_LR, {**ADAMW, "foreach": True}),
    "adamw-stock-fused": (torch.optim.AdamW, ADAM_LR, {**ADAMW, "fused": True}),
    "adam": (torch.optim.Adam, ADAM_LR, ADAM),
    "adam-l2": (torch.optim.Adam, ADAM_LR, {**ADAM, "weight_decay": 0.3}),
    "adam-decoupled": (torch.optim.Adam, ADAM_LR, {**ADAMW, "decoupled_weight_decay": True}),
    "adam-amsgrad-maximize-l2": (
        torch.optim.Adam,
        ADAM_LR,
        {**ADAM, "weight_decay": 0.3, "amsgrad": True, "maximize": True},
    ),
    "sgd": (torch.optim.SGD, SGD_LR, {}),
    "sgd-decay": (torch.optim.SGD, SGD_LR, SGD),
    "sgd-momentum": (torch.optim.SGD, SGD_LR, {**SGD, "momentum": 0.9}),
    "sgd-dampening": (torch.optim.SGD, SGD_LR, {**SGD, "momentum": 0.9, "dampening": 0.3}),
    "sgd-nesterov": (torch.optim.SGD, SGD_LR, {**SGD, "momentum": 0.9, "nesterov": True}),
    "sgd-maximize": (torch.optim.SGD, SGD_LR, {**SGD, "momentum": 0.9, "maximize": True}),
}
VARIANTS = ("one group", "groups", "tensor lr")


def build(rule, variant, params, **changed):
    """The optimizer that a rule and a variant name. `groups`: the last parameter has its own rate and decay."""
    cls, lr, options = RULES[rule]
    options = {**options, **changed}
    if variant == "tensor lr":
        lr = torch.tensor(lr, dtype=torch.float64)
    if variant != "groups":
        return cls(params, lr=lr, **options)
    special = {"params": params[-1:], "lr": 0.3 * lr, "weight_decay": 0.7}
    return cls([{"params": params[:-1]}, special], lr=lr, **options)


def start_values():
    random = torch.Generator().manual_seed(7)
    return [(torch.rand(s, generator=random) + 0.5).bfloat16() for s in SHAPES]


def halve_lr_once(optimizer, window):
    """A schedule in the middle of the run; a tensor is halved in place."""
    if window == 9:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


def variant_fits(rule, variant):
    """Stock foreach takes no tensor learning rate without capturable."""
    return not (variant == "tensor lr" and rule == "adamw-foreach")


@functools.cache
def stock_run(rule, variant, dtype, grad_dtype):
    optimizer = build(rule, variant, make_params(start_values(), dtype))
    train_stock(optimizer, make_windows(SHAPES, 20, STEPS, grad_dtype), halve_lr_once)
    return optimizer


def assert_same_run(ours, stock, truth):
    def tensors(optimizer):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return {("p", k): p for k, p in enumerate(params)} | {(k, n): t for k, n, t in adam_or_sgd_states(optimizer)}

    mine, theirs, exact = tensors(ours), tensors(stock), tensors(truth)
    assert mine.keys() == theirs.keys() == exact.keys()
    for key in mine:
        assert_within_budget(mine[key], theirs[key], exact[key])


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rule", RULES)
def test_twenty_windows(rule, variant, dtype, backend):
    if not variant_fits(rule, variant):
        variant = "one group"
    inner = build(rule, variant, make_params(start_values(), dtype))
    w = wrap(inner, STEPS, update="fused", backend=backend)
    train_wrapped(w, make_windows(SHAPES, 20, STEPS, dtype), halve_lr_once)
    assert w.updates == 20
    assert_same_run(inner, stock_run(rule, variant, dtype, dtype), stock_run(rule, variant, torch.float64, dtype))


@pytest.mark.parametrize("rule", ["adamw-amsgrad", "sgd-nesterov"])
def test_twenty_windows_on_the_triton_interpreter(rule):
    inner = build(rule, "groups", make_params(start_values(), torch.bfloat16))
    w = wrap(inner, STEPS, update="fused", backend="triton")
    train_wrapped(w, make_windows(SHAPES, 20, STEPS, torch.bfloat16), halve_lr_once)
    stock = stock_run(rule, "groups", torch.bfloat16, torch.bfloat16)
    assert_same_run(inner, stock, stock_run(rule, "groups", torch.float64, torch.bfloat16))


def changes(rule):
    """Each option of a rule, broken in the way an update rule gets it wrong."""
    options = RULES[rule][2]
    broken = {
        "betas": lambda v: (v[1], v[0]),
        "weight_decay": lambda v: 0.0,
        "momentum": lambda v: 0.0,
        "eps": lambda v: 1e-8,
        "dampening": lambda v: 0.0,
    }
    for name, value in options.items():
        if name in ("foreach", "fused"):
            continue
        wrong = broken[name](value) if name in broken else not value
        if not (name == "momentum" and options.get("nesterov")):
            yield name, wrong


@pytest.mark.parametrize("rule", RULES)
def test_the_budget_sees_a_broken_option(rule):
    stock = stock_run(rule, "one group", torch.float32, torch.float32)
    truth = stock_run(rule, "one group", torch.float64, torch.float32)
    for name, wrong in changes(rule):
        broken = build(rule, "one group", make_params(start_values(), torch.float32), **{name: wrong})
        train_stock(broken, make_windows(SHAPES, 20, STEPS, torch.float32), halve_lr_once)
        for k in range(len(SHAPES)):
            p, s, t = (list(o.param_groups[0]["params"])[k] for o in (broken, stock, truth))
            with pytest.raises(AssertionError, match="errs"):
                assert_within_budget(p, s, t)


def layout(state_dict):
    def kind(value):
        if isinstance(value, torch.Tensor):
            return (value.dtype, tuple(value.shape), value.device)
        return type(value)

    return {k: {key: kind(value) for key, value in entry.items()} for k, entry in state_dict["state"].items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rule", RULES)
def test_state_has_the_layout_of_torch(rule, variant, dtype):
    if not variant_fits(rule, variant):
        variant = "one group"
    windows = make_windows(SHAPES, 2, STEPS, dtype)
    stock = build(rule, variant, make_params(start_values(), dtype))
    train_stock(stock, windows)
    inner = build(rule, variant, make_params(start_values(), dtype))
    w = wrap(inner, STEPS)
    train_wrapped(w, windows)
    assert update_in_use(w) == "fused"
    assert layout(w.state_dict()) == layout(stock.state_dict())
    assert layout(inner.state_dict()) == layout(stock.state_dict())
    assert w.state_dict()["param_groups"] == stock.state_dict()["param_groups"]
    for p, q in zip(params := [p for g in inner.param_groups for p in g["params"]], stock.state, strict=False):
        assert list(inner.state[p]) == list(stock.state[q])
        if "step" in inner.state[p]:
            assert torch.equal(inner.state[p]["step"], stock.state[q]["step"])
    assert len(params) == len(SHAPES)


def continue_from(state_dict, values, rule, dtype, windows, steps=None):
    """A new optimizer with these values and states, wrapped where `steps` is given, trained on."""
    optimizer = build(rule, "groups", make_params(values, dtype))
    if steps:
        optimizer = wrap(optimizer, steps)
    optimizer.load_state_dict(state_dict)
    (train_wrapped if steps else train_stock)(optimizer, windows)
    return optimizer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", ["adamw", "adamw-amsgrad", "adam-l2", "sgd", "sgd-dampening"])
def test_state_moves_to_a_bare_optimizer_and_back(rule, dtype):
    windows = make_windows(SHAPES, 6, STEPS, dtype)
    params = make_params(start_values(), dtype)
    w = wrap(build(rule, "groups", params), STEPS)
    train_wrapped(w, windows[:3])
    values = [p.detach().clone() for p in params]
    whole = w.state_dict()
    bare = {"state": whole["state"], "param_groups": whole["param_groups"]}
    assert extra_key(whole)

    stock = continue_from(bare, values, rule, dtype, windows[3:])
    truth = continue_from(bare, values, rule, torch.float64, windows[3:])
    resumed = continue_from(bare, values, rule, dtype, windows[3:], STEPS)
    train_wrapped(w, windows[3:])
    assert_same_run(w, stock, truth)
    for p, q in zip(params, (q for g in resumed.param_groups for q in g["params"]), strict=True):
        assert bits(p) == bits(q)
    for (_, name, mine), (_, _, theirs) in zip(adam_or_sgd_states(w), adam_or_sgd_states(resumed), strict=True):
        assert bits(mine) == bits(theirs), name


@pytest.mark.parametrize("rule", ["adamw", "sgd-nesterov"])
def test_state_of_a_bare_optimizer_continues_in_the_wrapper(rule):
    windows = make_windows(SHAPES, 6, STEPS, torch.float32)
    stock = build(rule, "groups", make_params(start_values(), torch.float32))
    train_stock(stock, windows[:3])
    values = [p.detach().clone() for g in stock.param_groups for p in g["params"]]
    saved = stock.state_dict()
    ours = continue_from(saved, values, rule, torch.float32, windows[3:], STEPS)
    truth = continue_from(saved, values, rule, torch.float64, windows[3:])
    train_stock(stock, windows[3:])
    assert_same_run(ours, stock, truth)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_fp32_moments_of_a_bf16_parameter(steps):
    """state_dtype and master_weights together are the float32 optimizer, whose parameter is shown rounded."""
    windows = make_windows(SHAPES, 20, steps, torch.bfloat16)
    inner = build("adamw", "groups", make_params(start_values(), torch.bfloat16))
    w = wrap(inner, steps, state_dtype=torch.float32, master_weights=True)
    train_wrapped(w, windows)
    runs = []
    for dtype in (torch.float32, torch.float64):
        runs.append(build("adamw", "groups", make_params(start_values(), dtype)))
        train_stock(runs[-1], windows)
    for (k, name, mine), (_, _, stock), (_, _, truth) in zip(
        adam_or_sgd_states(inner), *(adam_or_sgd_states(r) for r in runs), strict=True
    ):
        assert mine.dtype == torch.float32, (k, name)
        assert_within_budget(mine, stock, truth)
    for p, stock, truth in zip(
        *([p for g in o.param_groups for p in g["params"]] for o in (inner, *runs)), strict=True
    ):
        assert p.dtype == torch.bfloat16
        assert_within_budget(p, stock, truth)


def test_the_mean_is_summed_in_fp32_for_a_bf16_parameter():
    """The rounding of bf16 sums would show: 64 micro-batches of 1/64 with one of 1."""
    p = torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    w = wrap(torch.optim.SGD([p], lr=64.0), steps=64, state_dtype=torch.float32)
    window = [[torch.full((5,), 1.0 if k == 0 else 1 / 256, dtype=torch.bfloat16)] for k in range(64)]
    for grads in window:
        set_grads([p], grads)
        w.step()
    assert torch.equal(p.detach(), (-64 * mean64(window)[0]).bfloat16())
