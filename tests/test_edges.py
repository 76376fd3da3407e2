"""What once went wrong at the edges: lazily negated gradients, hooks that change the wrapper, copies, damaged files."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    Toy,
    let_go,
    recorded,
    refused,
    set_grads,
    tidy,  # noqa: F401
    wrap,
)

from fusedaccum import GatedScheduler, backends
from fusedaccum.flat_buffer import FlatBuffer

both_updates = pytest.mark.parametrize("update", ["fused", "wrapped"])


@both_updates
@pytest.mark.parametrize("backend", ["compiled", "triton", "reference"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_gradient_that_is_negated_lazily(update, backend, shape):
    p = torch.nn.Parameter(torch.full(shape, 0.5))
    w = wrap(SGD([p], lr=1.0), steps=1, update=update, backend=backend)
    (torch.complex(torch.zeros(shape), p).conj() * (2 + 3j)).real.sum().backward()
    assert p.grad.is_neg()
    expected = p.detach() - p.grad.resolve_neg()
    w.step()
    assert torch.equal(p.detach(), expected)


@both_updates
def test_a_dict_saved_in_a_pre_hook_holds_the_sums(update):
    toy, box = Toy(4, update=update), []

    def save(*_):
        toy.w.master_grad(toy.p)
        box.append(copy.deepcopy(toy.w.state_dict()))

    toy.w.register_step_pre_hook(save)
    toy.micro(2, mean_of=3)
    toy.micro(2, mean_of=5)
    toy.w.flush()
    new = Toy(4, update=update)
    new.w.load_state_dict(box[0])
    assert new.w.flush()
    assert new.value == toy.value == -2.0


@pytest.mark.parametrize("count", [0, torch.tensor(0)], ids=["number", "tensor"])
def test_hooks_of_a_wrapped_update_that_is_skipped(count):
    toy, fired = Toy(1, update="wrapped"), []
    toy.w.register_step_pre_hook(lambda *_: fired.append("pre"))
    toy.w.register_step_post_hook(lambda *_: fired.append("post"))
    toy.micro(1, mean_of=count)
    assert (fired, toy.w.updates, toy.w.skipped_windows) == ([], 0, 1)


NOTHING = {
    "no gradient": ([None, None], {}, {}),
    "no items": ([3, 4], {"mean_of": 0}, {}),
    "no items on the device": ([3, 4], {"mean_of": torch.tensor(0)}, {}),
    "sums of no items on the device": ([3, float("nan")], {"sum_of": torch.tensor(0)}, {}),
    "all left out": ([float("inf"), float("nan")], {}, {"nonfinite": "skip_micro"}),
}


@both_updates
@pytest.mark.parametrize("case", NOTHING.values(), ids=NOTHING)
def test_the_norm_of_nothing_is_0(case, update):
    gradients, count, options = case
    toy = Toy(1, update=update, **options).run([5])
    assert toy.w.grad_norm == 5.0
    toy.w.steps = 2
    for g in gradients:
        if g is not None:
            toy.backward(g)
        toy.w.step(**count)
    assert (toy.w.grad_norm, toy.w.updates) == (0.0, 1)


@both_updates
def test_the_norm_of_a_skipped_window_is_not_finite(update):
    toy = Toy(1, update=update, nonfinite="skip_window").run([5, float("inf")])
    assert toy.w.grad_norm == float("inf")
    toy.run([float("nan")])
    assert toy.w.grad_norm != toy.w.grad_norm


@both_updates
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_a_copy_is_in_the_same_place(update, duplicate):
    toy = Toy(2, update=update).run([1, 3])
    toy.w.micro_batch(mean_of=3)
    with recorded() as caught:
        w = duplicate(toy.w)
    assert not caught
    assert (w.updated, w.grad_norm, w.updates) == (True, 2.0, 1)
    w.param_groups[0]["params"][0].grad = torch.ones(1)
    w.step()
    with pytest.raises(ValueError, match="weighted"):
        w.step()
    w.reset()


@both_updates
def test_a_copy_of_a_window_whose_steps_were_set(update):
    toy = Toy(4, update=update).run([1, 1])
    toy.w.steps = 8
    w = copy.deepcopy(toy.w)
    p = w.param_groups[0]["params"][0]
    for _ in range(2):
        p.grad = torch.ones(1)
        w.step()
    assert (p.item(), w.pending, w.steps) == (-1.0, 0, 8)


def test_dropping_the_original_of_a_copy_warns():
    toy = Toy(4).run([1])
    let_go(toy.w)
    kept = copy.deepcopy(toy.w)
    with recorded() as caught:
        del toy.w
        gc.collect()
    assert ["open window" in str(c.message) for c in caught] == [True]
    kept.reset()


def test_a_shallow_copy_is_the_same_window():
    toy = Toy(2).run([1])
    other = copy.copy(toy.w)
    toy.p.grad = torch.tensor([3.0])
    other.step()
    assert (toy.value, toy.w.updates, other.updates) == (-2.0, 1, 1)


@both_updates
def test_a_count_announced_inside_a_closure(update):
    toy = Toy(2, update=update)
    for g, n in ((1.0, 10), (2.0, 1)):

        def closure(g=g, n=n):
            toy.w.zero_grad()
            toy.w.micro_batch(mean_of=n)
            toy.backward(g)
            return g

        assert toy.w.step(closure) == g
    assert toy.value == pytest.approx(-12 / 11, rel=3e-7)


def test_an_announced_tensor_is_read_when_it_is_said():
    toy, count = Toy(2), torch.tensor(3.0)
    for g in (1, 2):
        toy.w.micro_batch(mean_of=count)
        count.fill_(1.0)
        toy.micro(g)
    assert toy.value == pytest.approx(-5 / 4)


def test_an_announcement_ends_with_its_window():
    toy = Toy(2).run([2])
    toy.w.reset()
    toy.w.micro_batch(mean_of=3)
    toy.w.reset()
    toy.run([1, 3])
    assert toy.value == -2.0


DAMAGE = {
    "sums of numpy": lambda s: s.update(sums=(s["sums"][0].numpy(),)),
    "sparse sums": lambda s: s.update(sums=(s["sums"][0].to_sparse(),)),
    "sums on meta": lambda s: s.update(sums=(s["sums"][0].to("meta"),)),
    "more than a window": lambda s: s.update(pending=5),
    "bool": lambda s: s.update(pending=True),
    "no mode": lambda s: s.update(mode=None),
    "nan items": lambda s: s.update(items=(float("nan"),)),
    "negative items": lambda s: s.update(items=(-1.0,)),
    "two items": lambda s: s.update(items=(torch.ones(2),)),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("make", [SGD, AdamW])
def test_a_damaged_window_changes_nothing(make, damage):
    saved = copy.deepcopy(Toy(4, make=make, lr=0.1).run([1] * 6).w.state_dict())
    toy = Toy(4, make=make, lr=0.1).run([2] * 5)
    DAMAGE[damage](saved["fusedaccum"])
    with refused(toy.w, "damaged|window"):
        toy.w.load_state_dict(saved)


@pytest.mark.parametrize("eps", [None, "x"])
def test_a_hyper_parameter_that_is_no_number(eps):
    toy = Toy(1, make=AdamW, lr=0.1).run([1])
    toy.w.param_groups[0]["eps"] = eps
    toy.backward(1)
    with pytest.raises((TypeError, ValueError)):
        toy.w.step()
    assert (toy.w.state[toy.p]["step"].item(), toy.w.updates) == (1.0, 1)


@both_updates
@pytest.mark.parametrize("backend", ["compiled", "reference", "triton"])
def test_another_default_dtype(update, backend):
    torch.set_default_dtype(torch.float64)
    try:
        p, q = (torch.nn.Parameter(torch.zeros(3, dtype=torch.float32)) for _ in range(2))
        w = wrap(AdamW([p, q], lr=0.5, weight_decay=0), steps=1, update=update, backend=backend)
        set_grads([p, q], [torch.ones(3, dtype=torch.float32), None])
        w.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert p.tolist() == pytest.approx([-0.5] * 3)
    assert not q.any()


def test_another_default_device():
    """Tables that the host reads stay on the CPU: meta stands for any other device here."""
    toy = Toy(2)
    with torch.device("meta"):
        for g in (1.0, 3.0):
            toy.p.grad = torch.full((1,), g, device="cpu")
            toy.w.step()
    assert toy.value == -2.0


@pytest.mark.filterwarnings("ignore:.*without FP32 masters")
@both_updates
def test_a_parameter_with_a_grad_dtype_of_its_own(update):
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    p.grad_dtype = torch.float32
    w = wrap(SGD([p], lr=1.0), steps=2, update=update)
    for g in (1.0, 3.0):
        p.grad = torch.full((3,), g)
        w.step()
    assert p.tolist() == [-2.0] * 3
    assert (p.grad, p.grad_dtype) == (None, torch.float32)


@pytest.mark.parametrize("count", [1e-46, 1e39, 10**400])
def test_counts_that_float32_cannot_divide_by(count):
    toy = Toy(2)
    toy.backward(1)
    with refused(toy.w, "mean_of", "1e-30"):
        toy.w.step(mean_of=count)


@pytest.mark.parametrize("what", ["reset", "close"])
def test_a_pre_hook_that_ends_the_window(what):
    toy = Toy(1)
    handle = toy.w.register_step_pre_hook(lambda *_: getattr(toy.w, what)())
    with recorded():
        toy.micro(1)
    handle.remove()
    assert (toy.value, toy.w.updates, toy.w.updated, toy.w.pending) == (0.0, 0, False, 0)


def test_flush_inside_a_pre_hook_is_refused():
    toy = Toy(1)
    handle = toy.w.register_step_pre_hook(lambda *_: toy.w.flush())
    with pytest.raises(RuntimeError, match="pre-hook"):
        toy.micro(1)
    handle.remove()
    assert (toy.value, toy.w.pending) == (0.0, 1)
    assert toy.w.flush()
    assert toy.value == -1.0


def test_a_pre_hook_that_takes_a_parameter_away():
    p, q = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    w = wrap(SGD([p, q], lr=1.0), steps=1)

    def take_away(*_):
        w.param_groups[0]["params"].pop()

    w.register_step_pre_hook(take_away)
    set_grads([p, q], [torch.ones(1)] * 2)
    with pytest.warns(UserWarning, match="left the optimizer"):
        w.step()
    assert (p.item(), q.item()) == (-1.0, 0.0)


def test_a_master_outlives_the_freezing_of_its_parameter():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    w = wrap(SGD([p], lr=1.0), steps=1, master_weights=True)

    def update():
        set_grads([p], [torch.full((3,), 2.0**-12)])
        w.step()

    update()
    p.requires_grad_(False)
    q = torch.nn.Parameter(torch.zeros(2))
    w.add_param_group({"params": [q]})
    set_grads([q], [torch.ones(2)])
    w.step()
    p.requires_grad_(True)
    update()
    master, _ = w.state_dict()["fusedaccum"]["masters"]
    assert master.tolist() == [1 - 2.0**-11] * 3


def test_a_stale_gradient_of_another_shape():
    p = torch.nn.Parameter(torch.zeros(2, 3))
    w = wrap(SGD([p], lr=1.0), steps=2)
    set_grads([p], [torch.ones(2, 3)])
    w.step()
    w.reset()
    p.grad = torch.arange(6.0).view(2, 3)
    p.data = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="shape"):
        w.step()
    assert not p.any()


def test_a_refused_parameter_is_refused_again():
    """A refusal must not be what the next call measures a change from."""
    p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    w = wrap(SGD([p, q], lr=1.0), steps=2, update="fused")
    set_grads([p, q], [torch.ones(3)] * 2)
    w.step()
    q.data = p.data
    for _ in range(3):
        set_grads([p, q], [torch.ones(3)] * 2)
        with pytest.raises(ValueError, match="share storage"):
            w.step()
        assert (w.pending, p.tolist()) == (1, [0.0] * 3)


def test_a_closed_wrapper_loads_nothing():
    toy = Toy(2)
    saved = toy.w.state_dict()
    toy.w.close()
    with pytest.raises(RuntimeError, match="close"):
        toy.w.load_state_dict(saved)


def test_a_gate_says_what_it_loads():
    toy = Toy(2)
    scheduler = torch.optim.lr_scheduler.StepLR(toy.w, 1)
    with pytest.raises(ValueError, match="seen_updates"):
        GatedScheduler(scheduler, toy.w).load_state_dict(scheduler.state_dict())


def test_what_is_no_parameter():
    with pytest.raises(TypeError, match="NoneType"):
        Toy(1).w.master_grad(None)


@pytest.mark.parametrize(("numels", "most"), [([768 * 768] * 12 + [768] * 12, 1.005), ([20_000] * 100, 1.01)])
def test_what_a_buffer_takes(numels, most):
    """4 bytes a parameter and under 1 % more; a segment starts on the next multiple of 64 elements and no later."""
    params = [torch.nn.Parameter(torch.zeros(n)) for n in numels]
    buffer = FlatBuffer(params, torch.device("cpu"), backends.select(torch.device("cpu")))
    assert buffer.flat.numel() == sum((n + 63) // 64 * 64 for n in numels)
    held = [value for value in vars(buffer).values() if isinstance(value, torch.Tensor)]
    assert 1 <= sum(t.nbytes for t in held) / (4 * sum(numels)) <= most


def test_the_slow_backend_is_not_taken_in_silence(monkeypatch):
    monkeypatch.setattr(backends, "NAMES", ("nothing", "reference"))
    with pytest.warns(UserWarning, match=r"slow `reference` backend on cpu \(nothing: No module"):
        assert backends.select(torch.device("cpu")).__name__.endswith("reference")
    with recorded() as caught:
        backends.select(torch.device("cpu"), "reference")
    assert not caught
