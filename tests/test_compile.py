"""`torch.compile` around the model, around the training step, around the wrapper's own calls: as without it."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import compiled_autograd, config
from torch._dynamo.backends.registry import lookup_backend
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from wrapper_helpers import LOW_PRECISION, both_updates, params_of, refused, tidy, wrap  # noqa: F401

from fusedaccum import FusedAccumOptimizer, GatedScheduler

pytestmark = [
    LOW_PRECISION,
    # torch.jit's own, when inductor is imported.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]
every_backend = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
STEPS = 2


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend of torch.compile that counts the graphs it is given, and how often they run."""

    def __init__(self, backend):
        self.backend = lookup_backend(backend)
        self.graphs = self.runs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        compiled = self.backend(graph, inputs)

        def run(*args):
            self.runs += 1
            return compiled(*args)

        return run


class Tied(torch.nn.Module):
    """One weight in two layers."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def make_model(kind="plain", dtype=torch.float32):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    return (Tied() if kind == "tied" else plain).to(dtype)


def batch(k, rows=4, dtype=torch.float32):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(k)).to(dtype)


def loss_of(forward, x):
    return forward(x).float().square().mean()


def train_step(forward, w, x):
    loss = loss_of(forward, x)
    loss.backward()
    w.step()
    w.zero_grad()
    return loss.detach()


def assert_equal_models(mine, eager, rtol=1e-6):
    for a, b in zip(mine.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol if a.dtype == torch.float32 else 1.6e-2, atol=rtol / 10)


def adamw(model, update, **options):
    return wrap(AdamW(model.parameters(), lr=0.05), STEPS, update=update, **options)


def assert_trains_alike(mine, w, step, kind="plain", dtype=torch.float32, calls=6, rows=lambda k: 4, rtol=1e-6):
    """`step(x)` trains `mine`, which `w` updates; an eager twin must lose, count and move as it does, call by call."""
    eager = make_model(kind, dtype)
    other = adamw(eager, w._window.options.update)
    for k in range(calls):
        x = batch(k, rows(k), dtype)
        torch.testing.assert_close(step(x), train_step(eager, other, x), rtol=10 * rtol, atol=rtol)
        assert (w.pending, w.updates, w.updated) == ((k + 1) % STEPS, (k + 1) // STEPS, k % STEPS == STEPS - 1)
        assert_equal_models(mine, eager, rtol)
    assert w.grad_norm == pytest.approx(other.grad_norm, rel=10 * rtol)


# The model is compiled


@both_updates
@every_backend
@pytest.mark.parametrize("kind", ["plain", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_compiled_model(wrapped_first, dtype, kind, backend, update):
    model, counting = make_model(kind, dtype), Counting(backend)
    compiled = torch.compile(model, backend=counting)
    if not wrapped_first:
        loss_of(compiled, batch(0, dtype=dtype)).backward()
        model.zero_grad()
    w = adamw(model, update)
    assert_trains_alike(model, w, lambda x: train_step(compiled, w, x), kind, dtype)
    assert counting.graphs == 1


@every_backend
def test_compiled_again_for_other_shapes(backend):
    model, counting = make_model(), Counting(backend)
    w = adamw(model, "auto")
    compiled = torch.compile(model, backend=counting)
    assert_trains_alike(model, w, lambda x: train_step(compiled, w, x), calls=8, rows=lambda k: 3 + k)
    assert counting.graphs == 2  # of the first shape, and of any


@every_backend
def test_compiled_with_autocast(backend):
    def run(compiled):
        model = make_model()
        forward = torch.compile(model, backend=backend) if compiled else model
        w = adamw(model, "auto")
        for k in range(6):
            with torch.autocast("cpu", torch.bfloat16):
                loss = forward(batch(k)).square().mean()
            loss.backward()
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())
            w.step()
        return model

    assert_equal_models(run(True), run(False))


def test_inductor_with_static_gradients():
    """reduce-overhead hands out the memory of its graph, which the next run overwrites; on a CPU it is inductor's."""
    model = make_model()
    w = adamw(model, "auto")
    compiled = torch.compile(model, mode="reduce-overhead")
    static = [torch.empty_like(p) for p in model.parameters()]

    def step(x):
        loss = loss_of(compiled, x)
        for p, buffer, grad in zip(model.parameters(), static, torch.autograd.grad(loss, params_of(w)), strict=True):
            p.grad = buffer.copy_(grad)
        w.step()
        for buffer in static:
            buffer.fill_(1e9)
        return loss.detach()

    assert_trains_alike(model, w, step)


@every_backend
@pytest.mark.parametrize("switch", ["context", "configuration"])
def test_compiled_autograd(switch, backend):
    counting = Counting(backend)
    model = make_model()
    w = adamw(model, "auto")
    compiled = torch.compile(model, backend=counting)

    def step(x):
        loss = loss_of(compiled, x)
        if switch == "configuration":
            with config.patch(compiled_autograd=True):
                torch.compile(lambda: loss.backward(), backend=counting)()
        else:
            with compiled_autograd._enable(torch.compile(backend=counting)):
                loss.backward()
        w.step()
        return loss.detach()

    assert_trains_alike(model, w, step)
    assert counting.graphs >= 2  # the backward is one of them


def test_frozen_and_unfrozen_in_a_compiled_region():
    p, q = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    w = wrap(SGD([p, q], lr=1.0), steps=2)

    @torch.compile(backend="eager")
    def loss(unfrozen):
        q.requires_grad_(unfrozen)
        return (p * 1.0).sum() + (q * 2.0).sum()

    for k in range(8):
        loss(k % 4 < 2).backward()
        w.step()
        w.zero_grad()
    assert (p.tolist(), q.tolist()) == ([-4.0] * 2, [-4.0] * 2)


def test_a_compiled_closure():
    model, counting = make_model(), Counting("eager")
    w = adamw(model, "auto")
    compiled = torch.compile(model, backend=counting)

    def step(x):
        def closure():
            w.zero_grad()
            loss = loss_of(compiled, x)
            loss.backward()
            return loss

        return w.step(closure).detach()

    assert_trains_alike(model, w, step)
    assert (counting.graphs, counting.runs) == (1, 6)


# The training step is compiled


@both_updates
@every_backend
def test_compiled_training_step(backend, update):
    """The wrapper's calls break the graph, once and for all: traced, a count would be a constant or a recompilation."""
    model, counting = make_model(), Counting(backend)
    w = adamw(model, update)
    compiled = torch.compile(lambda x: train_step(model, w, x), backend=counting)

    def step(x):
        with torch.compiler.set_stance("default" if w.updates < 2 else "fail_on_recompile"):
            return compiled(x)

    assert_trains_alike(model, w, step, calls=20)
    assert (counting.graphs, counting.runs) == (2, 40)  # what comes before the wrapper's calls, and after them


@both_updates
def test_compiled_step(update):
    """What torch advises for its own optimizers."""
    model, counting = make_model(), Counting("eager")
    w = adamw(model, update)
    compiled = torch.compile(w.step, backend=counting)

    def step(x):
        loss = loss_of(model, x)
        loss.backward()
        compiled()
        w.zero_grad()
        return loss.detach()

    assert_trains_alike(model, w, step, calls=20)
    assert counting.graphs == 0


@pytest.mark.parametrize("call", ["training step", "step", "flush", "zero_grad", "updated"])
@config.patch(trace_autograd_ops=True)
def test_fullgraph_is_refused(call):
    model = make_model()
    w = adamw(model, "auto")
    x = batch(0)
    train_step(model, w, x)
    loss_of(model, x).backward()
    function = {
        "training step": lambda: train_step(model, w, x),
        "step": w.step,
        "flush": w.flush,
        "zero_grad": w.zero_grad,
        "updated": lambda: w.updated,
    }[call]
    with refused(w, "FusedAccumOptimizer", "on the host", "compile the model", "fullgraph=False"):
        torch.compile(function, backend="eager", fullgraph=True)()


@pytest.mark.parametrize("owner", ["wrapper", "wrapped"])
def test_every_call_in_one_compiled_function(owner):
    model, counting = torch.nn.Linear(3, 1, bias=False), Counting("eager")
    torch.nn.init.zeros_(model.weight)
    inner = SGD(model.parameters(), lr=1.0)
    w = wrap(inner, steps=3)
    scheduler = GatedScheduler(StepLR(w if owner == "wrapper" else inner, 1, gamma=0.5), w)

    @torch.compile(backend=counting)
    def step(x, items):
        loss = model(x).sum()
        loss.backward()
        w.micro_batch(mean_of=items)
        w.step()
        scheduler.step()
        w.zero_grad()
        held = w.master_grad(model.weight).sum().item()
        return w.pending, w.updates, w.updated, w.will_update, w.param_groups[0]["lr"], held, w.state_dict()

    seen = [step(torch.ones(1, 3), n)[:-1] for n in (1, 2, 1) * 3]
    assert [s[0] for s in seen] == [1, 2, 0] * 3
    assert [s[1] for s in seen] == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert [s[2] for s in seen] == [False, False, True] * 3
    assert [s[3] for s in seen] == [False, True, False] * 3
    assert [s[4] for s in seen] == [1.0] * 2 + [0.5] * 3 + [0.25] * 3 + [0.125]
    assert [s[5] for s in seen] == [3.0, 9.0, 0.0] * 3
    assert model.weight.tolist() == [[-1.75] * 3]
    assert counting.graphs <= 2


def test_steps_set_flush_and_reset_in_a_compiled_function():
    p = torch.nn.Parameter(torch.zeros(2))
    w = wrap(SGD([p], lr=1.0), steps=4)

    @torch.compile(backend="eager")
    def run(gradients, steps):
        for g in gradients:
            (p * g).sum().backward()
            w.step()
        if steps is None:
            w.reset()
        else:
            w.steps = steps
            w.flush()

    run((1.0, 3.0), 2)
    assert (w.steps, w.updates, p.tolist()) == (2, 1, [-2.0] * 2)
    run((5.0,), None)
    run((1.0, 3.0, 4.0), 3)
    assert (w.steps, w.updates, w.pending, p.tolist()) == (3, 3, 0, [-8.0] * 2)


@pytest.mark.parametrize("limit", [1, 2])
def test_at_the_limit_of_recompilations(limit):
    """Where the compiler gives up on a function, its eager form must find the wrapper as the graphs left it."""
    model = make_model()
    w = adamw(model, "auto")
    step = torch.compile(lambda x: train_step(model, w, x), backend="eager")
    with config.patch(recompile_limit=limit, automatic_dynamic_shapes=False):
        assert_trains_alike(model, w, step, calls=12, rows=lambda k: 3 + k)


def test_a_wrapper_made_in_a_compiled_function():
    p = torch.nn.Parameter(torch.zeros(2))
    inner = SGD([p], lr=1.0)

    @torch.compile(backend="eager")
    def make():
        return FusedAccumOptimizer(inner, steps=2)

    w = make()
    for g in (1.0, 3.0):
        (p * g).sum().backward()
        w.step()
    assert (p.tolist(), w.updates) == ([-2.0] * 2, 1)


def test_a_subclass_with_a_step_of_its_own():
    class Logging(FusedAccumOptimizer):
        def step(self, closure=None, **counts):
            calls.append(self.pending)
            return super().step(closure, **counts)

    calls = []
    p = torch.nn.Parameter(torch.zeros(2))
    w = Logging(SGD([p], lr=1.0), steps=3)
    compiled = torch.compile(w.step, backend="eager")
    for g in (1.0, 2.0, 3.0) * 2:
        (p * g).sum().backward()
        compiled()
    assert calls == [0, 1, 2] * 2
    assert p.tolist() == [-4.0] * 2


@every_backend
def test_a_wrapped_optimizer_whose_step_is_compiled(backend):
    model, counting = make_model(), Counting(backend)
    inner = AdamW(model.parameters(), lr=0.05)
    inner.step = torch.compile(inner.step, backend=counting)
    w = wrap(inner, STEPS, update="wrapped")
    # The compiled AdamW corrects its bias in float32, the other one in float64.
    assert_trains_alike(model, w, lambda x: train_step(model, w, x), calls=12, rtol=1e-4)
    assert 1 <= counting.graphs <= 4
    assert counting.runs >= 6
