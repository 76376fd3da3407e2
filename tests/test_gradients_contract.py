"""What a caller sees of a window: `p.grad`, `master_grad`, norm, counts, versions, the warning for low precision."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from wrapper_helpers import (
    Toy,
    bits,
    recorded,
    set_grads,
    tidy,  # noqa: F401
    wrap,
)

UPDATES = ("fused", "wrapped")
both_updates = pytest.mark.parametrize("update", UPDATES)


@both_updates
def test_gradients_are_none_after_every_step(update):
    toy = Toy(2, update=update)
    for g in (1, 2, 3, 4):
        toy.backward(g)
        toy.w.step()
        assert toy.p.grad is None
    toy.backward(1)
    toy.w.step()
    toy.w.flush()
    assert toy.p.grad is None


@both_updates
def test_a_gradient_that_waits_for_its_step_is_not_in_a_flush(update):
    """Neither where the window holds a sum for its parameter, nor where it holds none; and it is not lost."""
    p, q = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    w = wrap(SGD([p, q], lr=1.0), 2, update=update)
    set_grads([p, q], [torch.ones(1), None])
    w.step()
    set_grads([p, q], [torch.full((1,), 8.0), torch.full((1,), 16.0)])
    assert w.flush()
    assert (p.item(), q.item(), p.grad.item(), q.grad.item()) == (-1.0, 0.0, 8.0, 16.0)
    w.step()
    w.flush()
    assert (p.item(), q.item()) == (-9.0, -16.0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_gradients_and_not_the_window(set_to_none):
    toy = Toy(2)
    toy.micro(1)
    toy.backward(50)
    toy.w.zero_grad(set_to_none=set_to_none)
    assert toy.p.grad is None or not toy.p.grad.any()
    assert toy.w.pending == 1
    toy.micro(3)
    assert toy.value == -2.0


def test_gradients_left_in_static_buffers_are_not_kept():
    toy = Toy(2, n=3)
    static = torch.full((3,), 2.0)
    toy.p.grad = static
    toy.w.step()
    static.fill_(99)
    toy.p.grad = static.fill_(4)
    toy.w.step()
    static.fill_(99)
    assert toy.value == [-3.0] * 3


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@both_updates
def test_master_grad_of_a_plain_window(update, reduction):
    toy = Toy(4, n=2, update=update, reduction=reduction)
    seen = []
    toy.w.register_step_pre_hook(lambda *_: seen.append(toy.w.master_grad(toy.p).tolist()))
    share = 0.25 if reduction == "mean" else 1.0
    total = torch.zeros(2)
    for k in range(1, 4):
        toy.micro((k, -k))
        total += torch.tensor([k, -k])
        assert torch.equal(toy.w.master_grad(toy.p), total * share)
        assert toy.w.master_grad(toy.p).dtype == torch.float32
    toy.micro((2, 4))
    assert seen == [[8 * share, -2 * share]]
    assert torch.equal(toy.w.master_grad(toy.p), torch.zeros(2))


def test_master_grad_of_a_flushed_window_is_its_mean():
    toy = Toy(4, max_norm=0.5)
    seen = []
    toy.w.register_step_pre_hook(lambda *_: seen.append(toy.w.master_grad(toy.p).item()))
    toy.run([1, 3]).w.flush()
    assert seen == [2.0]
    assert toy.value == pytest.approx(-0.5, rel=1e-5)


@pytest.mark.parametrize("count", [int, torch.tensor, lambda n: torch.tensor([n], dtype=torch.float64)])
@both_updates
def test_master_grad_of_a_weighted_window(update, count):
    toy = Toy(3, update=update)
    seen = []
    toy.w.register_step_pre_hook(lambda *_: seen.append(toy.w.master_grad(toy.p).item()))
    toy.micro(2, mean_of=count(3))
    toy.micro(5, sum_of=count(4))
    assert toy.w.master_grad(toy.p).item() == 11.0
    toy.micro(1, mean_of=count(1))
    assert (seen, toy.value, toy.w.updates) == ([1.5], -1.5, 1)


@pytest.mark.parametrize("end", ["boundary", "flush", "reset"])
@both_updates
def test_a_view_that_is_kept_reads_zero_after_the_window(update, end):
    toy = Toy(2, n=70, update=update)
    toy.micro(torch.full((70,), 3.0))
    view = toy.w.master_grad(toy.p)
    if end == "boundary":
        toy.micro(torch.full((70,), 5.0))
    else:
        getattr(toy.w, end)()
    assert torch.equal(view, torch.zeros(70))
    toy.micro(torch.full((70,), 8.0))
    assert torch.equal(view, toy.w.master_grad(toy.p))


def test_master_grad_of_a_stranger():
    with pytest.raises((KeyError, ValueError), match="parameter"):
        Toy().run([1]).w.master_grad(torch.nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize("max_norm", [None, 3.0])
@pytest.mark.parametrize("end", ["boundary", "flush"])
@both_updates
def test_a_pre_hook_may_edit_the_gradient(update, end, max_norm):
    toy = Toy(2 if end == "boundary" else 8, n=2, update=update, max_norm=max_norm)

    def edit(optimizer, args, kwargs):
        optimizer.master_grad(toy.p).mul_(3).add_(torch.tensor([3.0, 1.0]))

    toy.w.register_step_pre_hook(edit)
    toy.run([(0, 2), (0, 0)])
    if end == "flush":
        toy.w.flush()
    assert float(toy.w.grad_norm) == pytest.approx(5.0, rel=1e-6)
    factor = 1.0 if max_norm is None else 0.6
    assert toy.value == pytest.approx([-3.0 * factor, -4.0 * factor], rel=2e-6)


@pytest.mark.parametrize("end", ["boundary", "flush", "weighted", "weighted on the device"])
@pytest.mark.parametrize("looked", [False, True])
@both_updates
def test_a_pre_hook_that_raises_leaves_the_window_as_it_was(update, looked, end):
    toy = Toy(8 if end == "flush" else 2, update=update)
    weight = {"weighted": {"mean_of": 5}, "weighted on the device": {"mean_of": torch.tensor(5)}}.get(end, {})

    def refuse(optimizer, args, kwargs):
        if looked:
            assert optimizer.master_grad(toy.p).item() == 3.0
        raise LookupError("not now")

    handle = toy.w.register_step_pre_hook(refuse)
    toy.micro(2, **weight)
    toy.backward(4)
    if end == "flush":
        toy.w.step()
    with pytest.raises(LookupError, match="not now"):
        toy.w.flush() if end == "flush" else toy.w.step(**weight)
    assert (toy.value, toy.w.updates, toy.w.pending) == (0.0, 0, 2)
    assert toy.w.master_grad(toy.p).item() == {"boundary": 3.0, "flush": 0.75}.get(end, 30.0)
    handle.remove()
    assert toy.w.flush()
    assert (toy.value, toy.w.pending) == (-3.0, 0)


# Norm and counts


@both_updates
def test_grad_norm(update):
    toy = Toy(2, n=2, update=update, max_norm=1.0)
    assert toy.w.grad_norm is None
    toy.run([(6, 0)])
    assert toy.w.grad_norm is None
    toy.run([(0, 8)])
    assert float(toy.w.grad_norm) == pytest.approx(5.0, rel=1e-6)
    toy.run([(0, 2)])
    assert float(toy.w.grad_norm) == pytest.approx(5.0, rel=1e-6)
    toy.w.flush()
    assert float(toy.w.grad_norm) == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e25, 1e38])
def test_grad_norm_neither_underflows_nor_overflows(size):
    toy = Toy(2, n=9, max_norm=1.0).run([torch.full((9,), size)] * 2)
    assert float(toy.w.grad_norm) == pytest.approx(3 * size, rel=1e-5)


@both_updates
def test_clipping_is_that_of_torch(update):
    random = torch.Generator().manual_seed(0)
    grads = [torch.randn(s, generator=random) for s in ((40,), (5, 5), (1,))]
    ours, theirs = ([torch.nn.Parameter(torch.zeros(g.shape)) for g in grads] for _ in range(2))
    w = wrap(SGD([{"params": ours[:1]}, {"params": ours[1:]}], lr=1.0), steps=1, update=update, max_norm=0.7)
    set_grads(ours, grads)
    set_grads(theirs, grads)
    norm = torch.nn.utils.clip_grad_norm_(theirs, 0.7)
    SGD(theirs, lr=1.0).step()
    w.step()
    assert float(w.grad_norm) == pytest.approx(norm.item(), rel=1e-6)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=0)


@both_updates
def test_updated_and_updates(update):
    toy = Toy(2, update=update)
    seen = []
    assert (toy.w.updated, toy.w.updates) == (False, 0)
    for g in (1, 1, 1):
        toy.micro(g)
        seen.append((toy.w.updated, toy.w.updates))
    assert toy.w.flush() is True
    seen.append((toy.w.updated, toy.w.updates))
    assert toy.w.flush() is False
    seen.append((toy.w.updated, toy.w.updates))
    assert seen == [(False, 0), (True, 1), (False, 1), (True, 2), (False, 2)]


def test_updated_is_false_after_reset_and_loading():
    toy = Toy(2).run([1, 1])
    toy.w.reset()
    assert (toy.w.updated, toy.w.updates) == (False, 1)
    toy.run([1, 1])
    toy.w.load_state_dict(toy.w.state_dict())
    assert (toy.w.updated, toy.w.updates) == (False, 2)


@both_updates
def test_a_window_without_any_gradient_is_no_update(update):
    toy = Toy(2, make=AdamW, lr=0.1, start=1.0, update=update)
    for _ in range(2):
        toy.w.step()
    assert (toy.w.pending, toy.w.updates, toy.w.updated) == (0, 0, False)
    assert toy.value == 1.0
    assert not toy.w.state.get(toy.p)
    toy.run([1, 1])
    assert toy.w.updates == 1


def test_nothing_is_skipped_under_propagate():
    toy = Toy(2).run([1, float("nan"), 1, 1])
    assert (toy.w.skipped_windows, toy.w.skipped_micro_batches, toy.w.updates) == (0, 0, 2)
    assert toy.value != toy.value
    assert torch.tensor(float(toy.w.grad_norm)).isfinite()


@pytest.mark.parametrize("max_norm", [None, 1.0])
@both_updates
def test_a_nan_propagates_as_in_torch(update, max_norm):
    toy = Toy(2, n=3, update=update, max_norm=max_norm).run([(1, float("nan"), 2), (1, 1, 1)])
    assert not torch.tensor(float(toy.w.grad_norm)).isfinite()
    expected = [-1.0, -1.5] if max_norm is None else [float("nan")] * 2
    assert [toy.value[0], toy.value[2]] == pytest.approx(expected, nan_ok=True)
    assert toy.value[1] != toy.value[1]


def test_steps_set_inside_a_window_holds_from_the_next():
    toy = Toy(4)
    assert toy.w.steps == 4
    toy.micro(1)
    toy.w.steps = 2
    toy.run([1, 1])
    assert (toy.w.updates, toy.w.pending) == (0, 3)
    toy.micro(5)
    assert (toy.w.updates, toy.value, toy.w.steps) == (1, -2.0, 2)
    toy.run([1, 3])
    assert (toy.w.updates, toy.value) == (2, -4.0)


def test_steps_set_between_windows_holds_at_once():
    toy = Toy(4)
    toy.w.steps = 1
    assert toy.w.will_update
    toy.micro(3)
    assert (toy.w.updates, toy.value) == (1, -3.0)


# Version counters: autograd must notice that a saved parameter was written


@pytest.mark.parametrize("update", ["stock", "fused", "wrapped"])
@pytest.mark.parametrize("make", [AdamW, Adam, SGD])
def test_an_update_is_seen_by_autograd(make, update):
    p, idle = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = make([p, idle], lr=0.1)
    if update != "stock":
        optimizer = wrap(optimizer, steps=2, update=update)
    waiting, unharmed = (p * p).sum(), (idle * idle).sum()
    if update != "stock":
        set_grads([p], [torch.ones(3)])
        optimizer.step()
        (p * p).sum().backward()
        (waiting + 0).backward(retain_graph=True)
    set_grads([p], [torch.ones(3)])
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        waiting.backward()
    unharmed.backward()


# Low precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@both_updates
def test_low_precision_updates_warn_once(update, dtype):
    """The warning names the remedies that can be had."""
    with recorded() as caught:
        Toy(2, dtype=dtype, update=update).run([1] * 8)
    assert len(caught) == 1, [str(c.message) for c in caught]
    assert "master_weights" in str(caught[0].message)
    assert "rounding='stochastic'" in str(caught[0].message)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16, "master_weights": True},
        {"dtype": torch.bfloat16, "rounding": "stochastic"},
    ],
)
def test_no_warning_where_small_updates_survive(options):
    with recorded() as caught:
        Toy(2, **options).run([1] * 8)
    assert not caught, [str(c.message) for c in caught]


@both_updates
def test_a_model_that_becomes_bf16_warns_then(update):
    p = torch.nn.Parameter(torch.zeros(3))
    with recorded() as caught:
        w = wrap(SGD([p], lr=1.0), steps=1, update=update)
        set_grads([p], [torch.ones(3)])
        w.step()
        assert not caught
        p.data = p.data.bfloat16()
        for _ in range(2):
            set_grads([p], [torch.ones(3)])
            w.step()
    assert len([str(c.message) for c in caught if "master_weights" in str(c.message)]) == 1
    assert p.tolist() == [-3.0] * 3


def test_master_weights_keep_what_bf16_loses():
    kept = Toy(2, dtype=torch.bfloat16, start=0.5, lr=3e-4, master_weights=True).run([1] * 32)
    assert kept.value == torch.tensor(0.5 - 16 * 3e-4).bfloat16().item()
    with recorded():
        lost = Toy(2, dtype=torch.bfloat16, start=0.5, lr=3e-4).run([1] * 32)
    assert lost.value == 0.5


def test_bits_of_a_wrapped_run_repeat():
    """Two identical runs give the same bits: nothing depends on threads or on addresses."""
    runs = []
    for _ in range(2):
        toy = Toy(3, n=20_000, make=AdamW, lr=0.1, max_norm=1.0)
        random = torch.Generator().manual_seed(5)
        toy.run([torch.randn(20_000, generator=random) for _ in range(9)])
        runs.append((bits(toy.p), float(toy.w.grad_norm)))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("kept", [{"master_weights": True}, {"rounding": "stochastic"}], ids=str)
def test_a_second_moment_that_cannot_decay_warns(kept):
    """0.999 * v is v in bfloat16: masters alone do not make AdamW right."""
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match=r"(?s)second moments of 1 parameters.*state_dtype=torch.float32"):
        wrap(AdamW([p], lr=0.1), 2, **kept)
    for make, options in (
        (lambda: AdamW([p], lr=0.1), {"state_dtype": torch.float32}),
        (lambda: AdamW([p], lr=0.1), {"state_dtype": torch.bfloat16}),  # as was asked for
        (lambda: AdamW([p], lr=0.1, betas=(0.9, 0.95)), {}),
        (lambda: SGD([p], lr=0.1, momentum=0.9), {}),
        (lambda: AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.1), {}),
    ):
        with recorded() as caught:
            wrap(make(), 2, **kept, **options)
        assert not caught
    stuck = torch.tensor(1.0, dtype=torch.bfloat16) * 0.999
    assert stuck == 1  # what the warning is about
