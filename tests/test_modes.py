"""torch.func, inference mode, tensor subclasses: right, or refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.optim import SGD
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode
from wrapper_helpers import (
    LOW_PRECISION,
    assert_within_budget,
    both_updates,
    every_maker,
    make_params,
    make_windows,
    micro_batch,
    params_of,
    refused,
    set_grads,
    snapshot,
    tidy,  # noqa: F401
    train_stock,
    uniform,
    wrap,
)

from fusedaccum import FusedAccumOptimizer

pytestmark = [
    LOW_PRECISION,
    # torch.jit's own, when the first transform of torch.func is imported.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]
func = torch.func


def toy(update="auto", n=2, steps=2):
    p = torch.nn.Parameter(torch.zeros(n))
    return p, wrap(SGD([p], lr=1.0), steps, update=update)


# torch.inference_mode


@every_maker
@both_updates
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_in_inference_mode(dtype, update, make):
    """Buffers, moments and masters that come to be there serve the steps outside, and the checkpoint."""
    shapes = [(33,), (70,)]
    windows = make_windows(shapes, 6, 2, dtype)
    ours, stock, truth = (make(make_params([uniform(*s) for s in shapes], d)) for d in (dtype, dtype, torch.float64))
    w = wrap(ours, 2, update=update)
    for k, window in enumerate(windows):
        for m, grads in enumerate(window):
            set_grads(params_of(w), grads)
            with torch.inference_mode(k < 2 or (k + m) % 2 == 0):
                w.step()
        if k == 3:
            with torch.inference_mode():
                saved = w.state_dict()
            w.load_state_dict(copy.deepcopy(saved))
    for optimizer in (stock, truth):
        train_stock(optimizer, windows)
    for mine, theirs, exact in zip(*map(params_of, (ours, stock, truth)), strict=True):
        assert_within_budget(mine, theirs, exact)
        assert not any(t.is_inference() for t in (mine, *ours.state[mine].values()))


def test_masters_and_every_other_call_in_inference_mode():
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    w = wrap(SGD([p], lr=1.0, momentum=0.5), 4, master_weights=True, state_dtype=torch.float32)
    with torch.inference_mode():
        for g in (1.0, 3.0):
            p.grad = torch.full((2,), g, dtype=torch.bfloat16)  # an inference tensor
            w.step()
        assert w.master_grad(p).tolist() == [1.0] * 2
        w.flush()
        saved = copy.deepcopy(w.state_dict())
        w.load_state_dict(saved)
        p.grad = torch.ones(2, dtype=torch.bfloat16)
        w.step()
    other = copy.deepcopy(w)
    for wrapper in (w, other):
        q = params_of(wrapper)[0]
        wrapper.reset()
        micro_batch(wrapper, (q * 2.0).sum())
        wrapper.flush()
        assert q.tolist() == [-5.0] * 2  # -2, then momentum 0.5 * 2 + 2


def test_an_open_window_loaded_in_inference_mode():
    """The buffer that is made for it serves the steps that follow."""
    p, w = toy()
    micro_batch(w, p.sum())
    q, new = toy()
    with torch.inference_mode():
        new.load_state_dict(copy.deepcopy(w.state_dict()))
    micro_batch(new, (q * 3.0).sum())
    assert q.tolist() == [-2.0] * 2


def test_a_parameter_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        p = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(TypeError, match=r"parameter 0.*inference_mode.*clone"):
        FusedAccumOptimizer(SGD([p], lr=1.0), steps=2)
    q, w = toy()
    with refused(w, "inference_mode"):
        w.add_param_group({"params": [p]})
    assert q.grad is None


# torch.func


@both_updates
def test_gradients_from_torch_func(update):
    """`torch.func.grad`, and per-sample gradients that the user has reduced."""
    p, w = toy(update)
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    per_sample = func.vmap(func.grad(lambda q, x: (q * x).sum()), in_dims=(None, 0))
    for k in range(4):
        p.grad = func.grad(lambda q: (q * x[0]).sum())(p) if k % 2 else per_sample(p.detach(), x).mean(0)
        w.step()
    assert p.tolist() == [-3.0, -6.0]


@both_updates
def test_functional_call(update):
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    w = wrap(SGD(model.parameters(), lr=1.0), 2, update=update)
    for g in (1.0, 3.0):
        micro_batch(w, func.functional_call(model, dict(model.named_parameters()), (torch.full((1, 2), g),)).sum())
    assert model.weight.tolist() == [[-2.0] * 2]


TRANSFORMS = {
    "grad": lambda f: func.grad(f)(torch.ones(2)),
    "vmap": lambda f: func.vmap(f)(torch.ones(3, 2)),
    "jvp": lambda f: func.jvp(f, (torch.ones(2),), (torch.ones(2),)),
    "functionalize": lambda f: func.functionalize(f)(torch.ones(2)),
}
CALLS = {
    "step": lambda w: w.step(),
    "flush": lambda w: w.flush(),
    "reset": lambda w: w.reset(),
    "state_dict": lambda w: w.state_dict(),
    "load_state_dict": lambda w: w.load_state_dict(SGD([torch.nn.Parameter(torch.zeros(2))]).state_dict()),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_calls_inside_a_transform_are_refused(transform, call):
    p, w = toy()
    micro_batch(w, p.sum())

    def inside(x):
        call(w)
        return x.sum()

    with refused(w, "torch.func transform", "return the gradients"):
        transform(inside)
    micro_batch(w, (p * 3.0).sum())
    assert p.tolist() == [-2.0] * 2


@both_updates
@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_a_tensor_that_left_its_transform(transform, update):
    """A dead wrapper around one value is that value; one around a batch of them is no gradient."""
    q = torch.nn.Parameter(torch.zeros(2))
    p, w = toy(update)
    w.add_param_group({"params": [q]})
    kept = []

    def inside(x):
        kept.append(x * 2)
        return x.sum()

    TRANSFORMS[transform](inside)
    p.grad, q.grad = torch.ones(2), kept[0]
    if transform == "vmap":
        with pytest.raises(TypeError, match=r"param_groups\[1\]\['params'\]\[0\].*torch.func.*returns"):
            w.step()
        assert (w.pending, w.master_grad(p).tolist(), p.grad.tolist()) == (0, [0.0] * 2, [1.0] * 2)
    else:
        w.step()
        w.flush()
        assert (p.tolist(), q.tolist()) == ([-1.0] * 2, [-2.0] * 2)


# Gradients with a graph, gradients set by hand


@both_updates
def test_create_graph(update):
    """The graph is let go: nothing of the wrapper holds it, and p.grad is None as ever."""
    p = torch.nn.Parameter(torch.ones(2, 3).t())
    w = wrap(SGD([p], lr=1.0), 2, update=update)
    for g in (1.0, 2.0):
        grad = torch.autograd.grad((p * p * g).sum(), p, create_graph=True)[0]
        assert grad.requires_grad
        p.grad = grad
        w.step()
        assert p.grad is None
        assert not w.master_grad(p).requires_grad
    assert torch.equal(p.detach(), torch.full((3, 2), -2.0))
    assert p.is_leaf
    assert not any(isinstance(t, torch.Tensor) and t.requires_grad for t in w.optimizer.state[p].values())


@both_updates
def test_backward_for_some_parameters_and_saved_tensors_on_the_cpu(update):
    p, q = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    w = wrap(SGD([p, q], lr=1.0), 2, update=update)
    for g in (1.0, 3.0):
        with torch.autograd.graph.save_on_cpu():
            loss = (p.sin() * g + q.sin() * g).sum()
        loss.backward(inputs=[p])
        w.step()
    assert (p.tolist(), q.tolist()) == ([-2.0] * 2, [0.0] * 2)


# Tensor subclasses


class Named(torch.Tensor):
    """A subclass without `__torch_dispatch__`: an ordinary tensor with another name."""


@both_updates
def test_a_plain_subclass(update):
    p = torch.nn.Parameter(torch.zeros(2).as_subclass(Named))
    q = torch.nn.Parameter(torch.zeros(2))
    w = wrap(SGD([p, q], lr=1.0), 2, update=update)
    for g in (1.0, 3.0):
        (p * g).sum().backward()
        q.grad = torch.full((2,), g).as_subclass(Named)
        w.step()
    assert isinstance(p, Named)
    assert (p.tolist(), q.tolist()) == ([-2.0] * 2, [-2.0] * 2)


def two_tensor():
    return TwoTensor(torch.zeros(2), torch.zeros(2))


def fake_tensor():
    with FakeTensorMode():
        return torch.zeros(2)


def d_tensor():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,)), [Replicate()])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("make", [two_tensor, fake_tensor, d_tensor])
def test_a_subclass_that_answers_operators_itself_is_refused(make):
    """TwoTensor got twice its gradient, without a word: it runs a kernel for each of its tensors."""
    special = make()
    name = type(special).__name__
    if make is not d_tensor:
        with pytest.raises(TypeError, match=f"parameter 0 is a {name}.*__torch_dispatch__.*plain tensors"):
            FusedAccumOptimizer(SGD([torch.nn.Parameter(special)], lr=1.0), steps=2)
    p, w = toy()
    q = torch.nn.Parameter(torch.zeros(2))
    w.add_param_group({"params": [q]})
    p.grad, q.grad = torch.ones(2), special
    with pytest.raises(TypeError, match=rf"param_groups\[1\]\['params'\]\[0\].*{name}.*plain tensor"):
        w.step()
    assert (w.pending, w.master_grad(p).tolist(), p.grad.tolist()) == (0, [0.0] * 2, [1.0] * 2)
    q.grad = torch.ones(2)
    w.step()
    w.flush()
    assert (p.tolist(), q.tolist()) == ([-1.0] * 2, [-1.0] * 2)


def test_fake_tensor_mode_is_refused():
    p, w = toy()
    micro_batch(w, p.sum())
    before = snapshot(w)
    for call in CALLS.values():
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=r"FakeTensorMode.*leave"):
            call(w)
    assert snapshot(w) == before


@both_updates
def test_a_mode_that_watches_operators(update):
    p, w = toy(update)
    with FlopCounterMode(display=False):
        for g in (1.0, 3.0):
            micro_batch(w, (p * g).sum())
    assert p.tolist() == [-2.0] * 2


@both_updates
def test_another_default_device(update):
    """Tables stay where they belong, whatever device torch makes tensors on: meta stands for any other here."""
    p, w = toy(update)
    torch.set_default_device("meta")
    try:
        for g in (1.0, 3.0):
            p.grad = torch.full((2,), g, device="cpu")
            w.step(mean_of=2)
        w.load_state_dict(copy.deepcopy(w.state_dict()))
        norm = w.grad_norm
    finally:
        torch.set_default_device(None)
    assert norm == pytest.approx(2 * 2**0.5)
    assert p.tolist() == [-2.0] * 2
