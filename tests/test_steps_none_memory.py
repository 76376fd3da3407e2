"""steps=None: real allocations, as torch's memory profiler counts them on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.profiler import ProfilerActivity, profile
from wrapper_helpers import (
    LOW_PRECISION,
    both_updates,
    tidy,  # noqa: F401
    use_two_buffers,
    wrap,
)

from fusedaccum.backends import compiled

pytestmark = LOW_PRECISION

COUNT, NUMEL = 8, 50_000
TABLES = 40_000  # bytes: tile tables, scalars, and what lists of pointers take
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def peak(function) -> int:
    """The most bytes that were allocated at once while `function` ran, above what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        mark = torch.empty(1024)
        function()
    del mark
    events, totals = [*profiler.profiler.kineto_results.experimental_event_tree()], []
    while events:
        event = events.pop()
        events += event.children
        fields = event.extra_fields
        if hasattr(fields, "total_allocated"):
            totals.append((event.start_time_ns, fields.total_allocated, fields.alloc_size))
    totals.sort()
    _, first, size = totals[0]
    assert size == 4096
    return max(total for _, total, _ in totals) - first


class Training:
    def __init__(self, dtype, make, **options):
        self.params = [torch.nn.Parameter(torch.zeros(NUMEL, dtype=dtype)) for _ in range(COUNT)]
        self.data = [torch.ones(NUMEL, dtype=dtype) for _ in range(COUNT)]
        inner = make(self.params)
        self.opt = wrap(inner, None, **options) if options else inner

    def backward(self):
        for _ in range(3):
            sum((p * x).sum() for p, x in zip(self.params, self.data, strict=True)).backward()

    def window(self):
        self.backward()
        self.opt.step()
        self.opt.zero_grad()


def test_the_profiler_sees_what_is_allocated():
    assert peak(lambda: torch.empty(100_000)) == 400_000
    assert peak(lambda: [torch.empty(100_000) for _ in range(3)]) == 1_200_000
    assert peak(lambda: [torch.empty(100_000).sum() for _ in range(3)]) < 401_000


@dtypes
def test_backwards_take_4_bytes_a_parameter_and_one_gradient(dtype):
    """The forward's product of one parameter lives while the next is made; the first backward builds the buffer."""
    training = Training(dtype, lambda ps: SGD(ps, lr=0.1), update="fused")
    one = NUMEL * dtype.itemsize
    taken = peak(training.backward)
    assert 4 * COUNT * NUMEL <= taken <= 4 * COUNT * NUMEL + one + TABLES
    assert all(p.grad.dtype == torch.float32 for p in training.params)
    for _ in range(2):
        assert peak(training.backward) <= 2 * one + TABLES, "from then on"
        training.opt.zero_grad()


@dtypes
@both_updates
def test_a_step_takes_nothing_that_the_bare_optimizer_does_not(dtype, update):
    """Fused: nothing at all. Wrapped: gradients rounded to 16 bits, and what the optimizer takes."""
    training = Training(dtype, lambda ps: AdamW(ps, lr=0.1, foreach=False), update=update)
    bare = Training(dtype, lambda ps: AdamW(ps, lr=0.1, foreach=False))
    for one in (training, bare):
        one.window()
        one.backward()
    rounded = 0 if dtype == torch.float32 else 2 * COUNT * NUMEL
    allowed = TABLES if update == "fused" else peak(bare.opt.step) + rounded + TABLES
    assert peak(training.opt.step) <= allowed


@dtypes
def test_nothing_grows(dtype):
    training = Training(dtype, lambda ps: AdamW(ps, lr=0.1), update="fused")
    for _ in range(2):
        training.window()

    def windows():
        for _ in range(10):
            training.window()

    assert peak(windows) <= 2 * NUMEL * dtype.itemsize + TABLES


@dtypes
def test_a_fold_without_memory_leaves_the_sum(dtype, monkeypatch):
    """As where autograd has none to add: the window goes on without that gradient."""

    def full(*arguments):
        raise torch.OutOfMemoryError("no memory")

    p = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    w = wrap(SGD([p], lr=1.0), None)
    p.sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "fold", full)
        with pytest.raises(torch.OutOfMemoryError):
            (p * 4).sum().backward()
    assert p.grad.tolist() == [1.0] * 4
    (p * 2).sum().backward()
    w.step()
    assert p.tolist() == [-3.0] * 4


@pytest.mark.parametrize("two", [False, True], ids=["one buffer", "two buffers"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_update_without_memory_leaves_the_sums(dtype, two, monkeypatch):
    """As where the bare optimizer has none: the next step() updates with them."""
    if two:
        use_two_buffers(monkeypatch)
    params = [torch.nn.Parameter(torch.zeros(4, dtype=dtype)) for _ in range(2)]
    w = wrap(SGD(params, lr=1.0), None, update="wrapped")
    for factor in (1, 2):
        (params[0].sum() * factor + params[1].sum()).backward()
    kernel, calls = compiled.emit, []

    def full(*arguments):
        calls.append(arguments)
        if len(calls) == 1 + two:
            raise torch.OutOfMemoryError("no memory")
        kernel(*arguments)

    monkeypatch.setattr(compiled, "emit", full)
    with pytest.raises(torch.OutOfMemoryError):
        w.step()
    assert [p.grad.tolist() for p in params] == [[3.0] * 4, [2.0] * 4]
    w.step()
    assert [p.tolist() for p in params] == [[-3.0] * 4, [-2.0] * 4]


def test_an_update_without_memory_leaves_no_gradients(monkeypatch):
    """steps=N: those of the first buffer would be folded by the next step()."""
    use_two_buffers(monkeypatch)
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    w = wrap(SGD(params, lr=1.0), 1, update="wrapped")
    kernel, calls = compiled.emit, []

    def full(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        kernel(*arguments)

    monkeypatch.setattr(compiled, "emit", full)
    sum(p.sum() for p in params).backward()
    with pytest.raises(torch.OutOfMemoryError):
        w.step()
    assert [p.grad for p in params] == [None, None]
    assert w.flush()
    assert [p.tolist() for p in params] == [[-1.0] * 4] * 2
