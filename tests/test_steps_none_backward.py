"""steps=None and what a backward can be: checkpointed, compiled, nested, differentiated, broken off."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from live_runs import Run, assert_same, ours_are_views, run
from torch._dynamo import compiled_autograd
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from wrapper_helpers import (
    LOW_PRECISION,
    both_updates,
    recorded,
    tidy,  # noqa: F401
    wrap,
)

pytestmark = [LOW_PRECISION, pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")]

SQUARE = [(6, 6), (6, 6), (6,)]
REENTRANT = {"reentrant": True, "not reentrant": False}
reentrant_or_not = pytest.mark.parametrize("reentrant", REENTRANT.values(), ids=REENTRANT)


def data(k, dtype=torch.float32):
    random = torch.Generator().manual_seed(k)
    return (torch.rand(4, 6, generator=random) + 0.5).to(dtype).requires_grad_()


def layer(w, b, x):
    return torch.tanh(x @ w) * b


def network(done, k, segment=lambda function, *args: function(*args)):
    """Two segments that share a bias, the second one its weight with the first in odd micro-batches."""
    a, b, bias = done.params
    if k % 2:
        b = a
    x = segment(layer, a, bias, data(k, a.dtype))
    return segment(layer, b, bias, x).float().square().mean()


def train(done, segment, windows=2):
    for k in range(0, 3 * windows, 3):
        for i in range(3):
            network(done, k + i, segment).backward()
        done.note_grads()
        done.opt.step()
        done.opt.zero_grad(set_to_none=k == 0)


@both_updates
@reentrant_or_not
def test_checkpointing_is_as_without_us(reentrant, update):
    """Reentrant checkpointing runs a backward inside a backward and a hook twice in it."""

    def segment(function, *args):
        return checkpoint(function, *args, use_reentrant=reentrant)

    ours = run(lambda done: train(done, segment), shapes=SQUARE, update=update)
    native = run(lambda done: train(done, segment), shapes=SQUARE, bare=True)
    if update == "wrapped":
        assert_same(ours, native)
    for a, b in zip(ours.log, native.log, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=0)
    assert ours_are_views(ours)


def gradients(done, k, segment):
    """Of one micro-batch, by torch alone: what autograd hands over."""
    copy = Run(done.params[0].dtype, shapes=SQUARE, bare=True)
    network(copy, k, segment).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in copy.params]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reentrant", [None, False], ids=["plain", "not reentrant"])
def test_sums_are_those_of_what_autograd_hands_over(dtype, reentrant):
    """Tied weights are one gradient a backward: it is folded once, and exactly."""

    def segment(function, *args):
        return function(*args) if reentrant is None else checkpoint(function, *args, use_reentrant=False)

    done = Run(dtype, shapes=SQUARE)
    sums = [torch.zeros(shape) for shape in SQUARE]
    for k in range(5):
        network(done, k, segment).backward()
        for total, g in zip(sums, gradients(done, k, segment), strict=True):
            total += g
    for p, total in zip(done.params, sums, strict=True):
        assert torch.equal(p.grad, total)


@reentrant_or_not
def test_a_segment_that_raises_when_it_is_computed_again(reentrant):
    """Half-way through a backward: what is left is what torch leaves, and a retry after zero_grad() is right."""

    def script(done):
        broken = [False]

        def fragile(w, b, x):
            if broken[0]:
                raise ArithmeticError("in the second forward")
            return layer(w, b, x)

        train(done, lambda function, *args: checkpoint(fragile, *args, use_reentrant=reentrant), windows=1)
        for keep in (False, True):
            network(done, 7).backward()
            first = checkpoint(fragile, done.params[0], done.params[2], data(8), use_reentrant=reentrant)
            loss = layer(done.params[1], done.params[2], first).square().mean()
            broken[0] = True
            with contextlib.suppress(ArithmeticError):
                loss.backward()
            broken[0] = False
            done.note_grads()
            if not keep:
                done.opt.zero_grad()
            network(done, 9).backward()
            done.window()

    ours, native = (run(script, shapes=SQUARE, **how) for how in ({"update": "wrapped"}, {"bare": True}))
    assert_same(ours, native)


# Differentiable gradients


def penalty(done):
    """The gradient penalty through p.grad, in windows that hold something else before and after."""
    for k in range(3):
        if k:
            network(done, k).backward()
        network(done, k).backward(create_graph=True)
        (sum((p.grad**2).sum() for p in done.params if p.grad is not None) * 0.1).backward()
        network(done, k + 1).backward()
        done.note_grads()
        done.opt.step()
        done.note_grads()
        done.opt.zero_grad(set_to_none=k != 1)


@both_updates
def test_a_penalty_on_gradients_that_are_differentiated(update):
    ours = run(penalty, shapes=SQUARE, update=update)
    native = run(penalty, shapes=SQUARE, bare=True)
    if update == "wrapped":
        assert_same(ours, native)
    for a, b in zip(ours.log, native.log, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-8)


def test_the_graph_of_a_differentiable_sum_holds():
    def script(done):
        network(done, 0).backward()
        network(done, 1).backward(create_graph=True)
        assert all(p.grad.requires_grad for p in (done.params[0], done.params[2]))
        loss = sum((p.grad**3).sum() for p in done.params)
        for g in torch.autograd.grad(loss, done.params, allow_unused=True):
            done.note(0.0 if g is None else g)
        done.window()

    assert_same(run(script, shapes=SQUARE, update="wrapped"), run(script, shapes=SQUARE, bare=True))


def test_a_loss_of_gradients_outlives_folds_of_others():
    """p.grad as a constant of a graph: what is folded for other parameters is no change of it, what is for p is."""

    def script(done):
        a, b, _ = done.params
        network(done, 0).backward()
        loss = (a * a.grad * b).sum()
        network(done, 1).backward(inputs=[b])
        loss.backward()
        done.note_grads()
        loss = (a * b.grad).sum()
        network(done, 2).backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        done.window()

    assert_same(run(script, shapes=SQUARE, update="wrapped"), run(script, shapes=SQUARE, bare=True))


# Passes inside passes, threads


class Asks(torch.autograd.Function):
    """Its backward asks for gradients of a parameter that the pass around it adds to as well."""

    @staticmethod
    def forward(ctx, x, p, then):
        ctx.p, ctx.then = p, then
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            loss = (ctx.p**2).sum()
        if ctx.then == "autograd.grad":
            (g,) = torch.autograd.grad(loss, ctx.p)
            return grad * g.mean(), None, None
        loss.backward()
        return grad, None, None


@pytest.mark.parametrize("then", ["autograd.grad", "backward"])
@pytest.mark.parametrize("ends_in_p", [True, False])
def test_a_pass_inside_a_pass(then, ends_in_p):
    def script(done):
        a, b, _ = done.params
        for k in range(3):
            network(done, k).backward()
            inner = a if ends_in_p else b * 1
            Asks.apply(layer(inner, done.params[2], data(k)), a, then).sum().backward()
            done.note_grads()
        done.window(only=[])

    assert_same(run(script, shapes=SQUARE, update="wrapped"), run(script, shapes=SQUARE, bare=True))


def test_a_backward_in_another_thread():
    def script(done):
        for k in range(4):
            loss = network(done, k)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        done.window()

    assert_same(run(script, shapes=SQUARE, update="wrapped"), run(script, shapes=SQUARE, bare=True))


def test_steps_inside_a_backward():
    """An optimizer for each parameter, stepped by its hook, as some do to save memory."""

    def script(done, **how):
        optimizers = {}
        for p in done.params:
            inner = torch.optim.SGD([p], lr=0.1)
            optimizers[p] = inner if how else wrap(inner, None, update="wrapped")

        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in done.params:
            p.register_post_accumulate_grad_hook(step)
        for k in range(4):
            network(done, k).backward()
            assert all(p.grad is None for p in done.params)

    ours, native = (Run(shapes=SQUARE, bare=True) for _ in range(2))
    script(ours)
    script(native, native=True)
    assert_same(ours, native)


# Compilers


@pytest.mark.parametrize("when", ["before", "after"])
@both_updates
def test_78_a_compiled_model_is_as_an_eager_one(when, update):
    """Wrapped before and after the first call of the compiled function."""
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    compiled = torch.compile(models[0], backend="aot_eager")
    if when == "after":
        compiled(data(0)).mean().backward()
        models[0].zero_grad()
    ours = wrap(torch.optim.SGD(models[0].parameters(), lr=0.1), None, update=update)
    native = torch.optim.SGD(models[1].parameters(), lr=0.1)
    for model, optimizer in ((compiled, ours), (models[1], native)):
        for k in range(4):
            model(data(k)).mean().backward()
            model(data(k + 1)).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=k % 2 == 0)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)


def test_a_compiled_training_step():
    def step(done, k):
        network(done, k).backward()
        network(done, k + 1).backward()
        done.opt.step()
        done.opt.zero_grad()

    ours, native = (Run(shapes=SQUARE, **how) for how in ({"update": "wrapped"}, {"bare": True}))
    compiled = torch.compile(step, backend="aot_eager")
    for k in range(4):
        compiled(ours, k)
        step(native, k)
    for p, q in zip(ours.params, native.params, strict=True):
        assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)


def compiling_autograd():
    return compiled_autograd._enable(torch.compile(backend="eager"))


def test_compiled_autograd_adds_once():
    """It reads p.grad ahead of all hooks and adds to it itself, in float32 as well as we do."""

    def script(done, compiles=contextlib.nullcontext):
        for k in range(3):
            with compiles():
                done.backward(k)
                torch.autograd.grad(done.loss(7), done.params)
                done.note_grads()
            done.backward(k + 1)
            done.note_grads()
            if k:
                done.opt.step()
                done.opt.zero_grad(set_to_none=k == 1)

    ours = run(lambda done: script(done, compiling_autograd), update="wrapped")
    assert_same(ours, run(script, bare=True))
    assert ours_are_views(ours)


@pytest.mark.parametrize("first", [True, False])
def test_compiled_autograd_of_low_precision_is_refused(first):
    done = Run(torch.bfloat16)
    if not first:
        done.backward(0)
        before = [p.grad.clone() for p in done.params]
    named = "compiled autograd" if first else "(?i)compiled.autograd"
    with pytest.raises((TypeError, NotImplementedError), match=named), compiling_autograd():
        done.backward(1)
    torch._dynamo.reset()
    if first:
        done.opt.zero_grad()
    else:
        assert all(torch.equal(p.grad, g) for p, g in zip(done.params, before, strict=True))
    done.backward(2)
    done.opt.step()
    assert done.opt.updates == 1


# What a backward must not do


def test_a_gradient_that_cannot_be_folded_leaves_the_sum():
    """As where autograd refuses to add."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return TwoTensor(torch.ones(2, 3), torch.ones(2, 3))

    p = torch.nn.Parameter(torch.zeros(2, 3))
    w = wrap(torch.optim.SGD([p], lr=1.0), None)
    (p * 2).sum().backward()
    with pytest.raises(TypeError, match="TwoTensor"):
        Wrong.apply(p).backward()
    assert torch.equal(p.grad, torch.full((2, 3), 2.0))
    (p * 3).sum().backward()
    w.step()
    assert torch.equal(p.detach(), torch.full((2, 3), -5.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_custom_function_may_return_any_precision(dtype, given):
    """Without a wrapper autograd casts it to the parameter's dtype."""

    class Gives(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return torch.full((5,), 0.1, dtype=given)

    p = torch.nn.Parameter(torch.zeros(5, dtype=dtype))
    w = wrap(torch.optim.SGD([p], lr=1.0), None)
    with recorded() as warned:
        for _ in range(4):
            Gives.apply(p).backward()
    assert p.grad.dtype == torch.float32
    coarse = max((dtype, given), key=lambda d: torch.finfo(d).eps)
    assert p.grad.tolist() == pytest.approx([0.4] * 5, rel=torch.finfo(coarse).eps)
    w.step()
    assert not warned
