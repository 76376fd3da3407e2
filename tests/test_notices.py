"""Warnings point at the user's line, however many calls lie between, and whatever torch puts around them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import SGD
from wrapper_helpers import recorded, tidy, wrap  # noqa: F401


def step(w, grads):
    for p, g in zip((p for group in w.param_groups for p in group["params"]), grads, strict=True):
        p.grad = torch.full_like(p, g)
    w.step()


def left_out(w):
    step(w, [1.0, 1.0])
    w.param_groups[0]["params"].pop()


def unfreeze_in_bf16(w):
    w.param_groups[0]["params"][0].data = torch.zeros(3, dtype=torch.bfloat16)


def loads_another_length(w):
    step(w, [1.0, 1.0])
    saved = copy.deepcopy(w.state_dict())
    w.reset()
    w.steps = 5
    w.load_state_dict(saved)


CASES = {
    "constructor": (
        "master_weights",
        lambda w: None,
        lambda w: wrap(SGD([torch.nn.Parameter(torch.zeros(1).half())]), 2),
    ),
    "a fold": ("master_weights", unfreeze_in_bf16, lambda w: w.step()),
    "a parameter that left, seen by a fold": ("left the optimizer", left_out, lambda w: w.step()),
    "a parameter that left, seen by flush": ("left the optimizer", left_out, lambda w: w.flush()),
    "close": ("was closed", lambda w: step(w, [1.0, 1.0]), lambda w: w.close()),
    "load": ("was begun with steps=3", lambda w: None, loads_another_length),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_warning_points_at_the_caller(compiled, case):
    text, prepare, call = case
    w = wrap(SGD([torch.nn.Parameter(torch.zeros(3)) for _ in range(2)], lr=1.0), 3)
    prepare(w)
    with recorded() as caught:
        (torch.compile(call, backend="eager") if compiled else call)(w)
    (warning,) = [c for c in caught if text in str(c.message)]
    assert warning.filename == (wrap.__code__.co_filename if case is CASES["constructor"] else __file__)
