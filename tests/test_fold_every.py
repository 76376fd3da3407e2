"""fold_every=K: micro-batches are held back and folded together, and nothing of what anybody sees changes by a bit."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from test_in_backward_memory import SCALARS, SIZES, allocated, chain, tables
from torch.optim import SGD, AdamW
from wrapper_helpers import (
    LOW_PRECISION,
    MAKERS,
    Toy,
    bits,
    make_windows,
    refused,
    set_grads,
    state_bits,
    tidy,  # noqa: F401
    use_two_buffers,
    wrap,
)

from fusedaccum import ops
from fusedaccum.backends import compiled

pytestmark = LOW_PRECISION
BF16 = torch.bfloat16
SHAPES = [(33, 65), (65,), (4097,), (0,), (3,)]
EVERY = (2, 3, 5)
MODES = {
    "plain": {},
    "clipped": {"max_norm": 0.5},
    "skip_window": {"nonfinite": "skip_window"},
    "skip_micro": {"nonfinite": "skip_micro"},
    "raise": {"nonfinite": "raise"},
    "sum": {"reduction": "sum"},
    "wrapped": {"update": "wrapped"},
    "masters": {"master_weights": True},
    "stochastic": {"rounding": "stochastic"},
    "backward": {"fold": "backward"},
    "backward, small buckets": {"fold": "backward", "bucket_mb": 0.001, "max_norm": 0.5},
}
each_fold = pytest.mark.parametrize("fold", ["step", "backward"])


def gradients(dtype, micro_batches, missing=True):
    """Of each micro-batch; some parameters have none in some."""
    (window,) = make_windows(SHAPES, 1, micro_batches, dtype)
    for m, k in itertools.product(range(micro_batches), range(len(SHAPES))):
        if missing and (m * 7 + k * 3) % 5 == 0:
            window[m][k] = None
    return window


def step(w, params, grads, **given):
    """A micro-batch of these gradients, made by a backward."""
    there = [(p * g).sum() for p, g in zip(params, grads, strict=True) if g is not None]
    sum(there, params[-1].sum() * 0.0).backward()
    w.step(**given)


def life(every, dtype, make="adamw", steps=8, micro_batches=27, look=(4, 12, 13), counts=None, **options):
    """What can be seen of a life: at some points the sums, everywhere the norm, at its end everything."""
    params = [torch.nn.Parameter(torch.linspace(-1, 1, torch.Size(s).numel()).view(s).to(dtype)) for s in SHAPES]
    w = wrap(MAKERS[make](params), steps, fold_every=every, **options)
    seen = []
    for m, grads in enumerate(gradients(dtype, micro_batches)):
        step(w, params, grads, **({} if counts is None else {"sum_of": counts(m)}))
        assert all(p.grad is None for p in params)
        if m in look:
            seen.append([state_bits(w.master_grad(p)) for p in params])
        seen.append((repr(w.grad_norm), w.pending, w.updates, w.skipped_windows, w.skipped_micro_batches))
    w.flush()
    return seen, [bits(p) for p in params], state_bits(w.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_no_bit_changes(mode, dtype):
    if mode == "stochastic" and dtype == torch.float32:
        dtype = BF16
    want = life(1, dtype, **MODES[mode])
    for every in EVERY:
        assert life(every, dtype, **MODES[mode]) == want, every


@pytest.mark.parametrize("counts", [lambda m: 1 + m % 3, lambda m: torch.tensor(float(m % 3))], ids=["host", "device"])
@each_fold
def test_no_bit_changes_with_item_counts(counts, fold):
    want = life(1, BF16, counts=counts, fold=fold)
    assert [life(every, BF16, counts=counts, fold=fold) for every in EVERY] == [want] * len(EVERY)


def test_no_bit_changes_in_two_buffers_and_where_the_length_varies(monkeypatch):
    use_two_buffers(monkeypatch)
    options = {"steps": lambda update: (3, 1, 4, 2)[update % 4], "make": "sgd"}
    want = life(1, torch.float32, **options)
    assert [life(every, torch.float32, **options) for every in EVERY] == [want] * len(EVERY)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_other_backends(backend):
    options = {"micro_batches": 9, "look": (2,), "backend": backend}
    assert life(3, BF16, **options) == life(1, BF16, **options)


# How often the sums are read and written


@pytest.fixture
def calls(monkeypatch):
    """(operator, micro-batches that it adds) of every call that reads or writes sums."""
    made = []

    def watch(name, at):
        real = getattr(compiled, name)

        def call(*args):
            made.append((name, args[at].numel()))
            return real(*args)

        monkeypatch.setattr(compiled, name, call)

    watch("fold", 7)
    watch("square_total", 6)
    watch("adam", -4)
    watch("sgd", -4)
    return made


def run(every, steps=8, dtype=BF16, **options):
    params = [torch.nn.Parameter(torch.ones(5, dtype=dtype)) for _ in range(2)]
    w = wrap(SGD(params, lr=0.1), steps, fold_every=every, **options)
    for _ in range(steps):
        set_grads(params, [torch.ones(5)] * 2)
        w.step()
    return w


def test_the_update_adds_the_last_micro_batches(calls):
    run(1)
    assert calls == [("fold", 1)] * 7 + [("sgd", 1), ("square_total", 0)]
    calls.clear()
    run(2)
    assert calls == [("fold", 2)] * 3 + [("sgd", 2), ("square_total", 0)]
    calls.clear()
    run(3)
    assert calls == [("fold", 3)] * 2 + [("sgd", 2), ("square_total", 0)]
    calls.clear()
    run(8)
    assert calls == [("sgd", 8), ("square_total", 0)]
    calls.clear()
    run(20, steps=20)  # more than every backend's update can add
    assert calls == [("fold", 20), ("square_total", 0), ("sgd", 0)]


def test_with_clipping_where_that_moves_fewer_bytes(calls):
    """One 16-bit gradient is read twice; two, or one of 32 bits, are not. Nor where the sums are looked at."""
    run(1, max_norm=1.0)
    assert calls == [("fold", 1)] * 7 + [("square_total", 1), ("sgd", 1)]
    calls.clear()
    run(1, max_norm=1.0, dtype=torch.float32)
    assert calls == [("fold", 1)] * 8 + [("square_total", 0), ("sgd", 0)]
    calls.clear()
    run(2, nonfinite="skip_window")
    assert calls == [("fold", 2)] * 4 + [("square_total", 0), ("sgd", 0)]
    calls.clear()
    run(1, steps=1, max_norm=1.0, dtype=torch.float32)  # no sums are there to be read
    assert calls == [("square_total", 1), ("sgd", 1)]
    calls.clear()
    run(1, update="wrapped")
    assert calls[:8] == [("fold", 1)] * 8


def test_a_pre_hook_finds_everything_folded(calls):
    params = [torch.nn.Parameter(torch.zeros(3))]
    w = wrap(SGD(params, lr=1.0), 2, fold_every=2)
    seen = []
    w.register_step_pre_hook(lambda *_: seen.append(w.master_grad(params[0]).mul_(2).tolist()))
    for g in (1.0, 3.0):
        set_grads(params, [torch.full((3,), g)])
        w.step()
    assert seen == [[4.0] * 3]
    assert params[0].tolist() == [-4.0] * 3
    assert w.grad_norm == pytest.approx(4.0 * 3**0.5)
    assert ("sgd", 0) in calls


# Who owns a gradient


def alias(kind, p):
    """Somebody's hold on the memory of `p.grad`, through which it can be written later."""
    return {
        "the tensor": lambda: p.grad,
        "detach()": lambda: p.grad.detach(),
        "data": lambda: p.grad.data,
        "a view": lambda: p.grad.view(-1),
        "numpy()": lambda: torch.from_numpy(p.grad.numpy()),
        "the storage": lambda: p.grad.new_empty(0).set_(p.grad.untyped_storage(), 0, (5,), (1,)),
    }[kind]()


@each_fold
@pytest.mark.parametrize("kind", ["the tensor", "detach()", "data", "a view", "numpy()", "the storage"])
def test_what_somebody_else_refers_to_is_folded_at_once(kind, fold):
    p, q = (torch.nn.Parameter(torch.zeros(5)) for _ in range(2))
    kept = []
    if fold == "backward":  # ahead of ours
        p.register_post_accumulate_grad_hook(lambda p: kept.append(alias(kind, p)))
    w = wrap(SGD([p, q], lr=1.0), 4, fold_every=3, fold=fold)
    for g in (1.0, 2.0, 3.0, 6.0):
        (p.sum() * g + q.sum() * g).backward()
        if fold == "step":
            kept.append(alias(kind, p))
        w.step()
        kept[-1].fill_(100.0)
    assert p.tolist() == q.tolist() == [-3.0] * 5


def test_gradients_that_were_one_tensor_are_the_window_s(calls):
    """autograd cuts up the gradient of a cat(): the pieces share storage, and the window has all of them."""
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(3)]
    w = wrap(SGD(params, lr=1.0), 2, fold_every=2)
    for g in (1.0, 3.0):
        (torch.cat(params) * g).sum().backward()
        assert params[0].grad.untyped_storage().data_ptr() == params[1].grad.untyped_storage().data_ptr()
        w.step()
    assert calls == [("sgd", 2), ("square_total", 0)]
    assert [p.tolist() for p in params] == [[-2.0] * 4] * 3
    for g in (1.0, 3.0):
        (torch.cat(params) * g).sum().backward()
        kept = params[2].grad  # one piece is somebody's, and with it the storage of all
        params[2].grad = None
        w.step()
        kept.set_(kept.untyped_storage(), 0, (12,)).fill_(50.0)
    assert [p.tolist() for p in params] == [[-4.0] * 4] * 2 + [[-2.0] * 4]


def test_a_view_of_the_sums_is_never_behind():
    toy = Toy(8, fold_every=4, start=0.0)
    toy.run([8])
    view = toy.w.master_grad(toy.p)
    seen = []
    for g in (16, 24, 32):
        toy.micro(g)
        seen.append(view.item())
    assert seen == [3.0, 6.0, 10.0]


# Refusals, resets, saved windows


def test_a_gradient_is_refused_when_it_comes():
    p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    w = wrap(SGD([p, q], lr=1.0), 3, fold_every=3)
    set_grads([p, q], [torch.ones(3)] * 2)
    w.step()
    p.grad = torch.ones(3)
    q.grad_dtype = None
    q.grad = torch.ones(3, dtype=torch.float64)
    with refused(w, "float64", r"\['params'\]\[1\]"):
        w.step()
    assert len(w._window.buffers[0].held) == 0  # `refused` has looked at the sums
    q.grad = torch.ones(3)
    w.step()
    set_grads([p, q], [torch.ones(3)] * 2)
    w.step()
    assert p.tolist() == q.tolist() == [-1.0] * 3


@each_fold
def test_reset_and_flush(fold):
    toy = Toy(4, fold_every=3, fold=fold)
    toy.run([5, 5])
    toy.w.reset()
    toy.run([2, 4])
    assert toy.w.flush()
    assert toy.value == -3.0
    toy.run([1])
    assert toy.w.flush()
    assert not toy.w.flush()
    assert toy.value == -4.0
    toy.run([8] * 4)
    assert (toy.value, toy.w.updates, toy.w.grad_norm) == (-12.0, 3, 8.0)


@each_fold
@pytest.mark.parametrize("again", [1, 2, 4])
@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "torch.save"])
def test_a_window_goes_on_elsewhere(how, again, fold):
    grads = gradients(BF16, 8)

    def begin(every):
        params = [torch.nn.Parameter(torch.ones(s, dtype=BF16)) for s in SHAPES]
        return params, wrap(AdamW(params, lr=0.01), 4, fold_every=every, fold=fold, master_weights=True)

    params, w = begin(1)
    for g in grads:
        step(w, params, g)
    want = [bits(p) for p in params], state_bits(w.state_dict())

    params, w = begin(4)
    for g in grads[:6]:
        step(w, params, g)
    if how == "deepcopy":
        params, w = copy.deepcopy((params, w))
    else:
        saved = w.state_dict()
        if how == "torch.save":
            file = io.BytesIO()
            torch.save(saved, file)
            saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        new, other = begin(again)
        for p, q in zip(new, params, strict=True):
            p.data.copy_(q.data)
        other.load_state_dict(saved)
        w.reset()
        params, w = new, other
    for g in grads[6:]:
        step(w, params, g)
    assert (([bits(p) for p in params], state_bits(w.state_dict()))) == want


@each_fold
def test_parameters_that_change_while_gradients_wait(fold):
    """Frozen, moved to other memory, added: what was held back belongs to the window all the same."""
    p, q, late = (torch.nn.Parameter(torch.zeros(3)) for _ in range(3))
    w = wrap(SGD([p, q], lr=1.0), 4, fold_every=4, fold=fold)
    (p.sum() + q.sum()).backward()
    w.step()
    q.requires_grad_(False)
    p.data = p.data.clone()
    p.sum().backward()
    w.step()
    w.add_param_group({"params": [late]})
    (p.sum() + late.sum() * 8).backward()
    w.step()
    p.sum().backward()
    w.step()
    assert (p.tolist(), q.tolist(), late.tolist()) == ([-1.0] * 3, [-0.25] * 3, [-2.0] * 3)


def test_a_scale_that_changes_while_gradients_wait():
    """Each micro-batch is unscaled by its own scale; one that overflowed is left out."""
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
    w = wrap(SGD([p], lr=1.0), 4, fold_every=3, amp_scaling=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for g in (1.0, 2.0, float("inf"), 6.0):
        scaler.scale((p * g).sum()).backward()
        scaler.step(w)
        scaler.update()
    assert p.tolist() == [-3.0] * 3
    assert w.skipped_micro_batches == 1


def test_an_interrupt_while_waiting_gradients_are_folded(monkeypatch):
    toy = Toy(4, fold_every=3)
    toy.run([1, 1])
    real = compiled.fold

    def fold(*args):
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(compiled, "fold", fold)
    with pytest.raises(KeyboardInterrupt):
        toy.w.master_grad(toy.p)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="interrupted half-way"):
        toy.w.step()
    toy.w.reset()
    toy.run([2] * 4)
    assert toy.value == -2.0


# Memory


@pytest.mark.parametrize("every", [2, 3])
def test_memory_in_the_backward(every):
    """What waits is held, and nothing else: the pair of a parameter is folded as its second gradient appears."""
    params = [torch.nn.Parameter(torch.zeros(n, dtype=BF16)) for n in SIZES]
    w = wrap(SGD(params, lr=1.0), 2 * every + 1, fold="backward", bucket_mb=0.25, fold_every=every)
    one_set, bucket = sum(p.nbytes for p in params), max(2**18, *(p.nbytes for p in params))
    chain(params).backward()  # the buffer is there from the second micro-batch on
    w.step()
    w.reset()

    def window():
        for _ in range(every):
            chain(params).backward()
            w.step()

    peak, left = allocated(window)
    assert peak <= (every - 1) * one_set + bucket + SCALARS + 8 * tables(w)
    assert peak >= (every - 1) * one_set
    assert left <= SCALARS


def test_memory_in_step():
    params = [torch.nn.Parameter(torch.zeros(n, dtype=BF16)) for n in SIZES]
    w = wrap(SGD(params, lr=1.0), 5, fold_every=2)
    one_set = sum(p.nbytes for p in params)
    for _ in range(5):
        chain(params).backward()
        w.step()

    def two():
        for _ in range(2):
            chain(params).backward()
            w.step()

    peak, left = allocated(two)
    assert 2 * one_set <= peak <= 2 * one_set + SCALARS + 8 * tables(w)
    assert left <= SCALARS


def test_steps_none_has_nothing_to_hold_back():
    p = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"fold_every=2 has no meaning with steps=None"):
        wrap(SGD([p], lr=1.0), None, fold_every=2)


def test_marks_say_what_is_held_back():
    assert ops.VOID == 4
    toy = Toy(4, n=3, fold_every=3).run([[1, 2, 3]])
    (buffer,) = toy.w._window.buffers
    assert buffer.own_marks().tolist() == [ops.TOUCHED | ops.VOID]
    assert toy.w.master_grad(toy.p).tolist() == [0.25, 0.5, 0.75]
    assert buffer.own_marks().tolist() == [ops.TOUCHED]
