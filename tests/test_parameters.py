"""Every kind of parameter and gradient, and everything that may change about them while training goes on."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from wrapper_helpers import (
    DTYPES,
    LOW_PRECISION,
    adam_or_sgd_states,
    assert_within_budget,
    bits,
    both_updates,
    every_maker,
    make_windows,
    params_of,
    set_grads,
    tidy,  # noqa: F401
    train_stock,
    train_wrapped,
    uniform,
    update_in_use,
    wrap,
)

pytestmark = LOW_PRECISION


def plain(shape):
    return torch.nn.Parameter(uniform(*shape))


def sliced():
    return torch.nn.Parameter(uniform(8, 9)[::2, 1::3])


def unaligned():
    return torch.nn.Parameter(uniform(50)[1:48])


def transposed():
    return torch.nn.Parameter(uniform(5, 7).t())


def channels_last():
    return torch.nn.Parameter(uniform(2, 3, 4, 5).to(memory_format=torch.channels_last))


def permuted_slice():
    return torch.nn.Parameter(uniform(4, 6).permute(1, 0)[1:5])


KINDS = {
    "scalar": lambda: plain(()),
    "one element": lambda: plain((1,)),
    "zero-size": lambda: plain((0, 3)),
    "sliced": sliced,
    "unaligned": unaligned,
    "transposed": transposed,
    "channels-last": channels_last,
    "permuted slice": permuted_slice,
    "over a tile": lambda: plain((4097,)),
}


def twins(kind):
    """Three parameters of a kind with the same values: ours, one for stock torch, one in float64 for the truth."""
    ours, stock = KINDS[kind](), KINDS[kind]()
    return ours, stock, torch.nn.Parameter(stock.detach().double())


@every_maker
@both_updates
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_parameters(kind, update, make):
    ours, stock, truth = twins(kind)
    strides, address = ours.stride(), ours.data_ptr()
    windows = make_windows([ours.shape, (5,)], 4, 2, torch.float32)
    optimizers = [make([p, plain((5,)).to(p.dtype).detach().requires_grad_()]) for p in (ours, stock, truth)]
    train_wrapped(wrap(optimizers[0], 2, update=update), windows)
    for optimizer in optimizers[1:]:
        train_stock(optimizer, windows)
    assert (ours.stride(), ours.data_ptr()) == (strides, address)
    for mine, theirs, exact in zip(*map(params_of, optimizers), strict=True):
        if mine.numel():
            assert_within_budget(mine, theirs, exact)
    entries = [adam_or_sgd_states(o) for o in optimizers]
    assert [(k, name, t.shape, t.dtype) for k, name, t in entries[0]] == [
        (k, name, t.shape, t.dtype) for k, name, t in entries[1]
    ]
    for (_, _, mine), (_, _, theirs), (_, _, exact) in zip(*entries, strict=True):
        if mine.numel():
            assert_within_budget(mine, theirs, exact)


def test_a_slice_leaves_its_neighbours_alone():
    base = torch.full((6, 6), 7.0)
    p = torch.nn.Parameter(base[:, 1:4])
    w = wrap(SGD([p], lr=1.0), steps=2)
    for _ in range(2):
        set_grads([p], [torch.ones(6, 3)])
        w.step()
    expected = torch.full((6, 6), 7.0)
    expected[:, 1:4] = 6.0
    assert torch.equal(base, expected)


def layouts_of(g):
    """The same matrix in every layout in which a gradient can arrive."""
    every_second = torch.full((g.shape[0], 2 * g.shape[1]), float("nan"))
    every_second[:, ::2] = g
    shifted = torch.full((g.numel() + 1,), float("nan"))
    shifted[1:] = g.reshape(-1)
    return {
        "contiguous": g.clone(),
        "transposed": g.t().contiguous().t(),
        "strided": every_second[:, ::2],
        "unaligned": shifted[1:].view(g.shape),
    }


@every_maker
@both_updates
@pytest.mark.parametrize("shape", [(4, 6), (5, 5)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "unaligned"])
def test_layouts_of_gradients(layout, shape, update, make):
    g = uniform(*shape, seed=1)
    runs = []
    for chosen in ("contiguous", layout):
        p = plain(shape)
        w = wrap(make([p]), steps=2, update=update)
        for _ in range(4):
            p.grad = layouts_of(g)[chosen]
            w.step()
        runs.append(bits(p))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("view", ["expanded", "row", "column"])
def test_expanded_gradients(view):
    p = torch.nn.Parameter(torch.zeros(4, 6))
    g = {"expanded": torch.ones(1, 1), "row": uniform(1, 6), "column": uniform(4, 1)}[view].expand(4, 6)
    w = wrap(SGD([p], lr=1.0), steps=2)
    for _ in range(2):
        p.grad = g
        w.step()
    assert torch.equal(p.detach(), -g)


def test_gradients_in_another_memory_format_than_the_parameter():
    g = uniform(2, 3, 4, 5, seed=1)
    for p_format in (torch.contiguous_format, torch.channels_last):
        for g_format in (torch.contiguous_format, torch.channels_last):
            p = torch.nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=p_format))
            w = wrap(SGD([p], lr=1.0), steps=2)
            p.grad = g.to(memory_format=g_format)
            w.step()
            assert torch.equal(w.master_grad(p), g / 2)
            p.grad = g.to(memory_format=g_format)
            w.step()
            assert torch.equal(p.detach(), -g)


def test_an_fp32_gradient_on_a_bf16_parameter():
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    p.grad_dtype = None
    w = wrap(SGD([p], lr=1.0), steps=2)
    p.grad = torch.full((3,), 1 + 2.0**-20)
    w.step()
    assert torch.equal(w.master_grad(p), torch.full((3,), (1 + 2.0**-20) / 2))
    p.grad = torch.full((3,), 3.0)
    w.step()
    assert p.tolist() == [-2.0] * 3


def test_gradients_through_real_views_and_ops():
    """Autograd's own odd gradients: an expanded one from sum(), a transposed one, a slice's."""
    p = torch.nn.Parameter(torch.zeros(3, 4))
    w = wrap(SGD([p], lr=1.0), steps=4)
    for loss in (p.sum(), (p.t() * torch.arange(12.0).view(4, 3)).sum(), p[1:, 2:].sum() * 8, p.expand(2, 3, 4).sum()):
        loss.backward()
        w.step()
    expected = 3 + torch.arange(12.0).view(4, 3).t()
    expected[1:, 2:] += 8
    assert torch.equal(p.detach(), -expected / 4)


@pytest.mark.parametrize("make", [AdamW, Adam, SGD])
def test_complex64(make):
    ours, stock = (torch.nn.Parameter(torch.complex(uniform(3, 5), uniform(3, 5, seed=1))) for _ in range(2))
    g = torch.complex(uniform(3, 5, seed=2), uniform(3, 5, seed=3))
    w = wrap(make([ours], lr=0.1, weight_decay=0.1), steps=2, max_norm=1.0)
    bare = make([stock], lr=0.1, weight_decay=0.1)
    for k in range(6):
        ours.grad = g * (0.5 if k % 2 else 1.5)
        w.step()
        if k % 2:
            stock.grad = g.clone()
            norm = torch.nn.utils.clip_grad_norm_([stock], 1.0)
            bare.step()
            assert float(w.grad_norm) == pytest.approx(norm.item(), rel=1e-6)
    torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@every_maker
def test_mixed_dtypes_in_one_group(make, backend):
    shapes = [(33,), (70,), (5, 3)]
    windows = [
        [[g.to(d) for g, d in zip(micro, DTYPES, strict=True)] for micro in window]
        for window in make_windows(shapes, 8, 4, torch.float32)
    ]
    start = [uniform(*s).bfloat16() for s in shapes]
    kinds = (DTYPES, DTYPES, (torch.float64,) * 3)
    optimizers = [make([torch.nn.Parameter(t.to(d, copy=True)) for t, d in zip(start, k, strict=True)]) for k in kinds]
    w = wrap(optimizers[0], 4, update="fused", backend=backend)
    train_wrapped(w, windows)
    for optimizer in optimizers[1:]:
        train_stock(optimizer, windows)
    for mine, stock, truth in zip(*map(params_of, optimizers), strict=True):
        assert_within_budget(mine, stock, truth)


@both_updates
def test_tied_weights_are_folded_once(update):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    torch.nn.init.eye_(model[0].weight)
    w = wrap(SGD(model.parameters(), lr=1.0), steps=2, update=update)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        w.step()
    assert torch.equal(model[0].weight.detach(), torch.eye(2) - 2)


def over_one_storage():
    base = torch.ones(6)
    return [torch.nn.Parameter(base[:4]), torch.nn.Parameter(base[2:])]


def listed_twice():
    return [torch.nn.Parameter(torch.ones(4))] * 2


@pytest.mark.filterwarnings("ignore:.*duplicate parameters")
@pytest.mark.parametrize("params", [over_one_storage, listed_twice])
@every_maker
def test_119_overlapping_parameters_are_updated_in_sequence(make, params):
    ours, stock = params(), params()
    w, bare = wrap(make(ours), steps=2), make(stock)
    g = [uniform(4, seed=1), uniform(4, seed=1) if ours[0] is ours[1] else uniform(4, seed=2)]
    for k in range(6):
        set_grads(ours, g)
        w.step()
        if k % 2:
            set_grads(stock, g)
            bare.step()
    assert update_in_use(w) == "wrapped"
    for p, q in zip(ours, stock, strict=True):
        assert bits(p) == bits(q)


def test_neighbours_in_one_storage_do_not_overlap():
    base = torch.ones(8)
    p, q = torch.nn.Parameter(base[0::2]), torch.nn.Parameter(base[1::2])
    w = wrap(SGD([p, q], lr=1.0), steps=1)
    set_grads([p, q], [torch.full((4,), 2.0), torch.full((4,), 3.0)])
    w.step()
    assert torch.equal(base, torch.tensor([-1.0, -2.0] * 4))
