"""CUDA graphs, as tests/graph_model.py models them: both forms against eager windows, and what is refused."""

from __future__ import annotations

import pytest
import torch
from graph_model import capturing, rates_are_tensors
from torch.nn import Linear, Sequential, Tanh
from torch.optim import SGD, AdamW
from wrapper_helpers import LOW_PRECISION, tidy, wrap  # noqa: F401

from fusedaccum import capture

N = 4
ROWS = 6


@pytest.fixture(autouse=True)
def _cpu_as_device(monkeypatch):
    monkeypatch.setattr(capture, "rates_on_device", rates_are_tensors)


def lr(value=0.05):
    return torch.tensor(value)


MAKERS = {
    "adamw": lambda params: AdamW(params, lr=lr(), weight_decay=0.1, capturable=True),
    "amsgrad": lambda params: AdamW(params, lr=lr(), amsgrad=True, capturable=True),
    "momentum": lambda params: SGD(params, lr=lr(), momentum=0.9),
    "sgd": lambda params: SGD(params, lr=lr()),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


class Run:
    """A small model with a static input, and a wrapper around its optimizer. Two of one seed are equal."""

    def __init__(self, make=MAKERS["adamw"], dtype=torch.float32, **options):
        torch.manual_seed(1)
        self.model = Sequential(Linear(5, 7), Tanh(), Linear(7, 3)).to(dtype)
        self.w = wrap(make(self.model.parameters()), N, **options)
        self.x = torch.zeros(ROWS, 5, dtype=dtype)

    def micro(self, **weight):
        self.model(self.x).square().mean().backward()
        self.w.step(**weight)

    def window(self, inputs):
        for x in inputs:
            self.x.copy_(x)
            self.micro()

    def same_as(self, other):
        state = [v for s in self.w.state.values() for v in s.values()]
        theirs = [v for s in other.w.state.values() for v in s.values()]
        mine = [*self.model.parameters(), *state]
        return all(map(torch.equal, mine, [*other.model.parameters(), *theirs]))


def data(seed, count=N):
    torch.manual_seed(seed)
    return [torch.randn(ROWS, 5) for _ in range(count)]


def pair(make=MAKERS["adamw"], **options):
    """A run to be captured and its eager twin, one window old: buffer and state exist."""
    run, twin = Run(make, **options), Run(make, **options)
    for each in (run, twin):
        each.window(data(0))
    return run, twin


OPTIONS = {
    "plain": {},
    "clipped": {"max_norm": 0.01},
    "masters": {"master_weights": True, "dtype": torch.bfloat16},
    "sum": {"reduction": "sum"},
}


@every_maker
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_whole_window_as_one_graph(monkeypatch, make, options):
    run, twin = pair(make, **options)
    inputs = [torch.zeros_like(run.x) for _ in range(N)]
    with capturing(monkeypatch) as graph:
        for x in inputs:
            run.x = x
            run.micro()
    assert run.same_as(twin)  # nothing has run yet
    assert (run.w.pending, run.w.updates) == (0, 1)
    for seed in (1, 2, 3):
        for x, values in zip(inputs, data(seed), strict=True):
            x.copy_(values)
        graph.replay()
        twin.window(data(seed))
        assert run.same_as(twin)
        assert run.w.grad_norm == twin.w.grad_norm
    assert (run.w.pending, run.w.updates) == (0, 4)


@every_maker
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("flush_captured", [False, True], ids=["eager flush", "captured flush"])
def test_folds_alone(monkeypatch, make, options, flush_captured):
    run, twin = pair(make, **options)
    with capturing(monkeypatch) as graph:
        run.micro()
    flush = run.w.flush
    if flush_captured:
        with capturing(monkeypatch) as boundary:
            run.w.flush()
        flush = boundary.replay
    for seed, count in ((1, N), (2, N), (3, 1), (4, 3)):  # short windows too
        for values in data(seed, count):
            run.x.copy_(values)
            graph.replay()
        flush()
        twin.window(data(seed, count))
        if count < N:
            twin.w.flush()
        assert run.same_as(twin)
        assert run.w.grad_norm == twin.w.grad_norm
        assert run.w.updates == twin.w.updates


def test_replayed_folds_are_counted_and_saved(monkeypatch):
    run, twin = pair()
    with capturing(monkeypatch) as graph:
        run.micro()
    assert run.w.pending == 0
    for values in data(1, 3):
        run.x.copy_(values)
        graph.replay()
    twin.window(data(1, 3))
    assert run.w.pending == 3
    saved = run.w.state_dict()["fusedaccum"]
    assert (saved["pending"], saved["mode"]) == (3, "plain")
    for index, p in enumerate(twin.model.parameters()):
        assert torch.equal(saved["sums"][index], twin.w.master_grad(p))
    resumed = Run()
    resumed.model.load_state_dict(run.model.state_dict())
    resumed.w.load_state_dict(run.w.state_dict())
    for each in (resumed, twin):
        each.window(data(2, 1))
    assert resumed.same_as(twin)


def test_a_window_without_a_replay_changes_nothing(monkeypatch):
    run, twin = pair()
    with capturing(monkeypatch) as graph:
        run.micro()
    run.w.flush()
    assert run.same_as(twin)
    assert (run.w.updates, run.w.updated) == (1, False)
    run.x.copy_(data(1)[0])
    graph.replay()
    run.w.reset()  # and dropped sums are gone
    run.w.flush()
    assert run.same_as(twin)


def test_the_learning_rate_is_read_at_every_replay(monkeypatch):
    run, twin = pair()
    with capturing(monkeypatch) as graph:
        for _ in range(N):
            run.micro()
    for rate in (0.01, 0.0, 0.3):
        run.x.copy_(data(5, 1)[0])
        for each in (run, twin):
            each.w.param_groups[0]["lr"].fill_(rate)
        graph.replay()
        twin.window(data(5, 1) * N)
        assert run.same_as(twin)


def test_a_captured_step_launches_kernels_and_allocates_nothing(monkeypatch):
    """One of ours a micro-batch; at the boundary norm, scalars, update, and a few numbers of one element."""
    run, _ = pair(master_weights=True, dtype=torch.bfloat16, max_norm=1.0)
    for last in (False, False, False, True):
        run.model(run.x).square().mean().backward()
        with capturing(monkeypatch) as graph:
            run.w.step()
        assert graph.allocated == []
        ours = [name.partition("::")[2] for name in graph.launched if name.startswith("fusedaccum")]
        assert ours == ["fold"] + ["square_total", "close_window", "adam"] * last
        assert len(graph.launched) - len(ours) == (8 if last else 1), graph.launched


LATER = "run one whole window"


def fresh(**options):
    return Run(**options)


def used(**options):
    run = Run(**options)
    run.window(data(0))
    return run


def with_eager_micro_batch():
    run = used()
    run.micro()
    return run


def with_float_rate():
    return used(make=lambda params: AdamW(params, lr=0.05, capturable=True))


def with_new_rate_tensor():
    run = used(make=lambda params: AdamW(params, lr=0.05, capturable=True))
    run.w.param_groups[0]["lr"] = lr()
    return run


def with_new_decay():
    run = used()
    run.w.param_groups[0]["weight_decay"] = 0.5
    return run


def with_new_group():
    run = used()
    extra = torch.nn.Parameter(torch.ones(3))
    extra.grad = torch.ones(3)
    run.w.add_param_group({"params": [extra], "lr": lr()})
    return run


def with_cleared_state():
    run = used()
    run.w.state.clear()
    return run


def with_new_weights():
    run = used(master_weights=True, dtype=torch.bfloat16)
    with torch.no_grad():
        run.model[0].weight.mul_(2)
    return run


def with_new_steps():
    run = used()
    run.w.steps = 2 * N
    return run


REFUSED = {
    "another number of steps": (with_new_steps, "no window of these `steps`"),
    "before any window": (fresh, LATER),
    "capturable=False": (lambda: used(make=lambda params: AdamW(params, lr=lr())), "pass capturable=True"),
    "the wrapped update": (lambda: used(make=MAKERS["sgd"], update="wrapped"), "only the fused update"),
    "another backend": (lambda: used(backend="reference"), "backend='compiled'"),
    "after an eager micro-batch": (with_eager_micro_batch, "holds 1 eager micro-batches; flush"),
    "a number as learning rate": (with_float_rate, "lr=torch.tensor"),
    "a learning rate that was a number": (with_new_rate_tensor, LATER),
    "another weight decay": (with_new_decay, LATER),
    "a new group": (with_new_group, LATER),
    "cleared state": (with_cleared_state, LATER),
    "changed parameters with masters": (with_new_weights, LATER),
}


@LOW_PRECISION
@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_captured_is_refused(monkeypatch, make, words):
    run = make()
    before = [p.clone() for p in run.model.parameters()]
    pending = run.w.pending
    run.model(run.x).square().mean().backward()
    with (
        capturing(monkeypatch),
        pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph because") as text,
    ):
        run.w.step()
    assert words in str(text.value)
    assert all(map(torch.equal, before, run.model.parameters()))
    assert run.w.pending == pending


def test_the_end_of_an_eager_window_is_refused(monkeypatch):
    run, twin = used(), used()
    for each in (run, twin):
        each.micro()
    with capturing(monkeypatch), pytest.raises(RuntimeError, match=r"flush\(\) cannot be captured"):
        run.w.flush()
    assert run.w.flush()
    assert twin.w.flush()
    assert run.same_as(twin)


def test_item_counts_are_refused(monkeypatch):
    run = used()
    run.model(run.x).square().mean().backward()
    with capturing(monkeypatch), pytest.raises(RuntimeError, match="leave mean_of and sum_of out"):
        run.w.step(mean_of=3)


def test_an_eager_step_beside_captured_folds_is_refused(monkeypatch):
    run, twin = pair()
    with capturing(monkeypatch) as graph:
        run.micro()
    graph.replay()
    with pytest.raises(RuntimeError, match="was captured in a CUDA graph"):
        run.micro()
    assert run.w.pending == 1
    run.w.zero_grad()
    run.w.load_state_dict(twin.w.state_dict())  # the way out
    run.window(data(1))
    twin.window(data(1))
    assert run.same_as(twin)


@pytest.mark.parametrize("captured", [1, N], ids=["folds alone", "whole windows"])
def test_a_graph_keeps_its_steps(monkeypatch, captured):
    """Another `steps`, set later, is of eager windows: 1/steps, and the count of micro-batches, are the graph's own."""
    run, twin = pair()
    with capturing(monkeypatch) as graph:
        for _ in range(captured):
            run.micro()
    run.w.steps = 2
    for _ in range(2):
        if captured == N:
            run.window(data(9, 2))  # an eager one of 2
            twin.w.steps = 2
            twin.window(data(9, 2))
            twin.w.steps = N
        run.x.copy_(data(1, 1)[0])
        for _ in range(N // captured):
            graph.replay()
        if captured < N:
            run.w.flush()
        twin.window(data(1, 1) * N)
        assert run.same_as(twin)
    assert run.w.updates == twin.w.updates


def test_eager_windows_between_replays_of_whole_windows(monkeypatch):
    run, twin = pair()
    with capturing(monkeypatch) as graph:
        for _ in range(N):
            run.micro()
    for seed in (1, 2):
        run.x.copy_(data(seed, 1)[0])
        graph.replay()
        twin.window(data(seed, 1) * N)
        for each in (run, twin):
            each.window(data(seed + 10))
        assert run.same_as(twin)
    assert run.w.updates == 5
