"""Optimizers that step themselves: equal, bit by bit, to the bare one fed the mean rounded once."""

from __future__ import annotations

import pytest
import torch
from wrapper_helpers import (
    DTYPES,
    LOW_PRECISION,
    bits,
    make_params,
    make_windows,
    params_of,
    recorded,
    set_grads,
    state_bits,
    tidy,  # noqa: F401
    train_stock,
    train_wrapped,
    wrap,
)

pytestmark = LOW_PRECISION

NOT_WRAPPED = {"Optimizer", "LBFGS", "SparseAdam"}
CLASSES = [
    name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type) and name not in NOT_WRAPPED
]


def make(name, params):
    options = {"lr": 0.05}
    if name in ("SGD", "RMSprop"):
        options["momentum"] = 0.9
    return getattr(torch.optim, name)(params, **options)


def shapes_for(name):
    return [(8, 6), (5, 7)] if name == "Muon" else [(33,), (5, 7)]


def stock_refuses(name, dtype):
    """What stock torch itself cannot do with this dtype, by trying it."""
    params = make_params([torch.ones(s) for s in shapes_for(name)], dtype)
    try:
        train_stock(make(name, params), make_windows(shapes_for(name), 1, 1, dtype))
    except RuntimeError as error:
        return str(error)
    return None


def test_the_classes_of_torch_are_all_here():
    assert {"AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "NAdam", "RAdam", "Rprop", "Adafactor"} <= set(CLASSES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_54_two_updates_equal_the_bare_optimizer(name, dtype):
    shapes = shapes_for(name)
    if refusal := stock_refuses(name, dtype):
        pytest.skip(f"stock torch: {refusal}")
    # Rounded to bf16 first: the FP32 sum of four is exact, and the mean is rounded once indeed.
    windows = [
        [[g.to(dtype) for g in micro] for micro in window] for window in make_windows(shapes, 2, 4, torch.bfloat16)
    ]
    start = [torch.full(s, 0.75) for s in shapes]
    bare = make(name, make_params(start, dtype))
    inner = make(name, make_params(start, dtype))
    w = wrap(inner, 4, update="wrapped")
    train_stock(bare, windows)
    train_wrapped(w, windows)
    assert w.updates == 2
    for p, q in zip(params_of(w), params_of(bare), strict=True):
        assert p.dtype == dtype
        assert bits(p) == bits(q)
        assert state_bits(dict(w.state[p])) == state_bits(dict(bare.state[q]))


@pytest.mark.parametrize("name", CLASSES)
def test_steps_1_is_the_bare_optimizer_bit_by_bit(name):
    shapes = shapes_for(name)
    random = torch.Generator().manual_seed(11)
    windows = [[[torch.randn(s, generator=random) for s in shapes]] for _ in range(5)]
    bare, inner = (make(name, make_params([torch.full(s, 0.75) for s in shapes], torch.float32)) for _ in range(2))
    w = wrap(inner, 1, update="wrapped")
    train_stock(bare, windows)
    train_wrapped(w, windows)
    for p, q in zip(params_of(w), params_of(bare), strict=True):
        assert bits(p) == bits(q)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_optimizer_sees_gradients_of_the_dtype_of_its_parameters(dtype):
    seen = []

    class Curious(torch.optim.RMSprop):
        def step(self, closure=None):
            seen.extend((p.grad.dtype, p.grad.shape) for p in params_of(self) if p.grad is not None)
            return super().step(closure)

    params = make_params([torch.ones(3, 2), torch.ones(4)], dtype)
    w = wrap(Curious(params), 2)
    for _ in range(4):
        set_grads(params, [torch.ones(3, 2), None])
        w.step()
        assert all(p.grad is None for p in params)
    assert seen == [(dtype, (3, 2))] * 2


def test_an_optimizer_of_the_users_own():
    class Sign(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            assert closure is None, "the closure belongs to the micro-batch, not to the update"
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad.sign(), alpha=-group["lr"])

    p = torch.nn.Parameter(torch.zeros(2))
    w = wrap(Sign([p], 0.5), 2)

    def closure():
        p.grad = torch.tensor([1.0, -3.0])
        return 4.0

    assert [w.step(closure) for _ in range(4)] == [4.0] * 4
    assert p.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_optimizer_may_keep_the_gradient_it_was_given(dtype):
    """As after `zero_grad()`, which drops `p.grad` and not what others hold of it."""

    class Difference(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure=None):
            for p in params_of(self):
                p.sub_(p.grad - self.state[p].get("previous", 0))
                self.state[p]["previous"] = p.grad

    p = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    w = wrap(Difference([p]), 2)
    for g in (1.0, 3.0, 4.0, 4.0, 9.0, 9.0):
        set_grads([p], [torch.full((3,), g)])
        w.step()
    assert p.tolist() == [-(2.0 + 2.0 + 5.0)] * 3
    assert w.state[p]["previous"].tolist() == [9.0] * 3


def test_a_wrapped_optimizer_that_raises_leaves_the_error_to_the_caller():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError("not today")

    p = torch.nn.Parameter(torch.zeros(1))
    w = wrap(Broken([p], lr=1.0), 1)
    set_grads([p], [torch.ones(1)])
    with pytest.raises(ArithmeticError, match="not today"):
        w.step()
    assert p.item() == 0.0
    assert w.updates == 0


@pytest.mark.parametrize("update", ["auto", "wrapped"])
def test_float32_is_wrapped_without_a_warning(update):
    with recorded() as caught:
        params = make_params([torch.ones(3)], torch.float32)
        train_wrapped(wrap(torch.optim.RMSprop(params), 2, update=update), make_windows([(3,)], 3, 2, torch.float32))
    assert not caught, [str(c.message) for c in caught]


def test_parameters_that_are_not_leaves_are_updated_as_by_the_bare_optimizer():
    """What differentiable=True is for. They have no grad_dtype to be looked at."""
    found = []
    for wrapped in (True, False):
        p = torch.nn.Parameter(torch.ones(3)).clone()
        optimizer = torch.optim.RMSprop([p], differentiable=True)
        optimizer = wrap(optimizer, 1) if wrapped else optimizer
        p.grad = torch.ones(3)
        with torch.no_grad():
            optimizer.step()
        found.append(p.detach().clone())
    assert torch.equal(*found)
    assert not torch.equal(found[0], torch.ones(3))
