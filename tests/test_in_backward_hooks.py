"""fold="backward" beside hooks of others, beside other wrappers, and after it is gone or copied."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest
import torch
from backward_runs import BYTE, held, sgd_pair
from torch.optim import SGD, AdamW
from wrapper_helpers import Toy, let_go, recorded, tidy, wrap  # noqa: F401

both_buckets = pytest.mark.parametrize("bucket", [BYTE, 25], ids=["1 byte", "25 MiB"])
before_and_after = pytest.mark.parametrize("after", [False, True], ids=["before ours", "after ours"])


def register(toy_of, after, hook):
    """(p, wrapper): a post-accumulate hook that was registered before wrapping, or behind it."""
    p = torch.nn.Parameter(torch.zeros(3))
    if not after:
        p.register_post_accumulate_grad_hook(hook)
    w = toy_of(p)
    if after:
        p.register_post_accumulate_grad_hook(hook)
    return p, w


def wrapped(bucket, steps=2):
    return lambda p: wrap(SGD([p], lr=1.0), steps, fold="backward", bucket_mb=bucket)


# Hooks of others


def drop(p):
    p.grad = None


def double_in_place(p):
    p.grad.mul_(2)


def replace(p):
    p.grad = torch.full_like(p, 5.0)


def strided(p):
    p.grad = torch.arange(6.0)[::2] - 2


# What is left of a gradient of ones.
HOOKS = {"drops": (drop, 0.0), "doubles": (double_in_place, 2.0), "replaces": (replace, 5.0), "strided": (strided, 0.0)}


@before_and_after
@both_buckets
@pytest.mark.parametrize("case", HOOKS.values(), ids=HOOKS)
def test_hooks_that_change_the_gradient(case, bucket, after):
    """What they leave is folded: they see the gradient as in stock torch, at every backward, before and after ours."""
    hook, want = case
    seen = []

    def noting(p):
        seen.append(p.grad.tolist())
        hook(p)

    p, w = register(wrapped(bucket), after, noting)
    for k in range(4):
        p.sum().backward()
        assert p.grad is None
        w.step()
        assert w.pending == (k + 1) % 2
    assert seen == [[1.0] * 3] * 4
    assert p.tolist() == ([4.0, 0.0, -4.0] if hook is strided else [-2 * want] * 3)


@before_and_after
@both_buckets
def test_hooks_see_gradients_in_their_order(bucket, after):
    """Several on one parameter, some before ours and some after, each with what the one before left."""
    p, w = register(wrapped(bucket), False, double_in_place)
    seen = []

    def add(p, number):
        seen.append((number, p.grad[0].item()))
        p.grad.add_(number)

    for number in range(3):
        p.register_post_accumulate_grad_hook(functools.partial(add, number=number))
    for _ in range(3):
        p.sum().backward()
        assert p.grad is None
        w.step()
    assert seen == [(0, 2.0), (1, 2.0), (2, 3.0)] * 3
    assert p.tolist() == [-5.0] * 3
    assert held(w, [p]) == [2.5]


def test_hooks_that_are_registered_and_removed_on_the_way():
    toy, seen = Toy(8, fold="backward"), []
    for k in range(8):
        handle = toy.p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item())) if k % 3 else None
        toy.micro(k)
        assert toy.p.grad is None
        if handle is not None and k % 2:
            handle.remove()
    assert toy.value == -3.5
    assert seen == [1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 7, 7, 7]


def test_a_hook_that_moves_while_it_looks():
    """One that was registered after ours keeps its turn in every backward, and ours is the last one then."""
    p, w = register(wrapped(25), True, lambda p: None)
    mine = p._post_accumulate_grad_hooks
    order = list(mine)
    p.sum().backward()
    assert list(mine) == order[::-1]
    p.sum().backward()
    assert list(mine) == order[::-1]
    w.step()


def test_a_tensor_hook_sees_the_gradient_of_this_backward():
    """And what it returns is folded."""
    toy, seen = Toy(2, fold="backward"), []
    toy.p.register_hook(lambda grad: (seen.append(grad.item()), grad * 3)[1])
    for g in (1, 3):
        toy.backward(g)
        toy.backward(g)
        toy.w.step()
    assert seen == [1.0, 1.0, 3.0, 3.0]
    assert toy.value == -12.0


def test_a_gradient_that_somebody_keeps():
    """It is his: values that were folded do not change in his hands, nor what he writes later in the sums."""
    kept = []
    p, w = register(wrapped(25), False, lambda p: kept.append(p.grad))
    for _ in range(2):
        p.sum().backward()
        kept[-1].fill_(99.0)
        w.step()
    assert p.tolist() == [-1.0] * 3


def test_a_static_gradient_buffer():
    """A hook that always hands over the same memory, as CUDA graphs do."""
    static = torch.zeros(3)
    params, w = sgd_pair(n=3)

    def hook(p):
        p.grad = static.copy_(p.grad)

    params[0].register_post_accumulate_grad_hook(hook)
    for g in (1.0, 2.0, 4.0, 8.0):
        (params[0] * g + params[1]).sum().backward()
        static.fill_(99.0)
        w.step()
    assert params[0][0].item() == 2.0 - 7.5


# Several wrappers


@both_buckets
def test_wrappers_over_disjoint_parameters(bucket):
    """Each counts for itself, in whichever way it folds; one backward serves them all."""
    p, q, r = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    w2 = wrap(SGD([p], lr=1.0), 2, fold="backward", bucket_mb=bucket)
    w3 = wrap(SGD([q], lr=1.0), 3, fold="backward", bucket_mb=bucket)
    plain = wrap(SGD([r], lr=1.0), 2)
    for k in range(6):
        ((p + 2 * q + 3 * r) * (k + 1)).sum().backward()
        assert (p.grad, q.grad, r.grad.item()) == (None, None, 3.0 * (k + 1))
        for w in (w2, w3, plain):
            w.step()
    assert (w2.updates, w3.updates, plain.updates) == (3, 2, 3)
    assert (p.item(), q.item(), r.item()) == (-10.5, -14.0, -31.5)


def test_two_wrappers_over_one_parameter():
    """The first takes the gradient; nobody sees a part of it twice."""
    p = torch.nn.Parameter(torch.zeros(1))
    first, second = (wrap(SGD([p], lr=1.0), 1, fold="backward") for _ in range(2))
    p.sum().backward()
    assert (held(first, [p])[0], held(second, [p])[0]) in ((1.0, 0.0), (0.0, 1.0))


# Its end


def test_close_leaves_nothing_behind():
    params = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(3)]
    w = wrap(AdamW(params), 2, fold="backward")
    sum(p.sum() for p in params).backward()
    w.step()
    flat = weakref.ref(w._window.buffers[0].flat)
    with pytest.warns(UserWarning, match="open window"):
        w.close()
    assert not any(p._post_accumulate_grad_hooks for p in params)
    assert flat() is None, "the wrapper is still there, its sums are not"
    sum(p.sum() for p in params).backward()
    assert all(p.grad is not None for p in params)
    again = wrap(w.optimizer, 1)
    again.step()
    assert again.updates == 1


def test_a_wrapper_that_is_dropped():
    """Without close(): it goes at once, its hooks and its memory with it, as a bare optimizer does."""
    params = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(3)]
    inner = SGD(params, lr=1.0)
    w = wrap(inner, 2, fold="backward")
    for _ in range(2):
        sum(p.sum() for p in params).backward()
        w.step()
    flat = weakref.ref(w._window.buffers[0].flat)
    dead = [weakref.ref(thing) for thing in (w, w._window, w._window.in_backward, w._window.update)]
    gc.disable()
    try:
        let_go(w)
        del w
        assert [ref() for ref in dead] == [None] * 4
        assert flat() is None
    finally:
        gc.enable()
    assert not any(p._post_accumulate_grad_hooks for p in params)
    sum(p.sum() for p in params).backward()
    assert all(p.grad.tolist() == [1.0] * 1000 for p in params)
    again = wrap(inner, 1, fold="backward")
    again.step()
    assert params[0][0].item() == -2.0


def test_dropped_with_a_micro_batch_that_has_no_step_yet():
    """That window is open: it says so."""
    toy = Toy(2, fold="backward")
    toy.backward(1)
    let_go(toy.w)
    with recorded() as caught:
        del toy.w
    assert [str(c.message) for c in caught if "was dropped with an open window" in str(c.message)]
    for end in (lambda w: w.close(), lambda w: None):
        toy = Toy(2, fold="backward")
        toy.backward(1)
        toy.w.reset()
        with recorded() as caught:
            end(toy.w)
        assert not caught


def test_parameters_that_die_before_the_wrapper():
    """The wrapper keeps its own ones, no others, and no gradients."""
    p, q = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
    w = wrap(SGD([p, q], lr=1.0), 1, fold="backward")
    grads = []
    q.register_hook(lambda grad: grads.append(weakref.ref(grad)))
    (p + q).sum().backward()
    w.step()
    w.param_groups[0]["params"].pop()
    w.optimizer.state.clear()
    p.sum().backward()
    w.step()
    dead = weakref.ref(q)
    del q
    gc.collect()
    assert dead() is None
    assert grads[0]() is None


# Copies


def deepcopied(model, w):
    return copy.deepcopy((model, w))


def pickled(model, w):
    return pickle.loads(pickle.dumps((model, w)))


def saved_to_a_file(model, w):
    file = io.BytesIO()
    torch.save((model, w), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {f.__name__: f for f in (deepcopied, pickled, saved_to_a_file)}


@pytest.mark.parametrize("how", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("moment", ["before", "open", "begun"])
def test_copies(moment, how):
    """Of model and wrapper: the copy has hooks of its own, the original goes on, and neither hears of the other."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    w = wrap(SGD(model.parameters(), lr=0.5), 2, fold="backward", bucket_mb=BYTE, max_norm=9.0)
    x = torch.ones(4, 3)
    if moment != "before":
        model(x).sum().backward()
    if moment == "open":
        w.step()
    other_model, other = how(model, w)
    assert other._window.options == w._window.options
    results = []
    for m, o in ((other_model, other), (model, w)):
        if moment == "begun":
            o.step()
        for _ in range(1 if moment != "before" else 2):
            m(2 * x).square().sum().backward()
            assert all(p.grad is None for p in m.parameters())
            assert all(len(p._post_accumulate_grad_hooks) == 1 for p in m.parameters())
            o.step()
        assert (o.pending, o.updates) == (0, 1)
        results.append([p.detach() for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_copy_of_the_model_alone():
    """It has no wrapper, and stock gradients."""
    model = torch.nn.Linear(3, 1)
    wrap(SGD(model.parameters(), lr=1.0), 2, fold="backward")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.ones(1, 3)).sum().backward()
        assert other.weight.grad.tolist() == [[1.0] * 3]


def test_a_shallow_copy_is_the_same_wrapper():
    toy = Toy(2, fold="backward")
    other = copy.copy(toy.w)
    toy.backward(2)
    other.step()
    toy.micro(4)
    assert (toy.value, other.updates) == (-3.0, 1)
