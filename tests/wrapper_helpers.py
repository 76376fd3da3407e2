"""What the wrapper's tests share: toys, snapshots, drivers for wrapped and stock training, and the error budget."""

from __future__ import annotations

import contextlib
import gc
import re
import warnings

import pytest
import torch
from torch.optim import SGD, AdamW

from fusedaccum import FusedAccumOptimizer, folding

LOW_PRECISION = pytest.mark.filterwarnings("ignore:(?s).*(master_weights|state_dtype)")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAKERS = {
    "adamw": lambda params: AdamW(params, lr=0.05, weight_decay=0.3),
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.3),
}
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
both_updates = pytest.mark.parametrize("update", ["fused", "wrapped"])


def uniform(*shape, seed=0, dtype=torch.float32):
    """Values in [0.5, 1.5]: an Adam quotient of them is well conditioned."""
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5).to(dtype)


def use_two_buffers(monkeypatch) -> None:
    """Have every other parameter live on a second "device", which is the CPU again: a flat buffer of its own."""
    build = folding.build

    def both(params, old, backend, also=None):
        return [buffer for half in (params[::2], params[1::2]) for buffer in build(half, old, backend, also)]

    monkeypatch.setattr(folding, "build", both)


_made: list[FusedAccumOptimizer] = []


def wrap(optimizer, steps=4, **options) -> FusedAccumOptimizer:
    wrapper = FusedAccumOptimizer(optimizer, steps=steps, **options)
    _made.append(wrapper)
    return wrapper


@pytest.fixture(autouse=True)
def tidy():
    """Drop the windows that a test leaves open: their warning belongs to no other test."""
    yield
    while _made:
        _made.pop().reset()


def let_go(wrapper):
    """`tidy` holds this wrapper no longer: it dies with the caller's last reference."""
    _made.remove(wrapper)


class Toy:
    """H(N) and V(N) of the case table: one parameter of zeros, SGD with learning rate 1."""

    def __init__(self, steps=4, n=1, dtype=torch.float32, make=torch.optim.SGD, lr=1.0, start=0.0, **options):
        self.p = torch.nn.Parameter(torch.full((n,), start, dtype=dtype))
        self.inner = make([self.p], lr=lr)
        self.w = wrap(self.inner, steps, **options)

    def backward(self, g):
        (self.p * torch.as_tensor(g, dtype=self.p.dtype)).sum().backward()

    def micro(self, g, **weight):
        self.backward(g)
        self.w.step(**weight)
        self.w.zero_grad()

    def run(self, gradients):
        for g in gradients:
            self.micro(g)
        return self

    @property
    def value(self):
        values = self.p.detach().tolist()
        return values[0] if len(values) == 1 else values


def micro_batch(wrapper, loss):
    loss.backward()
    wrapper.step()
    wrapper.zero_grad()


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def bits(tensor) -> bytes:
    whole = tensor.detach().clone(memory_format=torch.contiguous_format)
    return bytes(whole.reshape(-1).view(torch.uint8).tolist())


def state_bits(value):
    """Any nest of containers and tensors as something that compares by bits, NaN included."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), bits(value))
    if isinstance(value, dict):
        return {key: state_bits(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [state_bits(entry) for entry in value]
    return repr(value)


def snapshot(optimizer, norm=True):
    """Parameters, gradients, moments, hyper-parameters and the open window, by their bits."""
    params = params_of(optimizer)
    taken = {
        "params": [state_bits(p) for p in params],
        "grads": [None if p.grad is None or p.grad.is_sparse else state_bits(p.grad) for p in params],
        "state": [state_bits(dict(optimizer.state[p])) if p in optimizer.state else None for p in params],
        "groups": [{k: repr(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    }
    if isinstance(optimizer, FusedAccumOptimizer):
        taken["window"] = (optimizer.pending, optimizer.updates, optimizer.will_update)
        taken["norm"] = repr(optimizer.grad_norm) if norm else None
        if optimizer.pending:
            taken["sums"] = [state_bits(optimizer.master_grad(p)) for p in params]
    return taken


@contextlib.contextmanager
def refused(optimizer, *words):
    """The block raises an error that holds every word (a regular expression), and nothing has changed."""
    before = snapshot(optimizer)
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        yield
    text = str(caught.value)
    for word in words:
        assert re.search(word, text), f"{word!r} is not in: {text}"
    assert snapshot(optimizer) == before


@contextlib.contextmanager
def recorded():
    """Collect the warnings of the block, and of nothing older that is still waiting for the garbage collector."""
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def set_grads(params, grads):
    """Hand each parameter its own copy, as a backward would. None leaves `p.grad` at None."""
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else g.to(p.dtype, copy=True)


def make_params(start, dtype):
    return [torch.nn.Parameter(t.to(dtype, copy=True)) for t in start]


def make_windows(shapes, count, steps, dtype, seed=0):
    """count windows of `steps` micro-batches of gradients, as [window][micro][parameter].

    Signs vary from window to window for half of the elements and magnitudes shrink, so that momentum, amsgrad and the
    second moment all matter; within a window nothing cancels, so that an Adam quotient stays well conditioned, and no
    second moment underflows in float16.
    """
    random = torch.Generator().manual_seed(seed)
    fixed = [torch.randint(0, 2, s, generator=random) for s in shapes]
    windows = []
    for k in range(count):
        signs = [torch.where(f == 1, f, torch.randint(0, 2, f.shape, generator=random)) * 2 - 1 for f in fixed]
        sizes = [[torch.rand(s, generator=random) + 0.5 for s in shapes] for _ in range(steps)]
        windows.append([[(s * z * (1.2 - 0.04 * k)).to(dtype) for s, z in zip(signs, m, strict=True)] for m in sizes])
    return windows


def mean64(window):
    """The mean of a window's micro-batches in float64, per parameter; None where no micro-batch had a gradient."""
    means = []
    for grads in zip(*window, strict=True):
        present = [g.double() for g in grads if g is not None]
        means.append(sum(present) / len(window) if present else None)
    return means


def train_stock(optimizer, windows, after=None):
    """The bare optimizer, fed each window's mean, rounded once to the parameters' dtype."""
    for k, window in enumerate(windows):
        set_grads(params_of(optimizer), mean64(window))
        optimizer.step()
        if after:
            after(optimizer, k)


def train_wrapped(wrapper, windows, after=None):
    for k, window in enumerate(windows):
        for grads in window:
            set_grads(params_of(wrapper), grads)
            wrapper.step()
            wrapper.zero_grad()
        if after:
            after(wrapper, k)


def assert_within_budget(ours, stock, truth):
    """Every element of ours errs at most twice as much as stock torch does at worst, plus one rounding."""
    ours, stock, truth = ours.detach(), stock.detach(), truth.detach()
    assert torch.isfinite(truth).all()
    assert torch.isfinite(stock).all()
    rounding = torch.finfo(ours.dtype).eps / 2 * truth.abs() + torch.finfo(ours.dtype).tiny
    allowed = 2 * (stock.double() - truth).abs().max() + rounding
    error = (ours.double() - truth).abs()
    worst = (error / allowed).nan_to_num(nan=float("inf")).max().item()
    assert worst <= 1, f"an element errs {worst:.3g} times what it may"


def adam_or_sgd_states(optimizer):
    """[(parameter index, key, tensor)] of the moments, without the step count."""
    entries = []
    for k, p in enumerate(params_of(optimizer)):
        for key, value in optimizer.state[p].items():
            if key != "step" and value is not None:
                entries.append((k, key, value))
    return entries


def extra_key(state_dict) -> str:
    """The one key beside torch's own two."""
    (key,) = set(state_dict) - {"state", "param_groups"}
    return key


def update_in_use(wrapper) -> str:
    """What `repr` says was chosen."""
    said = re.search(r"update\W+(fused|wrapped)\b", repr(wrapper))
    assert said, f"repr names no update: {wrapper!r}"
    return said.group(1)
