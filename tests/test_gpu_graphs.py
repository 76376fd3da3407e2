"""CUDA graphs: the whole window as one graph, or one fold; replays are bit-equal to eager windows."""

from __future__ import annotations

import pytest
import torch
from conftest import backend_module
from torch.nn import Parameter
from torch.optim import AdamW
from wrapper_helpers import LOW_PRECISION, adam_or_sgd_states, bits, tidy, wrap  # noqa: F401

pytestmark = [pytest.mark.gpu, LOW_PRECISION]

DEVICE = torch.device("cuda")
SIZES = (33, 4097, 130)
STEPS = 4
PLAIN = {}
RICH = {"max_norm": 0.5, "master_weights": True, "state_dtype": torch.float32}


@pytest.fixture(autouse=True)
def compiled():
    backend_module("compiled", DEVICE)


def data(count, dtype, seed=0):
    """[micro-batch][parameter] of values in [0.5, 1.5]."""
    random = torch.Generator().manual_seed(seed)
    drawn = [[torch.rand(size, generator=random) + 0.5 for size in SIZES] for _ in range(count)]
    return [[values.to(dtype).to(DEVICE) for values in micro] for micro in drawn]


class Training:
    """Parameters whose gradients are the inputs, and a wrapper over an optimizer that a graph may hold."""

    def __init__(self, dtype, options, steps=STEPS, tensor_lr=True):
        self.params = [Parameter(p) for p in data(1, dtype, seed=7)[0]]
        self.lr = torch.tensor(0.05).to(DEVICE)
        lr = self.lr if tensor_lr else 0.05
        self.inner = AdamW(self.params, lr=lr, weight_decay=0.3, capturable=True)
        self.wrapper = wrap(self.inner, steps, update="fused", backend="compiled", **options)

    def backward(self, inputs):
        sum((p * x).sum() for p, x in zip(self.params, inputs, strict=True)).backward()

    def micro(self, inputs):
        self.backward(inputs)
        self.wrapper.step()
        self.wrapper.zero_grad()

    def window(self, micros):
        for inputs in micros:
            self.micro(inputs)

    def warm_up(self, micros):
        """On a side stream, as every capture in torch is prepared."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.window(micros)
        torch.cuda.current_stream().wait_stream(side)

    def state(self):
        """All that an update leaves behind, by its bits."""
        moments = [bits(tensor) for _, _, tensor in adam_or_sgd_states(self.inner)]
        counts = [float(self.inner.state[p]["step"]) for p in self.params]
        return [bits(p) for p in self.params], moments, counts, self.wrapper.grad_norm, self.wrapper.updates


def capture(body):
    """Capture what `body()` launches; returns what replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


def put(static, inputs):
    for target, values in zip(static, inputs, strict=True):
        target.copy_(values)


def twins(dtype, options, **more):
    """One to capture and one to stay eager, both past their first window."""
    first = data(more.get("steps", STEPS), dtype, seed=1)
    captured, eager = Training(dtype, options, **more), Training(dtype, options, **more)
    for training in (captured, eager):
        training.warm_up(first)
    assert captured.state() == eager.state()
    return captured, eager


modes = pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, PLAIN), (torch.bfloat16, RICH), (torch.bfloat16, PLAIN | {"rounding": "stochastic"})],
    ids=["plain", "masters and clipping", "stochastic rounding"],
)


@modes
def test_a_graph_of_the_whole_window(dtype, options):
    captured, eager = twins(dtype, options)
    static = data(STEPS, dtype)
    replay = capture(lambda: captured.window(static))
    assert captured.wrapper.updates == 1, "capturing runs nothing"
    assert captured.state() == eager.state()
    for seed in range(2, 5):
        micros = data(STEPS, dtype, seed)
        for target, inputs in zip(static, micros, strict=True):
            put(target, inputs)
        replay()
        eager.window(micros)
        assert captured.state() == eager.state()
        for training in (captured, eager):
            training.lr.mul_(0.5)  # a schedule that a graph can follow
    assert captured.wrapper.updates == 4


@modes
def test_an_eager_window_follows_a_replayed_one(dtype, options):
    captured, eager = twins(dtype, options)
    micros = data(STEPS, dtype, seed=2)
    capture(lambda: captured.window(micros))()
    eager.window(micros)
    for training in (captured, eager):
        training.window(data(STEPS, dtype, seed=3))
    assert captured.state() == eager.state()
    assert captured.wrapper.updates == 3


@modes
@pytest.mark.parametrize("replays", [1, 3, 8])
def test_a_graph_of_one_fold(dtype, options, replays):
    """The window's length is what was replayed; eager, a short one is flushed, and a full one closes by itself."""
    captured, eager = twins(dtype, options, steps=8)
    (static,) = data(1, dtype)
    replay = capture(lambda: captured.micro(static))
    assert captured.state() == eager.state()
    for seed in (2, 3):
        micros = data(replays, dtype, seed)
        for inputs in micros:
            put(static, inputs)
            replay()
        assert captured.wrapper.flush() is True
        eager.window(micros)
        if replays < 8:
            assert eager.wrapper.flush() is True
        assert captured.state() == eager.state()
    assert captured.wrapper.updates == 3


def assert_refused(training, body):
    """`body` raises under capture and says why; the parameters are as they were."""

    def attempt():
        with pytest.raises(RuntimeError, match=r"(?i)graph|captur"):
            body()

    before = [bits(p) for p in training.params]
    capture(attempt)
    for p in training.params:
        p.grad = None
    assert [bits(p) for p in training.params] == before


def test_a_graph_before_the_first_window_is_refused():
    """Buffer and moments would be allocated under capture."""
    training, untried = (Training(torch.float32, PLAIN) for _ in range(2))
    (inputs,) = data(1, torch.float32)
    assert_refused(training, lambda: training.micro(inputs))
    for each in (training, untried):
        each.wrapper.reset()
        each.window(data(STEPS, torch.float32, seed=1))
    assert training.state() == untried.state()


def test_a_graph_that_could_not_follow_its_learning_rate_is_refused():
    training, untried = twins(torch.float32, PLAIN, tensor_lr=False)
    micros = data(STEPS, torch.float32, seed=2)
    assert_refused(training, lambda: training.window(micros))
    for each in (training, untried):
        each.wrapper.reset()
        each.window(micros)
    assert training.state() == untried.state()


def test_a_graph_of_the_rest_of_a_window_is_refused():
    """Replayed, it would close windows that nothing had opened."""
    training, untried = twins(torch.float32, PLAIN)
    first, *rest = data(STEPS, torch.float32, seed=2)
    for each in (training, untried):
        each.micro(first)
    assert_refused(training, lambda: training.window(rest))
    for each in (training, untried):
        each.wrapper.reset()
        each.window([first, *rest])
    assert training.state() == untried.state()


def test_a_flush_under_capture_is_refused():
    training, untried = twins(torch.float32, PLAIN)
    micros = data(STEPS, torch.float32, seed=2)
    for each in (training, untried):
        each.window(micros[:2])
    assert_refused(training, training.wrapper.flush)
    for each in (training, untried):
        each.window(micros[2:])
    assert training.state() == untried.state()
