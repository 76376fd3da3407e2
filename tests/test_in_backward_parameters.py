"""fold="backward" with parameters that change between micro-batches and inside of them."""

from __future__ import annotations

import pytest
import torch
from backward_runs import BYTE, held, sgd_pair
from torch.optim import SGD
from wrapper_helpers import (
    LOW_PRECISION,
    Toy,
    bits,
    both_updates,
    tidy,  # noqa: F401
    use_two_buffers,
    wrap,
)

pytestmark = LOW_PRECISION
both_buckets = pytest.mark.parametrize("bucket", [BYTE, 25], ids=["1 byte", "25 MiB"])
GONE = "left the optimizer or changed shape"


# Changes between micro-batches


# p and q, which are each other's gradient. From the second micro-batch on p has one, or from the third.
WANTED = {True: (2.0 - 3.0 / 2 - 1.0, 3.0 - 2.0 - 0.5), False: (2.0 - 1.0, 3.0 - 2.0 - 2.0)}


@both_buckets
@pytest.mark.parametrize("inside", [False, True], ids=["between windows", "inside a window"])
def test_frozen_and_unfrozen(inside, bucket):
    (p, q), w = sgd_pair(bucket_mb=bucket)
    p.requires_grad_(False)
    for k in range(4):
        if k == (1 if inside else 2):
            p.requires_grad_(True)
        (p * q).sum().backward()
        assert q.grad is None
        assert p.grad is None or k == (1 if inside else 2)  # the first one waits for step(): nobody said it would come
        if k == 3:
            p.requires_grad_(False)
        w.step()
    assert not p.requires_grad
    assert (p[0].item(), q[0].item()) == WANTED[inside]


@both_buckets
@pytest.mark.parametrize("on", ["wrapper", "optimizer"])
@pytest.mark.parametrize("middle", [False, True], ids=["between micro-batches", "between two backwards of one"])
def test_a_group_more(middle, on, bucket):
    (p,), w = sgd_pair(values=(0.0,), bucket_mb=bucket)
    new = torch.nn.Parameter(torch.zeros(3))
    (p * 2).sum().backward()
    if not middle:
        w.step()
    (w if on == "wrapper" else w.optimizer).add_param_group({"params": [new], "lr": 2.0})
    (p.sum() * 4 + new.sum() * 6).backward()
    assert p.grad is None
    if on == "wrapper":  # else it may be too late for the first gradient, which waits for step()
        assert new.grad is None
    w.step()
    assert w.flush() is middle
    assert (p[0].item(), new[0].item()) == ((-6.0, -12.0) if middle else (-3.0, -6.0))


@both_buckets
@pytest.mark.parametrize("middle", [False, True], ids=["between micro-batches", "between two backwards of one"])
def test_a_parameter_less(middle, bucket):
    """Its sum is gone with a warning; from then on its gradients are its own, as torch leaves them."""
    (p, q), w = sgd_pair(bucket_mb=bucket)
    (p.sum() * 2 + q.sum() * 3).backward()
    if not middle:
        w.step()
    assert w.param_groups[0]["params"].pop() is q
    with pytest.warns(UserWarning, match=GONE):
        (p.sum() * 4 + q.sum() * 5).backward()
    assert (p.grad, q.grad[0].item()) == (None, 5.0)
    assert not q._post_accumulate_grad_hooks
    w.step()
    w.flush()
    assert (p[0].item(), q[0].item()) == (2.0 - (6.0 if middle else 3.0), 3.0)


def test_the_last_one_leaves_and_a_count_comes():
    """A backward over nothing of ours has begun no micro-batch."""
    (_, q), w = sgd_pair()
    w.param_groups[0]["params"].pop()
    q.sum().backward()
    assert not w.flush()
    w.step(mean_of=2)
    assert w.pending == 1
    assert q.grad[0] == 1.0


CHANGES = {
    "moved": lambda p: setattr(p, "data", p.data.clone()),
    "bfloat16": lambda p: setattr(p, "data", p.data.bfloat16()),
    "transposed": lambda p: setattr(p, "data", p.data.t().contiguous().t()),
    "a view": lambda p: setattr(p, "data", torch.zeros(7)[1:].view(2, 3).copy_(p.data)),
}


@both_buckets
@both_updates
@pytest.mark.parametrize("middle", [False, True], ids=["between micro-batches", "between two backwards of one"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_parameters_that_change(change, middle, update, bucket):
    """The sum so far finds its parameter, element by element."""
    p, q = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(3))
    g = torch.arange(6.0).view(2, 3)
    w = wrap(SGD([p, q], lr=1.0), 2, fold="backward", bucket_mb=bucket, update=update)
    for k in range(4):
        (p * g.to(p.dtype) * 2).float().sum().backward()
        if k == 1 and not middle:
            change(p)
        if middle:
            if k == 1:
                change(p)
            (p * g.to(p.dtype) * 4).float().sum().backward()
        q.sum().backward()
        assert (p.grad, q.grad) == (None, None)
        w.step()
    assert torch.equal(p.detach().float(), -g * (12 if middle else 4))
    assert q.tolist() == [-2.0] * 3


@both_buckets
@pytest.mark.parametrize("shape", [(3, 2), (5,), (0,)], ids=str)
@pytest.mark.parametrize("middle", [False, True], ids=["between micro-batches", "between two backwards of one"])
def test_another_shape(middle, shape, bucket):
    """What was summed for the old one is gone, with a warning, and the new one begins with nothing."""
    p, q = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(3))
    w = wrap(SGD([p, q], lr=1.0), 2, fold="backward", bucket_mb=bucket)
    (p.sum() * 2 + q.sum()).backward()
    if not middle:
        w.step()
    p.data = torch.zeros(shape)
    with pytest.warns(UserWarning, match=GONE):
        (p.sum() * 4 + q.sum()).backward()
    assert (p.grad, q.grad) == (None, None)
    w.step()
    w.flush()
    assert torch.equal(p.detach(), torch.full(shape, -4.0 if middle else -2.0))
    assert q.tolist() == [-2.0 if middle else -1.0] * 3


def test_a_model_that_changes_its_dtype_in_a_window():
    model = torch.nn.Linear(3, 1, bias=False)
    model.weight.data.zero_()
    w = wrap(SGD(model.parameters(), lr=1.0), 4, fold="backward", bucket_mb=BYTE)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32):
        model.to(dtype)
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        assert model.weight.grad is None
        w.step()
    assert model.weight.tolist() == [[-1.0] * 3]


@pytest.mark.parametrize("lazy", ["one", "all"])
def test_lazy_modules(lazy):
    """Their parameters get shapes in the first forward; from the second backward on, at the latest, hooks are there."""
    results = []
    for fold in ("step", "backward"):
        torch.manual_seed(0)
        first = torch.nn.LazyLinear(4) if lazy == "all" else torch.nn.Linear(3, 4)
        model = torch.nn.Sequential(first, torch.nn.LazyLinear(2))
        w = wrap(SGD(model.parameters(), lr=0.1), 2, fold=fold)
        for k in range(4):
            torch.manual_seed(k)
            model(torch.randn(5, 3)).square().mean().backward()
            assert fold == "step" or k == 0 or all(p.grad is None for p in model.parameters())
            w.step()
        results.append([bits(p) for p in model.parameters()])
    assert results[0] == results[1]


@pytest.mark.parametrize("begun", [False, True])
def test_swapped_parameters(begun):
    """torch.utils.swap_tensors, as `module.to()` uses it on demand, takes hooks away with what it swaps."""
    model = torch.nn.Linear(3, 1, bias=False)
    model.weight.data.zero_()
    w = wrap(SGD(model.parameters(), lr=1.0), 2, fold="backward", bucket_mb=BYTE)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for k in range(4):
            if k % 2 == begun:
                model.to([torch.bfloat16, torch.float32][k // 2])
            dtype = model.weight.dtype
            (model(torch.ones(1, 3, dtype=dtype)).sum() * (k + 1)).backward()
            # A hook that has gone is put back as soon as anything looks at the parameters.
            assert (model.weight.grad is None) or k % 2 == begun
            w.step()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model.weight.tolist() == [[-1.5 - 3.5] * 3]


@both_buckets
def test_two_buffers_and_a_refusal(monkeypatch, bucket):
    """What one "device" refuses does not reach the other by halves."""
    use_two_buffers(monkeypatch)
    params, w = sgd_pair(values=(1.0, 2.0, 3.0), bucket_mb=bucket)
    for _ in range(2):
        (params[0] * params[1] * params[2]).sum().backward()
        w.step()
    assert len(w._window.buffers) == 2
    assert [p[0].item() for p in params] == [1.0 - 6.0, 2.0 - 3.0, 3.0 - 2.0]


def test_one_parameter_listed_twice():
    p = torch.nn.Parameter(torch.zeros(2))
    with pytest.warns(UserWarning, match="duplicate"):
        inner = SGD([p, p], lr=1.0)
    w = wrap(inner, 2, fold="backward")
    for g in (1.0, 3.0):
        (p * g).sum().backward()
        w.step()
    assert p.tolist() == [-4.0] * 2  # twice the mean, as torch updates twice


def test_float64_is_refused_by_name():
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(TypeError, match="float64"):
        wrap(SGD([p], lr=1.0), 2, fold="backward")
    assert not p._post_accumulate_grad_hooks


def test_a_conversion_to_float64_is_refused_in_the_backward():
    toy = Toy(2, fold="backward")
    toy.micro(1)
    toy.p.data = toy.p.data.double()
    with pytest.raises(TypeError, match="float64"):
        toy.backward(1)
    assert toy.w.pending == 1
    toy.p.data = toy.p.data.float()
    toy.p.grad = None
    toy.micro(3)
    assert toy.value == -2.0
    assert held(toy.w, [toy.p]) == [0.0]


@pytest.mark.parametrize("options", [{}, {"fold": "backward"}, {"fold": "backward", "bucket_mb": BYTE}])
def test_a_count_of_0_on_the_device_and_new_buffers(options):
    """Where a parameter changes its order in memory, the gradients of that micro-batch are left out as ever."""
    p, q, r = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(3))
    w = wrap(torch.optim.AdamW([p, q, r], lr=0.1, weight_decay=0.5), 2, **options)
    for k, count in enumerate((2.0, 2.0, torch.tensor(0.0), torch.tensor(3.0))):
        if k == 2:
            before = p.detach().clone()
            r.data = torch.ones(3, 2).t()
        w.micro_batch(mean_of=count)
        (q if k == 3 else p).sum().backward()
        w.step()
    assert w.updates == 2
    assert torch.equal(p, before)


@both_buckets
def test_a_hook_that_takes_its_parameter_out(bucket):
    """It runs behind ours, and the gradient stays with the parameter."""
    (p, q, r), w = sgd_pair(values=(0.0, 0.0, 0.0), bucket_mb=bucket)

    def take_out(q):
        w.param_groups[0]["params"] = [p, r]
        r.data = torch.zeros(3)
        w.master_grad(r)  # which sees that

    for k in range(4):
        (p * 2).sum().backward()
        if k == 1:
            q.register_post_accumulate_grad_hook(take_out)
            (p.sum() + q.sum() * 3).backward()
            assert q.grad.tolist() == [3.0] * len(q)
        w.step()
    assert (p[0].item(), w.updates) == (-4.5, 2)
