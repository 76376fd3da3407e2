"""Inputs and their right values, numbered: precision, parameters and hooks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint
from wrapper_helpers import (
    LOW_PRECISION,
    Toy,
    bits,
    params_of,
    set_grads,
    tidy,  # noqa: F401
    wrap,
)

PRECISION = {
    "48": (torch.bfloat16, [1.0] + [2.0**-9] * 7, 0.126708984375),
    "49": (torch.bfloat16, [256.0] + [1.0] * 7, 32.875),
    "50": (torch.float16, [2.0**-24] * 8, 2.0**-24),
    "52": (torch.float16, [40000.0] * 2 + [0.0] * 6, 10000.0),
}


@LOW_PRECISION
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(("dtype", "gradients", "mean"), PRECISION.values(), ids=PRECISION)
def test_mean_in_fp32(dtype, gradients, mean, backend):
    toy = Toy(8, dtype=dtype, backend=backend)
    seen = []
    toy.w.register_step_pre_hook(lambda *_: seen.append(toy.w.master_grad(toy.p).clone()))
    toy.run(gradients)
    assert [s.dtype for s in seen] == [torch.float32]
    assert seen[0].item() == mean


def test_66_will_update():
    toy = Toy(3)
    seen = []
    for _ in range(6):
        seen.append(toy.w.will_update)
        toy.micro(1)
    assert seen == [False, False, True] * 2


def test_68_zero_grad_of_the_model_between_windows():
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    w = wrap(SGD(model.parameters(), lr=1.0), steps=2)
    for g in (1, 3, 5, 7):
        model(torch.tensor([float(g)])).sum().backward()
        w.step()
        model.zero_grad()
    assert model.weight.item() == -8.0


@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_72_untouched_in_the_second_window(update):
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    w = wrap(AdamW([p, q], lr=0.1, weight_decay=0.5), steps=2, update=update)
    for grads in ([torch.ones(3), torch.ones(3)], [torch.ones(3), None]):
        set_grads([p, q], grads)
        w.step()
    kept = bits(q), {k: bits(v) for k, v in w.state[q].items()}
    moved = bits(p)
    for _ in range(2):
        set_grads([p, q], [torch.ones(3), None])
        w.step()
    assert (bits(q), {k: bits(v) for k, v in w.state[q].items()}) == kept
    assert bits(p) != moved
    assert (w.state[p]["step"].item(), w.state[q]["step"].item()) == (2, 1)
    assert not w.master_grad(q).any()


def test_73_a_frozen_parameter():
    p, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    w = wrap(AdamW([p, frozen], lr=0.1, weight_decay=0.5), steps=2)
    for _ in range(4):
        (p * frozen).sum().backward()
        w.step()
    assert torch.equal(frozen, torch.ones(2))
    assert not w.state.get(frozen)
    assert (p < 1).all()


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_74_a_backward_that_leaves_no_gradient():
    toy = Toy(2)
    (NoGradient.apply(toy.p) * 1.0).sum().backward()
    toy.w.step()
    assert toy.w.pending == 1
    toy.micro(4)
    assert toy.value == -2.0


def run_checkpointed(layout, used):
    """The mean gradient of one window of 2 micro-batches through segments that share a weight."""
    torch.manual_seed(3)
    a, b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    b.weight = a.weight
    params = [a.weight, a.bias, b.bias]
    w = wrap(SGD(params, lr=1.0), steps=2)
    before = [p.detach().clone() for p in params]

    def segment(f, x):
        return checkpoint(f, x, use_reentrant=True) if used else f(x)

    for seed in (0, 1):
        torch.manual_seed(seed)
        for _ in range(2 if layout == "two backwards" else 1):
            x = torch.randn(3, 4, requires_grad=True)
            if layout == "one segment":
                y = segment(lambda x: a(torch.tanh(a(x))), x)
            else:
                y = segment(b if layout == "tied" else a, segment(a, x))
            y.square().mean().backward()
        w.step()
        w.zero_grad()
    assert w.updates == 1
    return [p.detach() - q for p, q in zip(params, before, strict=True)]


@pytest.mark.parametrize("layout", ["two segments", "one segment", "tied", "two backwards"])
def test_75_reentrant_checkpointing(layout):
    for mine, plain in zip(run_checkpointed(layout, True), run_checkpointed(layout, False), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_78_compiled_model(wrapped_first):
    def run(compiled):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        x = torch.randn(4, 3)
        if not wrapped_first:
            forward(x)
        w = wrap(SGD(model.parameters(), lr=0.1), steps=2)
        for k in range(4):
            forward(x + k).square().mean().backward()
            w.step()
            w.zero_grad()
        return params_of(w)

    for mine, eager in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-6, atol=1e-7)


def test_83_the_buffer_stays_where_it_is():
    p, q = torch.nn.Parameter(torch.zeros(70)), torch.nn.Parameter(torch.zeros(3))
    w = wrap(SGD([p, q], lr=1e-3), steps=2)
    seen = set()

    def micro():
        set_grads([p, q], [torch.ones(70), torch.ones(3)])
        w.step()
        if w.pending:
            seen.add((w.master_grad(p).data_ptr(), w.master_grad(q).data_ptr()))

    for _ in range(200):
        micro()
    micro()
    saved = copy.deepcopy(w.state_dict())
    w.flush()
    micro()
    w.reset()
    micro()
    w.load_state_dict(saved)
    assert w.pending == 1
    micro()
    micro()
    assert w.updates == 101
    assert len(seen) == 1


def test_102_two_wrappers():
    first, second = Toy(2), Toy(3)
    for g in range(6):
        first.backward(g)
        second.backward(g)
        first.w.step()
        second.w.step()
    assert (first.w.updates, second.w.updates) == (3, 2)
    assert (first.value, second.value) == (-7.5, -5.0)


@pytest.mark.parametrize("make", [SGD, AdamW], ids=["105", "122"])
def test_465_groups_cost_one_call(make, monkeypatch):
    """A fold and a step are one call of the backend each, whatever the number of groups and learning rates."""
    from fusedaccum.backends import reference

    calls = []
    for name in ("fold", "sgd", "adam"):
        real = getattr(reference, name)
        monkeypatch.setattr(
            reference, name, lambda *args, _name=name, _real=real: (calls.append(_name), _real(*args))[1]
        )
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(465)]
    w = wrap(make([{"params": [p], "lr": 0.001 * (k + 1)} for k, p in enumerate(params)]), 2, backend="reference")
    for _ in range(2):
        set_grads(params, [torch.ones(1)] * 465)
        w.step()
    assert calls == ["fold", "fold", "sgd" if make is SGD else "adam"]
    for k, p in enumerate(params):
        assert p.item() == pytest.approx(-0.001 * (k + 1), rel=1e-5)


@pytest.mark.parametrize("update", ["fused", "wrapped"])
def test_112_an_unused_parameter_is_not_decayed(update):
    p, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.full((2,), 0.1))
    before = bits(unused)
    w = wrap(AdamW([p, unused], lr=0.1, weight_decay=0.5), steps=2, update=update)
    for _ in range(6):
        set_grads([p], [torch.ones(2)])
        w.step()
    assert bits(unused) == before
    assert not w.state.get(unused)


def test_114_a_backward_that_raises_half_way():
    p, q = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    w = wrap(SGD([p, q], lr=1.0), steps=2)

    def refuse(grad):
        raise RuntimeError("out of luck")

    (p + q).sum().backward()
    w.step()
    handle = q.register_hook(refuse)
    with pytest.raises(RuntimeError, match="out of luck"):
        (p * 100 + q * 100).sum().backward()
    handle.remove()
    w.zero_grad()
    (p * 3 + q * 3).sum().backward()
    w.step()
    assert (p.item(), q.item()) == (-2.0, -2.0)


@pytest.mark.parametrize("last_backwards", [1, 2])
def test_121_the_norm_holds_every_touched_parameter(last_backwards):
    p, q = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    w = wrap(SGD([p, q], lr=1.0), steps=4, max_norm=2.5)
    for k, (gp, gq) in enumerate([(4, 16), (4, 0), (4, 0), (0, 0)]):
        if k == 3:
            for _ in range(last_backwards):
                (p * 0).sum().backward()
        else:
            (p * gp + q * gq if gq else p * gp).sum().backward()
        w.step()
    assert float(w.grad_norm) == pytest.approx(5.0, rel=1e-6)
    assert (p.item(), q.item()) == pytest.approx((-1.5, -2.0), rel=2e-6)
