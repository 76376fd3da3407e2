"""fold="backward" with backwards of every form: several, inside one another, over some inputs, twice differentiable,
in other threads, compiled.
"""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from backward_runs import BYTE, held, sgd_pair, start_values
from torch._dynamo import compiled_autograd
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint
from wrapper_helpers import DTYPES, LOW_PRECISION, Toy, tidy, wrap  # noqa: F401

pytestmark = [
    LOW_PRECISION,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
both_buckets = pytest.mark.parametrize("bucket", [BYTE, 25], ids=["1 byte", "25 MiB"])


def integers(k, *shape):
    """Small ones: in float32 no sum or product of a few rounds."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(k)).float()


# Several gradients of one parameter in a micro-batch


@both_buckets
def test_two_backwards_a_micro_batch(bucket):
    """Each `p.grad` is gone after each backward, and a micro-batch is one call of step()."""
    params, w = sgd_pair(bucket_mb=bucket)
    for k in range(2):
        for g in (1.0, 2.0):
            ((params[0] + 2 * params[1]) * (g + k)).sum().backward()
            assert all(p.grad is None for p in params)
        w.step()
        assert w.pending == (k + 1) % 2
    assert [p[0].item() for p in params] == [2.0 - 4.0, 3.0 - 8.0]


@both_buckets
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_several_backwards_are_nearer_to_the_truth(dtype, bucket):
    """autograd adds gradients of 16 bits up in 16 bits, a fold for each does not."""
    errors = {}
    for fold in ("step", "backward"):
        (p,) = start_values(dtype, [(2000,)])
        w = wrap(SGD([p], lr=1.0), 2, fold=fold, **({"bucket_mb": bucket} if fold == "backward" else {}))
        random, truth = torch.Generator().manual_seed(0), torch.zeros(2000, dtype=torch.float64)
        for _ in range(8):
            g = torch.randn(2000, generator=random).to(dtype)
            (p * g).sum().backward()
            truth += g.double() / 2
        w.step()
        errors[fold] = (w.master_grad(p).double() - truth).abs().max().item()
    assert errors["backward"] < 1e-6 < 1e-4 < errors["step"]


@both_buckets
def test_the_norm_after_two_backwards_in_the_last_micro_batch(bucket):
    """q's only gradient is the first micro-batch's; p has two in the last."""
    p, q = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    w = wrap(SGD([p, q], lr=1.0), 3, fold="backward", bucket_mb=bucket, max_norm=1.0)
    (p + 12 * q).sum().backward()
    w.step()
    (p * 2).sum().backward()
    w.step()
    (p * 2).sum().backward()
    (p * 4).sum().backward()
    w.step()
    assert w.grad_norm == pytest.approx(5.0)  # of means of 3 and 4
    assert (p.item(), q.item()) == pytest.approx((-0.6, -0.8), rel=1e-5)


@both_buckets
def test_the_same_graph_twice(bucket):
    params, w = sgd_pair(bucket_mb=bucket)
    loss = (params[0] * params[1]).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert held(w, params) == [3.0, 2.0]  # half of two gradients


@both_buckets
def test_some_inputs_only(bucket):
    (p, q), w = sgd_pair(bucket_mb=bucket)
    loss = (p * q).sum()
    loss.backward(inputs=[p], retain_graph=True)
    assert (held(w, [p, q]), p.grad, q.grad) == ([1.5, 0.0], None, None)
    loss.backward(inputs=[q])
    assert (held(w, [p, q]), q.grad) == ([1.5, 1.0], None)
    w.step()
    assert w.pending == 1


def test_gradients_for_somebody_else_are_none_of_ours():
    """Neither torch.autograd.grad nor a backward over other inputs."""
    (p, q), w = sgd_pair()
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        (p * x).sum().backward()
        assert torch.autograd.grad((p * q * x).sum(), [p, q])[0][0] == 3.0
        (q * x).sum().backward(inputs=[x])
        assert q.grad is None
        w.step()
    assert p[0].item() == 1.0  # the mean of two ones
    assert q[0].item() == 3.0
    assert x.grad[0] == 2 * 2.0 + 2 * 3.0


# Checkpointing


def straight(f, x):
    return f(x)


def reentrant(f, x):
    return checkpoint(f, x, use_reentrant=True)


def replayed(f, x):
    return checkpoint(f, x, use_reentrant=False)


FORMS = {"reentrant": reentrant, "not reentrant": replayed}


def one_segment(run, a, b, x):
    return run(lambda h: torch.relu(h @ a) @ b, x)


def twice_in_one(run, a, b, x):
    return run(lambda h: h @ a @ a, x) @ b


def in_two(run, a, b, x):
    return run(lambda h: h @ b, run(lambda h: h @ a, run(lambda h: h @ a, x)))


def nested(run, a, b, x):
    return run(lambda h: run(lambda g: run(lambda f: f @ b, g @ a), h @ a) @ a, x)


def around(run, a, b, x):
    """Parameters outside of the segment get their gradients before and after it."""
    return run(lambda h: h @ a, x @ b) @ b


MODELS = {f.__name__: f for f in (one_segment, twice_in_one, in_two, nested, around)}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's own, of a segment in another
@both_buckets
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("backwards", [1, 2])
def test_checkpointing(backwards, model, form, bucket):
    """The same sums, and the same count of micro-batches, as without."""
    results = []
    for run, fold in ((straight, {"fold": "step"}), (form, {"fold": "backward", "bucket_mb": bucket})):
        a, b = (torch.nn.Parameter(integers(k, 4, 4)) for k in (1, 2))
        w = wrap(SGD([a, b], lr=2.0**-10), 4, **fold)
        for k in range(4):
            for part in range(backwards):
                x = integers(10 + 2 * k + part, 3, 4).requires_grad_()
                model(run, a, b, x).square().sum().backward()
                assert run is straight or (a.grad is None and b.grad is None)
            w.step()
            assert w.pending == (k + 1) % 4
        results.append([a.detach(), b.detach(), torch.tensor(w.grad_norm)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_deep_nesting_runs_in_other_threads():
    """The engine takes a new thread where backwards stand too deep in one another."""
    (p, q), w = sgd_pair(n=1)

    def deeper(depth, x):
        return x * p if depth == 0 else reentrant(functools.partial(deeper, depth - 1), x) * q

    deeper(70, torch.ones(1, requires_grad=True)).mul(3.0**-70).sum().backward()
    w.step()
    assert held(w, [p, q]) == pytest.approx([0.5, 2 * 70 / 3 / 2], rel=1e-5)


def test_a_backward_inside_a_hook():
    """Of another graph over the same parameters."""
    (p, q), w = sgd_pair(n=1)
    h = p * 2

    def hook(grad):
        with torch.enable_grad():
            (q * 7).sum().backward()

    h.register_hook(hook)
    (h * q).sum().backward()
    assert (p.grad, q.grad) == (None, None)
    assert held(w, [p, q]) == [3.0, (4.0 + 7.0) / 2]


# Twice differentiable


@pytest.mark.filterwarnings("ignore:(?s).*create_graph=True")  # torch's own
@both_buckets
def test_create_graph(bucket):
    """Second derivatives are those of stock torch; the sums hold values and no graph."""
    (p,), w = sgd_pair(n=1, values=(2.0,), bucket_mb=bucket)
    (p**3).sum().backward(create_graph=True)
    assert p.grad is None
    assert held(w, [p]) == [6.0]
    assert not w.master_grad(p).requires_grad
    (g,) = torch.autograd.grad((p**3).sum(), p, create_graph=True)
    (g**2).sum().backward()  # 2 * 3p^2 * 6p
    assert held(w, [p]) == [6.0 + 144.0]
    w.step()
    w.flush()
    assert p.item() == 2.0 - 300.0


def test_a_gradient_penalty_between():
    results = []
    for fold in ("step", "backward"):
        p, q = (torch.nn.Parameter(torch.full((2,), v)) for v in (2.0, 3.0))
        w = wrap(SGD([p, q], lr=2.0**-6), 2, fold=fold)
        for _ in range(4):
            x = torch.ones(2, requires_grad=True)
            out = (p * x * x * q).sum()
            (g,) = torch.autograd.grad(out, x, create_graph=True)
            (out + (g.square().sum() - 1) ** 2).backward()
            w.step()
        results.append([p.detach(), q.detach()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# Threads


def in_thread(function):
    errors = []

    def run():
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_a_backward_in_another_thread():
    toys = [Toy(2, fold=fold) for fold in ("step", "backward")]
    for toy in toys:
        for g in (1, 2, 5, 7):
            in_thread(functools.partial(toy.backward, g))
            assert toy.w._window.in_backward is None or toy.p.grad is None
            toy.w.step()
        assert toy.value == -7.5


def wait(barrier, grad):
    barrier.wait(30)


def test_backwards_in_two_threads_at_once():
    """Each waits inside its pass for the other one."""
    params, w = sgd_pair(n=1, values=(2.0, 3.0, 5.0, 7.0), bucket_mb=BYTE)
    for _ in range(2):
        barrier = threading.Barrier(2)

        def work(a, b, barrier=barrier):
            h = (a * 2).clone()
            h.register_hook(functools.partial(wait, barrier))
            (h * b).sum().backward()

        threads = [threading.Thread(target=work, args=pair) for pair in (params[:2], params[2:])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(p.grad is None for p in params)
        w.step()
    assert [p.item() for p in params] == [2.0 - 6.0, 3.0 - 4.0, 5.0 - 14.0, 7.0 - 10.0]


# Compiled


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def trained(model, forward, w, context=None):
    for k in range(6):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(k))
        loss = forward(x).square().mean()
        if context is None:
            loss.backward()
        else:
            with context():
                loss.backward()
        # Compiled autograd says nobody when it is over, and leaves them for step().
        assert all((p.grad is None) == (context is None) for p in model.parameters())
        w.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.usefixtures("fresh_compiler")
@both_buckets
@pytest.mark.parametrize("wrapped_first", [True, False])
@pytest.mark.parametrize("autograd", ["eager", "compiled"])
def test_compiled(autograd, wrapped_first, bucket):
    """As eager code, with the backward compiled by AOTAutograd, or by compiled autograd with the hooks in it."""
    eager = small_model()
    options = {"fold": "backward", "bucket_mb": bucket}
    want = trained(eager, eager, wrap(AdamW(eager.parameters(), lr=0.05), 2, **options))
    model = small_model()
    compiled = torch.compile(model, backend="aot_eager")
    if not wrapped_first:
        compiled(torch.ones(4, 3)).sum().backward()
        model.zero_grad()
    w = wrap(AdamW(model.parameters(), lr=0.05), 2, **options)
    context = None
    if autograd == "compiled":

        def context():
            return compiled_autograd._enable(torch.compile(backend="eager"))

    got = trained(model, compiled, w, context)
    assert (w.pending, w.updates) == (0, 3)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_training_step():
    """The backward inside of what is compiled: as outside of it."""
    eager = small_model()
    want = trained(eager, eager, wrap(AdamW(eager.parameters(), lr=0.05), 2, fold="backward"))
    model = small_model()
    w = wrap(AdamW(model.parameters(), lr=0.05), 2, fold="backward")

    @torch.compile(backend="aot_eager")
    def train_step(x):
        loss = model(x).square().mean()
        loss.backward()
        w.step()
        w.zero_grad()

    for k in range(6):
        train_step(torch.randn(4, 3, generator=torch.Generator().manual_seed(k)))
    assert (w.pending, w.updates) == (0, 3)
    for a, b in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-5, atol=1e-7)
