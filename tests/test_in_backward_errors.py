"""fold="backward" and backwards that end with an exception.

Their gradients stay in p.grad as without us, or, where some of them have been folded, nothing goes on before reset().
"""

from __future__ import annotations

import copy

import pytest
import torch
from backward_runs import BYTE, Boom, held, sgd_pair
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint
from wrapper_helpers import Toy, recorded, tidy, wrap  # noqa: F401

KINDS = [ValueError("half-way"), KeyboardInterrupt("half-way")]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=["error", "interrupt"])
LOST = "was left by an exception.*reset"


@pytest.fixture(autouse=True)
def disarm():
    yield
    Boom.armed = None


def reentrant(f, x):
    return checkpoint(f, x, use_reentrant=True)


def replayed(f, x):
    return checkpoint(f, x, use_reentrant=False)


class Segment(torch.autograd.Function):
    """x * p, whose backward runs another one and may fail behind it."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.p = p
        ctx.save_for_backward(x)
        return x * p.detach()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            torch.autograd.backward(y * ctx.p, grad)
        if Boom.armed is not None:
            raise Boom.armed
        return y.grad, None


# A loss over a and b, in whose backward the failing node comes where the name says.
MODELS = {
    "before any hook": lambda a, b: Boom.apply(a * b),
    "between two parameters": lambda a, b: Boom.apply(a * 1) * b,
    "behind all": lambda a, b: Boom.apply(torch.ones(2, requires_grad=True)) * a * b,
    "inside a reentrant segment": lambda a, b: reentrant(lambda x: Boom.apply(x * a) * b, b * 1),
    "inside a segment, which has an end before": lambda a, b: reentrant(lambda x: Boom.apply(x * 1) * a, b * 1),
    "inside a segment that is replayed": lambda a, b: replayed(lambda x: Boom.apply(x * a) * b, b * 1),
    "behind a reentrant segment": lambda a, b: reentrant(lambda x: x * a, Boom.apply(b * 1)),
    "behind a reentrant segment and one more": lambda a, b: reentrant(lambda x: x * a, Boom.apply(b * 1)) * b,
    "in the node of a segment": lambda a, b: Segment.apply(b * 1, a),
    "in the node of a segment, behind another": lambda a, b: Segment.apply(b * 1, a) * b,
}
IN_A_NODE = [model for name, model in MODELS.items() if name.startswith("in the node")]
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
both_buckets = pytest.mark.parametrize("bucket", [BYTE, 25], ids=["1 byte", "25 MiB"])


def stock(model, backwards_that_fail):
    """Gradients that torch leaves after so many failing backwards and a good one; and after the failing ones."""
    params = [torch.nn.Parameter(torch.full((2,), v)) for v in (2.0, 3.0)]
    for _ in range(backwards_that_fail):
        Boom.armed = ValueError("half-way")
        with pytest.raises(ValueError, match="half-way"):
            model(*params).sum().backward()
    left = [None if p.grad is None else p.grad[0].item() for p in params]
    Boom.armed = None
    model(*params).sum().backward()
    return left, [p.grad[0].item() for p in params]


def fail(loss, kind=KINDS[0], **how):
    Boom.armed = kind
    with pytest.raises(type(kind), match="half-way"):
        loss.sum().backward(**how)
    Boom.armed = None


def refuses(w):
    """Everything that would use the half of a backward raises; reset() helps."""
    for call in (w.step, w.flush, w.state_dict, lambda: copy.deepcopy(w), lambda: w.micro_batch(mean_of=1)):
        with pytest.raises(RuntimeError, match=LOST):
            call()


def is_refused(model, bucket):
    """Whether a backward that failed has left something in the sums, or nobody said that it has failed."""
    return model in IN_A_NODE or (bucket == BYTE and any(stock(model, 1)[0]))


def try_again_in_vain(w, backward):
    """The backward raises, or what uses it does."""

    def micro_batch():
        backward()
        w.step()

    with pytest.raises(RuntimeError, match=LOST):
        micro_batch()


@every_kind
@both_buckets
@every_model
def test_a_second_try(model, bucket, kind):
    """After zero_grad(): the right mean, or RuntimeError and the way out."""
    (a, b), w = sgd_pair(bucket_mb=bucket)
    (a * 5 + b * 7).sum().backward()
    w.step()
    fail(model(a, b), kind)
    want = stock(model, 0)[1]
    w.zero_grad()
    if is_refused(model, bucket):
        try_again_in_vain(w, lambda: model(a, b).sum().backward())
        refuses(w)
        for p in (a, b):
            p.grad = None
        w.reset()
        (a * 5 + b * 7).sum().backward()
        w.step()
    model(a, b).sum().backward()
    w.step()
    assert [p[0].item() for p in (a, b)] == [2.0 - (5 + want[0]) / 2, 3.0 - (7 + want[1]) / 2]


@every_model
def test_large_buckets_leave_what_torch_leaves(model):
    """Gradients of the half that ran are in p.grad, to be zeroed or not: a second backward adds to them."""
    left, both = stock(model, 2)
    (a, b), w = sgd_pair(steps=1)
    for _ in range(2):
        fail(model(a, b))
    seen = [None if p.grad is None else p.grad[0].item() for p in (a, b)]
    if model in IN_A_NODE:  # nothing was seen of the pass around it, and nobody says that it has failed
        refuses(w)
        return
    assert seen == left
    model(a, b).sum().backward()
    w.step()
    assert [p[0].item() for p in (a, b)] == [2.0 - both[0], 3.0 - both[1]]


@every_model
def test_small_buckets_are_refused(model):
    """Every gradient is folded at once, and one that was before the failing node is in the sums."""
    (a, b), w = sgd_pair(bucket_mb=BYTE)
    fail(model(a, b))
    folded = any(held(w, (a, b)))
    assert folded == any(stock(model, 1)[0])
    assert a.grad is None
    assert b.grad is None
    if folded:
        refuses(w)
    w.reset()
    w.step()


@both_buckets
@every_model
def test_the_same_graph_again(model, bucket):
    """A failing node that is run again, with everything behind it."""
    (a, b), w = sgd_pair(bucket_mb=bucket, steps=1)
    want = stock(model, 0)[1]
    loss = model(a, b)
    fail(loss, retain_graph=True)
    w.zero_grad()
    if is_refused(model, bucket):
        try_again_in_vain(w, lambda: loss.sum().backward())
        return
    loss.sum().backward()
    w.step()
    assert [p[0].item() for p in (a, b)] == [2.0 - want[0], 3.0 - want[1]]


@both_buckets
def test_the_second_backward_of_a_micro_batch_fails(bucket):
    """What the first one left in the sums stays; the micro-batch is still open."""
    (a, b), w = sgd_pair(bucket_mb=bucket)
    (a * 5 + b * 7).sum().backward()
    fail(MODELS["between two parameters"](a, b))
    if bucket == BYTE:
        refuses(w)
        return
    w.zero_grad()
    w.step()
    assert held(w, (a, b)) == [2.5, 3.5]
    (a * 1 + b * 1).sum().backward()
    w.step()
    assert [p[0].item() for p in (a, b)] == [2.0 - 3.0, 3.0 - 4.0]


@both_buckets
def test_step_instead_of_zero_grad(bucket):
    """The half that torch leaves is folded, as it would be in fold="step"; or refused."""
    (a, b), w = sgd_pair(bucket_mb=bucket, steps=1)
    fail(MODELS["between two parameters"](a, b))
    if bucket == BYTE:
        refuses(w)
        return
    assert (a.grad, b.grad[0].item()) == (None, 2.0)
    w.step()
    assert [p[0].item() for p in (a, b)] == [2.0, 1.0]


def test_loading_is_a_way_out_too():
    (a, b), w = sgd_pair(bucket_mb=BYTE)
    (a * 5 + b * 7).sum().backward()
    w.step()
    saved = copy.deepcopy(w.state_dict())
    fail(MODELS["between two parameters"](a, b))
    refuses(w)
    w.load_state_dict(saved)
    (a * 1 + b * 1).sum().backward()
    w.step()
    assert [p[0].item() for p in (a, b)] == [2.0 - 3.0, 3.0 - 4.0]


def test_an_announced_count_waits_for_the_second_try():
    toy = Toy(1, fold="backward")
    toy.w.micro_batch(mean_of=4)
    loss = Boom.apply(torch.ones(1, requires_grad=True)) * toy.p * 3
    fail(loss)
    toy.w.zero_grad()
    toy.micro(3)
    assert (toy.value, toy.w.updates) == (-3.0, 1)


# Hooks that raise


def raising(message="half-way"):
    def hook(*_):
        raise ValueError(message)

    return hook


@both_buckets
@pytest.mark.parametrize("where", ["tensor hook", "post hook before", "post hook after"])
@pytest.mark.parametrize("which", [0, 1], ids=["second to come", "first to come"])
def test_somebodys_hook_raises(which, where, bucket):
    params = [torch.nn.Parameter(torch.full((2,), v)) for v in (2.0, 3.0)]
    p = params[which]
    register = p.register_hook if where == "tensor hook" else p.register_post_accumulate_grad_hook
    handle = None if where == "post hook after" else register(raising())
    w = wrap(SGD(params, lr=1.0), 1, fold="backward", bucket_mb=bucket)
    handle = handle or register(raising())
    order = []
    for q in params:
        q.register_hook(lambda grad, q=q: order.append(q is p))
    with pytest.raises(ValueError, match="half-way"):
        (params[0] * params[1]).sum().backward()
    handle.remove()
    w.zero_grad()
    if bucket == BYTE and any(held(w, params)):
        refuses(w)
        w.reset()
        w.zero_grad()
    (params[0] * params[1]).sum().backward()
    w.step()
    assert [q[0].item() for q in params] == [2.0 - 3.0, 3.0 - 2.0]
    assert order


@both_buckets
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("after", [False, True], ids=["before ours", "after ours"])
def test_a_gradient_that_cannot_be_folded(after, last, bucket):
    """Set by somebody's hook. It is refused with its name, and nothing of its backward is left behind."""
    params = [torch.nn.Parameter(torch.full((2,), v)) for v in (2.0, 3.0)]

    def double(p):
        p.grad_dtype = None
        p.grad = p.grad.double()

    order = []
    for p in params:
        p.register_hook(lambda grad, p=p: order.append(p))
    (params[0] * params[1]).sum().backward()
    bad = order[1 if last else 0]
    for p in params:
        p.grad = None
    handle = None if after else bad.register_post_accumulate_grad_hook(double)
    w = wrap(SGD(params, lr=1.0), 1, fold="backward", bucket_mb=bucket)
    handle = handle or bad.register_post_accumulate_grad_hook(double)
    with pytest.raises(TypeError, match="float64"):
        (params[0] * params[1]).sum().backward()
    handle.remove()
    for p in params:
        p.grad = None
        p.grad_dtype = p.dtype
    if bucket == BYTE and last:  # the other one was folded before
        refuses(w)
        w.reset()
    (params[0] * params[1]).sum().backward()
    w.step()
    assert [p[0].item() for p in params] == [2.0 - 3.0, 3.0 - 2.0]


# Calls inside a backward


def test_calls_in_the_middle_of_a_backward():
    """step() and what saves the window are refused there; looking at it is not."""
    (a, b), w = sgd_pair(bucket_mb=BYTE, steps=1)
    h, seen = a * 1, []

    def hook(grad):
        refuses(w)
        seen.append(held(w, (a, b)))

    h.register_hook(hook)
    (h * b).sum().backward()
    assert seen == [[0.0, 2.0]]
    w.step()
    assert [p[0].item() for p in (a, b)] == [-1.0, 1.0]


@both_buckets
def test_reset_in_the_middle_of_a_backward(bucket):
    """What had come is dropped, what comes after it is a micro-batch's."""
    (a, b), w = sgd_pair(bucket_mb=bucket, steps=1)
    h = a * 1
    h.register_hook(lambda grad: w.reset())
    (h * b).sum().backward()
    w.step()
    assert [p[0].item() for p in (a, b)] == [-1.0, 3.0]


@both_buckets
def test_close_in_the_middle_of_a_backward(bucket):
    """Gradients that come after it stay where torch leaves them."""
    (a, b), w = sgd_pair(bucket_mb=bucket, steps=1)
    h = a * 1

    def hook(grad):
        with pytest.warns(UserWarning, match="open window"):
            w.close()

    h.register_hook(hook)
    (h * b).sum().backward()
    assert (a.grad[0].item(), b.grad) == (3.0, None)


def test_close_in_a_hook_of_the_same_parameter():
    p = torch.nn.Parameter(torch.zeros(2))
    wrappers = []
    p.register_post_accumulate_grad_hook(lambda p: wrappers[0].close())
    wrappers.append(wrap(SGD([p], lr=1.0), 2, fold="backward"))
    (p * 3).sum().backward()
    assert p.grad.tolist() == [3.0] * 2
    assert len(p._post_accumulate_grad_hooks) == 1


def test_a_failed_backward_has_begun_nothing():
    """Where its gradients are left in p.grad: a count may be said, and there is nothing to flush or to lose."""
    (a, b), w = sgd_pair(steps=1)
    fail(MODELS["between two parameters"](a, b))
    assert not w.flush()
    assert w.state_dict()["fusedaccum"]["begun"] == ()
    w.zero_grad()
    w.micro_batch(mean_of=4)
    (a * 5 + b * 7).sum().backward()
    w.step()
    assert [p[0].item() for p in (a, b)] == [2.0 - 5.0, 3.0 - 7.0]
    fail(MODELS["between two parameters"](a, b))
    with recorded() as caught:
        w.close()
    assert not caught
