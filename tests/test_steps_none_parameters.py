"""steps=None and parameters that are not plain, or do not stay what they are: as with the bare optimizer."""

from __future__ import annotations

import gc

import pytest
import torch
from live_runs import Run, assert_same, coefficients, ours_are_views, run
from torch.nn import Parameter
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    LOW_PRECISION,
    both_updates,
    let_go,
    recorded,
    tidy,  # noqa: F401
    update_in_use,
    use_two_buffers,
    wrap,
)

pytestmark = LOW_PRECISION

CHANGES = {}


def change(function):
    """A script that changes parameters between backwards."""
    CHANGES[function.__name__] = function
    return function


@change
def frozen_in_mid_window(run):
    """What is in p.grad is used, frozen or not."""
    run.backward(0)
    run.params[1].requires_grad_(False)
    run.backward(1, only=[0, 2, 3])
    run.window(only=[0])
    run.window(2, only=[0, 2, 3])


@change
def frozen_and_thawed(run):
    run.params[1].requires_grad_(False)
    run.window(0, only=[0, 2, 3])
    run.params[1].requires_grad_(True)
    run.window(1, 2)
    run.window(3, 4)


@change
def frozen_with_a_gradient_set_by_hand(run):
    run.params[1].requires_grad_(False)
    run.params[1].grad = torch.ones_like(run.params[1])
    run.window(0, only=[0])
    run.window(1, only=[0])


def another(run, k=5):
    p = Parameter(coefficients(k, 78, (7,)).to(run.params[0].dtype))
    run.params.append(p)
    return p


@change
def added_in_mid_window(run):
    run.backward(0)
    run.opt.add_param_group({"params": [another(run)], "lr": 0.5})
    run.backward(1)
    run.window(2)
    run.window(3)


@change
def added_to_the_wrapped_optimizer(run):
    run.backward(0)
    run.inner.add_param_group({"params": [another(run)]})
    run.backward(1)
    run.window(2)
    run.window(3, 4)


@change
def added_with_a_gradient(run):
    p = another(run)
    run.backward(0)
    run.opt.add_param_group({"params": [p]})
    run.window(1)


@change
def taken_out_in_mid_window(run):
    """The gradient stays with it."""
    run.backward(0)
    p = run.opt.param_groups[0]["params"].pop(1)
    run.backward(1)
    run.window(2)
    run.window(3)
    run.opt.param_groups[0]["params"].insert(1, p)
    run.window(4)
    run.window(5)


@change
def replaced_in_mid_window(run):
    run.backward(0)
    new = Parameter(run.params[1].detach() + 1)
    run.opt.param_groups[0]["params"][1] = run.params[1] = new
    run.backward(1)
    run.window(2)


@change
def put_elsewhere(run):
    run.backward(0)
    for p in run.params:
        p.data = p.data.clone()
    run.backward(1)
    run.params[1].data = run.params[1].data.t().contiguous().t()  # another order in memory
    run.backward(2)
    run.window()
    run.window(3)


@change
def regrouped(run):
    run.backward(0)
    p = run.opt.param_groups[0]["params"].pop(0)
    run.opt.add_param_group({"params": [p], "lr": 0.5})
    run.backward(1)
    run.window()
    run.window(2)


@change
def with_swapped_tensors(run):
    run.window(0)
    other = Parameter(run.params[1].detach() * 2)
    torch.utils.swap_tensors(run.params[1], other)
    run.backward(1)
    run.window(2)
    run.window(3, 4)


every_change = pytest.mark.parametrize("script", CHANGES.values(), ids=CHANGES)


@every_change
@pytest.mark.parametrize("two", [False, True], ids=["one buffer", "two buffers"])
def test_changes_as_with_the_bare_optimizer(script, two, monkeypatch):
    if two:
        use_two_buffers(monkeypatch)
    with recorded() as warned:
        ours = run(script, update="wrapped")
    assert_same(ours, run(script, bare=True))
    assert not warned, [str(w.message) for w in warned]


@every_change
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_changes_with_the_fused_update(script, dtype):
    """What p.grad shows is right to FP32. A parameter without our hooks has its sum made by autograd."""
    ours, truth = run(script, dtype, update="fused"), run(script, torch.float64, bare=True)
    autograd_adds = script.__name__.startswith(("frozen", "added_with", "taken_out", "with_swapped"))
    rtol = 2.0**-7 if autograd_adds else 2.0**-19
    for seen, exact in zip(ours.log, truth.log, strict=True):
        assert torch.allclose(seen, exact, rtol=rtol, atol=0)


def test_a_parameter_that_leaves_does_not_hold_the_buffer():
    done = Run()
    done.backward(0)
    p = done.opt.param_groups[0]["params"].pop(0)
    values = p.grad.clone()
    done.opt.step()
    assert torch.equal(p.grad, values)
    assert p.grad.untyped_storage().nbytes() == p.grad.nbytes
    assert not p._post_accumulate_grad_hooks
    assert not p._backward_hooks


# Conversions of a model


def two_layers(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)).to(dtype)


@pytest.mark.parametrize("swap", [False, True], ids=["data", "swap_tensors"])
@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.float32),
    ],
    ids=str,
)
@both_updates
def test_a_model_that_is_converted_keeps_its_sums(was, becomes, update, swap):
    """torch converts p.grad too, behind our back: what it holds then is what counts."""
    model = two_layers(was)
    params = list(model.parameters())
    w = wrap(SGD(params, lr=1.0), None, update=update)
    x = torch.ones(1, 4)
    model(x.to(was)).sum().backward()
    before = [p.grad.clone() for p in params]
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model.to(becomes)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    model(x.to(becomes)).sum().backward()
    alone = two_layers(was).to(becomes)
    alone(x.to(becomes)).sum().backward()
    start = [p.detach().clone() for p in params]
    tolerance = 4 * max(torch.finfo(was).eps, torch.finfo(becomes).eps)
    sums = [g + q.grad.float() for g, q in zip(before, alone.parameters(), strict=True)]
    for p, total in zip(params, sums, strict=True):
        assert torch.allclose(p.grad.float(), total, rtol=tolerance)
    w.step()
    for p, s, total in zip(params, start, sums, strict=True):
        assert p.dtype == becomes
        assert torch.allclose(p.float(), s.float() - total, rtol=tolerance, atol=tolerance)
        assert p.grad.dtype == torch.float32
    w.zero_grad()
    for _ in range(2):  # the hooks are there again
        model(x.to(becomes)).sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in params)
    w.step()
    assert w.updates == 2


# Parameters that are not plain


def special_params(dtype=torch.float32):
    base = coefficients(0, 0, (40,)).to(dtype)
    params = [
        Parameter(coefficients(0, 1, (2, 3, 4, 5)).to(dtype).contiguous(memory_format=torch.channels_last)),
        Parameter(coefficients(0, 2, (5, 4)).to(dtype).t()),
        Parameter(torch.empty(0, 3, dtype=dtype)),
        Parameter(base[1:8]),  # not aligned
        Parameter(coefficients(0, 3, ()).to(dtype)),
    ]
    if dtype == torch.float32:
        params.append(Parameter(torch.complex(coefficients(0, 4, (6,)).float(), coefficients(0, 5, (6,)).float())))
    return params


@pytest.mark.parametrize("make", [lambda ps: SGD(ps, lr=0.1, momentum=0.9), lambda ps: AdamW(ps, lr=0.1)])
def test_special_parameters_are_as_without_us(make):
    def script(params, optimizer):
        for k in range(6):
            sum((p * coefficients(k, i, p.shape).to(p)).sum().abs() for i, p in enumerate(params)).backward()
            if k % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=k == 3)
        return [p.grad if p.grad is None else p.grad.clone() for p in params]

    ours, native = special_params(), special_params()
    w = wrap(make(ours), None)
    assert update_in_use(w) == "wrapped"  # complex
    for g, want in zip(script(ours, w), script(native, make(native)), strict=True):
        assert torch.equal(g, want)
        assert g.stride() == want.stride()
    for p, q in zip(ours, native, strict=True):
        assert torch.equal(p, q)
        assert p.stride() == q.stride()


def test_special_low_precision_parameters():
    params = special_params(torch.bfloat16)
    w = wrap(SGD(params, lr=0.0), None)
    for k in (0, 1, 3):
        sum((p * coefficients(k, i, p.shape)).sum() for i, p in enumerate(params)).backward()
    for i, p in enumerate(params):
        assert torch.equal(p.grad, sum(coefficients(k, i, p.shape).float() for k in (0, 1, 3)))
        assert p.grad.stride() == p.stride() or not p.numel()
    w.step()
    assert w.updates == 1


@both_updates
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_113_sparse_gradients_are_added_to_dense_sums(dtype, update):
    """Equal to the dense ones, with SGD; the entries of one index are added up in FP32."""
    index = torch.tensor([0, 2, 2, 5, 2])
    finals = []
    for sparse in (True, False):
        torch.manual_seed(0)
        table = torch.nn.Embedding(8, 3, sparse=sparse, dtype=dtype)
        w = wrap(SGD(table.parameters(), lr=0.5), None, update=update)
        for k in range(4):
            (table(index) * (k + 1)).sum().backward()
            assert table.weight.grad.layout == torch.strided
            if k % 2:
                seen = table.weight.grad.clone()
                w.step()
                w.zero_grad()
        finals.append((table.weight.detach().clone(), seen))
    assert torch.equal(finals[0][0], finals[1][0])
    assert torch.equal(finals[0][1], finals[1][1])


def test_a_sparse_gradient_that_was_set_by_hand():
    p = Parameter(torch.zeros(4, 2))
    w = wrap(SGD([p], lr=1.0), None)
    p.grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (4, 2), check_invariants=False)
    w.step()
    assert p.detach()[:, 0].tolist() == [0, -2, 0, 0]
    p.sum().backward()  # on top of it, as it was not zeroed
    w.step()
    assert p.detach()[:, 0].tolist() == [-1, -5, -1, -1]


def test_a_lazy_module():
    def script(module, optimizer):
        for k in range(3):
            module(torch.full((2, 5), 1.0 + k)).sum().backward()
            module(torch.full((2, 5), 2.0 + k)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    results = []
    for bare in (False, True):
        torch.manual_seed(0)
        module = torch.nn.LazyLinear(3)
        inner = SGD(module.parameters(), lr=0.1)
        script(module, inner if bare else wrap(inner, None, update="wrapped"))
        results.append([p.detach().clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_119_two_parameters_over_one_storage():
    """torch updates one after the other."""
    results = []
    for bare in (False, True):
        base = torch.ones(4)
        params = [Parameter(base[:3]), Parameter(base[1:])]
        inner = SGD(params, lr=0.5)
        opt = inner if bare else wrap(inner, None)
        for k in (1, 2):
            (params[0] * k).sum().backward()
            (params[1] * 3 * k).sum().backward()
            opt.step()
        results.append(base)
    assert torch.equal(*results)


@both_updates
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_parameter_of_two_wrappers(dtype, update):
    """Each steps with what p.grad holds, as two optimizers do; a backward is added once."""
    results = []
    for bare in (False, True):
        p, q = (Parameter(torch.zeros(3, dtype=torch.float32 if bare else dtype)) for _ in range(2))
        inners = [SGD([p, q], lr=0.5), SGD([p], lr=0.25)]
        one, two = inners if bare else [wrap(inner, None, update=update) for inner in inners]
        for k in (1, 2, 3, 4, 5):
            ((p + q) * k).sum().backward()
            (p * 2).sum().backward()
            if k != 3:
                one.step()
            two.step()
            if k % 2 == 0:
                one.zero_grad()
        results.append(([*p.tolist(), *q.tolist()], p.grad.tolist()))
    assert results[0] == results[1]


def test_a_wrapper_that_is_gone_leaves_no_hooks():
    params = [Parameter(torch.zeros(3)) for _ in range(2)]
    for _ in range(3):
        w = wrap(SGD(params, lr=1.0), None)
        params[0].sum().backward()
        w.step()
        let_go(w)
        del w
        gc.collect()
        assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in params)
    assert torch.equal(params[0].grad, torch.full((3,), 3.0))
    params[0].sum().backward()  # autograd goes on with it
    assert torch.equal(params[0].grad, torch.full((3,), 4.0))
    assert ours_are_views(run(lambda done: done.backward(0)))
