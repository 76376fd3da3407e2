"""Optimizers and options that are refused: the error names value, rule and way out, and nothing has changed."""

from __future__ import annotations

import re

import pytest
import torch
from torch.optim import LBFGS, SGD, Adam, AdamW, RMSprop
from wrapper_helpers import (
    Toy,
    bits,
    params_of,
    refused,
    set_grads,
    tidy,  # noqa: F401
    wrap,
)

from fusedaccum import FusedAccumOptimizer

WAY_OUT = r"\b(use|pass|leave|drop|give|without)\b"


def used_optimizer(make=AdamW, dtype=torch.float32):
    """An optimizer with moments, and a gradient waiting."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 5).to(dtype))
    optimizer = make([p], lr=0.1)
    for g in (1.0, 2.0):
        set_grads([p], [torch.full((5,), g)])
        if g == 1.0:
            optimizer.step()
    return optimizer


def still_wrappable(optimizer):
    """A refused constructor leaves nothing behind: the same optimizer can be wrapped afterwards."""
    w = wrap(optimizer, steps=1)
    before = bits(params_of(optimizer)[0])
    w.step()
    assert w.updates == 1
    assert bits(params_of(optimizer)[0]) != before


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "8", [4]], ids=repr)
def test_20_steps(steps):
    optimizer = used_optimizer()
    with refused(optimizer, "steps", repr(steps).replace("[", r"\["), "integer|positive|at least 1|int"):
        FusedAccumOptimizer(optimizer, steps=steps)
    still_wrappable(optimizer)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "8", None], ids=repr)
def test_20_steps_set_later(steps):
    toy = Toy(4).run([1])
    with refused(toy.w, "steps", repr(steps), "close" if steps is None else "integer|positive|at least 1|int"):
        toy.w.steps = steps
    assert toy.w.steps == 4
    toy.run([1] * 3)
    assert toy.value == -1.0


# option, value, what the text must hold besides the option's name
LATER = [
    ("fold_every", 2, ["2", "1"]),
]
UNKNOWN = [
    ("process_group", "pg", ["pg", "ProcessGroup", "None"]),
    ("wire_dtype", torch.bfloat16, ["bfloat16", "process_group"]),
    ("wire_dtype", torch.float16, ["float16", "float32", "bfloat16"]),
    ("amp_scaling", 1, ["1", "True", "False"]),
    ("amp_scaling", None, ["None", "True", "False"]),
    ("reduction", "avg", ["avg", "mean", "sum"]),
    ("rounding_seed", 5, ["5", "stochastic"]),
    ("reduction", None, ["None", "mean", "sum"]),
    ("fold", "later", ["later", "step"]),
    *(("bucket_mb", mb, [re.escape(repr(mb)), "above 0"]) for mb in (0, -1, True, "25", float("inf"), float("nan"))),
    ("bucket_mb", 5, ["5", "fold='backward'"]),
    ("nonfinite", "ignore", ["ignore", "propagate", "skip_window", "skip_micro", "raise"]),
    ("nonfinite", None, ["None", "propagate"]),
    ("update", "maybe", ["maybe", "auto", "fused", "wrapped"]),
    ("rounding", "up", ["up", "nearest", "stochastic"]),
    ("rounding", None, ["None", "nearest"]),
    *(("rounding_seed", seed, [re.escape(repr(seed)), "0 to 2"]) for seed in (True, None, 1.0, "1", -1, 2**63)),
    ("shard", "zero9", ["zero9", "None", "zero1"]),
    ("shard", "zero1", ["zero1", "process_group"]),
    ("fold_every", 0, ["0", "1"]),
    ("backend", "abacus", ["abacus", "auto", "reference"]),
    ("state_dtype", torch.int64, ["int64", "float32"]),
    ("state_dtype", torch.float64, ["float64", "float32"]),
    ("state_dtype", "float32", ["float32", "torch"]),
    ("max_norm", -1.0, ["-1.0", "positive|above|greater"]),
    ("max_norm", float("nan"), ["nan", "positive|above|greater"]),
    ("max_norm", "1", ["'1'", "number|float"]),
]


@pytest.mark.parametrize(
    ("option", "value", "words"), LATER + UNKNOWN, ids=lambda v: str(v) if len(str(v)) < 20 else ""
)
def test_options(option, value, words):
    optimizer = used_optimizer()
    with refused(optimizer, option, *words):
        FusedAccumOptimizer(optimizer, **{"steps": 4, option: value})
    still_wrappable(optimizer)


def test_the_values_that_are_the_default_are_taken():
    toy = Toy(
        2,
        fold="step",
        nonfinite="propagate",
        rounding="nearest",
        amp_scaling=False,
        fold_every=1,
        process_group=None,
        wire_dtype=torch.float32,
        shard=None,
        state_dtype=None,
        master_weights=False,
        max_norm=None,
        update="auto",
        backend="auto",
        reduction="mean",
    )
    assert toy.run([1, 3]).value == -2.0


@pytest.mark.parametrize("thing", [None, 3, torch.nn.Linear(2, 2), [torch.nn.Parameter(torch.ones(2))], SGD], ids=type)
def test_not_an_optimizer(thing):
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        FusedAccumOptimizer(thing, steps=4)


def test_lbfgs_is_refused_by_name():
    optimizer = LBFGS([torch.nn.Parameter(torch.ones(2))])
    with refused(optimizer, "LBFGS", "closure|line search|several times"):
        FusedAccumOptimizer(optimizer, steps=4)


def test_a_second_wrapper():
    toy = Toy(4).run([1])
    with refused(toy.w, "SGD|optimizer", "wrap"):
        FusedAccumOptimizer(toy.inner, steps=2)
    with refused(toy.w, "FusedAccumOptimizer", "wrap"):
        FusedAccumOptimizer(toy.w, steps=2)
    assert toy.run([1] * 3).value == -1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("update", ["auto", "fused", "wrapped"])
@pytest.mark.parametrize("make", [SGD, AdamW, RMSprop])
def test_120_double_precision_parameters(make, update, dtype):
    if make is RMSprop and update == "fused":
        update = "auto"
    p, double = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer = make([p, double], lr=0.1)
    set_grads([p, double], [torch.ones(2), torch.ones(2)])
    with refused(optimizer, str(dtype).removeprefix("torch."), "float32"):
        wrap(optimizer, steps=1, update=update).step()


def test_120_a_double_precision_group_added_later():
    toy = Toy(2).run([1])
    before = bits(toy.p)
    with pytest.raises((TypeError, ValueError), match="float64"):
        toy.w.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    assert bits(toy.p) == before
    assert toy.w.pending == 1
    assert len(toy.w.param_groups) == 1
    assert toy.run([3]).value == -2.0


def test_120_a_model_that_became_double():
    model = torch.nn.Linear(2, 1)
    w = wrap(SGD(model.parameters(), lr=0.1), steps=2)
    model.double()
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    with refused(w, "float64", "float32"):
        w.step()


WRAPPED_ONLY = {
    "RMSprop": RMSprop,
    "a subclass": type("Mine", (AdamW,), {}),
    "differentiable": lambda params, lr: AdamW(params, lr=lr, differentiable=True),
}
FUSED_OPTIONS = [
    ({"state_dtype": torch.float32}, "state_dtype"),
    ({"master_weights": True}, "master_weights"),
    ({"rounding": "stochastic"}, "rounding"),
    ({"update": "fused"}, "update"),
]


@pytest.mark.parametrize("make", WRAPPED_ONLY.values(), ids=WRAPPED_ONLY)
@pytest.mark.parametrize(("options", "word"), FUSED_OPTIONS, ids=lambda v: v if isinstance(v, str) else "")
def test_what_only_the_fused_update_holds(make, options, word):
    optimizer = make([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with refused(optimizer, word, "fused", "differentiable|AdamW, Adam", WAY_OUT):
        FusedAccumOptimizer(optimizer, steps=4, **options)


@pytest.mark.parametrize(("options", "word"), FUSED_OPTIONS[:-1], ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("make", [AdamW, Adam, SGD])
def test_fused_options_with_the_wrapped_update(make, options, word):
    optimizer = used_optimizer(make)
    with refused(optimizer, word, "wrapped", "fused", WAY_OUT):
        FusedAccumOptimizer(optimizer, steps=4, update="wrapped", **options)
    still_wrappable(optimizer)


@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
@pytest.mark.parametrize("kind", ["one storage", "listed twice"])
@pytest.mark.parametrize("options", [options for options, _ in FUSED_OPTIONS])
def test_119_the_fused_update_refuses_overlap(kind, options):
    base = torch.ones(6)
    params = [torch.nn.Parameter(base[:4]), torch.nn.Parameter(base[2:])]
    if kind == "listed twice":
        params[1] = params[0]
    optimizer = SGD(params, lr=1.0)
    set_grads(params, [torch.ones(4)] * 2)
    with refused(optimizer, "storage|twice|overlap", WAY_OUT):
        wrap(optimizer, steps=1, **options).step()
