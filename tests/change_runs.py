"""Training while groups, parameters and state change: ours in windows, stock PyTorch and float64 on the means."""

from __future__ import annotations

import copy

import pytest
import torch
from wrapper_helpers import assert_within_budget, make_params, make_windows, mean64, set_grads, uniform, wrap

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
