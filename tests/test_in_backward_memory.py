"""What fold="backward" holds, counted at torch's allocator: a bucket of gradients or the largest one, and the sums."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from wrapper_helpers import LOW_PRECISION, tidy, wrap  # noqa: F401

pytestmark = LOW_PRECISION
MIB = 2**20
# Elements: several that fit a bucket together, one that fills it, some that are larger, small ones between them.
SIZES = [1000, 60_000, 30_000, 30_000, 30_000, 65_536, 70, 200_000, 500_000, 3, 100_000, 20_000]
SCALARS = 1024  # bytes: the losses, and what flows back between the gradients
START = 4  # bytes: the gradient of the scalar with which a chain begins


def allocated(work):
    """(the most that `work` held at once, what is left of it), in bytes; temporaries inside operators count."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, held


class Leaves(torch.autograd.Function):
    """The identity; its backward makes a gradient for p as large as p, and nothing else."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.p = p
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones_like(ctx.p)


def chain(params):
    """A loss whose backward makes one gradient after another, the last parameter's first."""
    x = torch.zeros((), requires_grad=True)
    for p in params:
        x = Leaves.apply(x, p)
    return x


def make(dtype=torch.float32, **options):
    params = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in SIZES]
    return params, wrap(SGD(params, lr=1.0), 3, **options)


def tables(w):
    """Bytes of what describes the buffer, the tables of its parts included, and of padding between its segments."""
    (buffer,) = w._window.buffers
    return 2 * buffer.tiles.nbytes + buffer.partials.nbytes + (64 * 4 + 64) * len(buffer.params)


BUCKETS = {"1 byte": 1 / MIB, "256 KiB": 0.25, "25 MiB": 25}
every_bucket = pytest.mark.parametrize("bucket", BUCKETS.values(), ids=BUCKETS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@every_dtype
@every_bucket
def test_one_bucket_or_the_largest_gradient(bucket, dtype):
    """In every backward; nothing of it is left, and step() allocates next to nothing."""
    params, w = make(dtype, fold="backward", bucket_mb=bucket)
    everything, largest = sum(p.nbytes for p in params), max(p.nbytes for p in params)
    most = min(max(int(bucket * MIB), largest), everything) + SCALARS
    losses = [chain(params) for _ in range(4)]
    for k, loss in enumerate(losses):
        peak, left = allocated(loss.backward)
        if k == 0:  # the sums are made
            sums = 4 * sum(SIZES)
            assert sums <= left <= sums + tables(w)
            assert peak <= left + most, "4 bytes a parameter, and one bucket or the largest gradient"
        else:
            assert peak <= most
            assert left <= START
        assert allocated(w.step)[0] <= SCALARS
    assert (w.updates, w.pending) == (1, 1)


def test_what_it_is_measured_against():
    """fold="step" holds a whole set of gradients, and the same sums."""
    params, w = make(fold="step")
    everything = sum(p.nbytes for p in params)
    for k in range(2):
        peak, left = allocated(chain(params).backward)
        assert peak >= left >= everything
        peak, left = allocated(w.step)
        assert left == pytest.approx(0 if k == 0 else -everything, abs=tables(w))


@every_bucket
def test_hooks_of_others_hold_a_gradient_once(bucket):
    """One that was registered after ours keeps a gradient alive until the next: in the first backward only."""
    params, w = make(fold="backward", bucket_mb=bucket)
    most = max(int(bucket * MIB), max(p.nbytes for p in params)) + SCALARS
    seen = []
    for p in params:
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.nbytes))
    for k in range(3):
        peak, left = allocated(chain(params).backward)
        if k:
            assert peak <= most
            assert left <= START
        w.step()
    assert seen == 3 * [p.nbytes for p in params[::-1]]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_segments(reentrant):
    """A reentrant one ends a backward of its own, in the middle of another."""
    params, w = make(fold="backward", bucket_mb=0.25)
    most = max(p.nbytes for p in params) + 4 * SCALARS

    def loss():
        x = torch.zeros((), requires_grad=True)
        for k in range(0, len(params), 3):
            x = checkpoint(lambda x, k=k: chain_on(x, params[k : k + 3]), x, use_reentrant=reentrant)
        return x

    for k in range(3):
        made = loss()
        peak, left = allocated(made.backward)
        if k:
            assert peak <= most
            assert left <= SCALARS
        w.step()


def chain_on(x, params):
    for p in params:
        x = Leaves.apply(x, p)
    return x


def test_a_model_of_linear_layers():
    """Its gradients are made by torch; activations of one row are small beside them."""
    torch.manual_seed(0)
    peaks = {}
    for fold in ("step", "backward"):
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
        options = {"bucket_mb": 0.5} if fold == "backward" else {}
        w = wrap(SGD(model.parameters(), lr=0.1), 4, fold=fold, **options)
        for _ in range(3):
            loss = model(torch.ones(1, 256)).square().mean()
            peaks[fold], _ = allocated(loss.backward)
            w.step()
    assert peaks["step"] >= 8 * 256 * 256 * 4
    assert peaks["backward"] <= 0.5 * MIB + 64 * SCALARS


def test_a_failing_backward_leaves_nothing_in_the_wrapper():
    params, w = make(fold="backward")
    chain(params).backward()
    w.step()
    handle = params[6].register_hook(lambda grad: 1 / 0)

    def fail():
        with pytest.raises(ZeroDivisionError):
            chain(params).backward()
        assert sum(p.grad is not None for p in params) == 5

    _, left = allocated(fail)
    assert left == pytest.approx(sum(p.nbytes for p in params[7:]), abs=SCALARS)
    handle.remove()
    _, left = allocated(w.zero_grad)
    assert left == pytest.approx(-sum(p.nbytes for p in params[7:]), abs=SCALARS)
