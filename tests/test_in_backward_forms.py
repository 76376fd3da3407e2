"""fold="backward" with parameters and gradients of every form."""

from __future__ import annotations

import pytest
import torch
from backward_runs import BYTE, sgd_pair
from torch.optim import SGD, AdamW
from wrapper_helpers import LOW_PRECISION, bits, both_updates, tidy, wrap  # noqa: F401

pytestmark = LOW_PRECISION
both_buckets = pytest.mark.parametrize("bucket", [BYTE, 25], ids=["1 byte", "25 MiB"])


def alike(build, run, bucket, steps=2, count=4, make=AdamW, **options):
    """Train what `build` makes in both ways of folding: equal by bits, and no gradient left after any backward."""
    results = []
    for fold, more in (("step", {}), ("backward", {"bucket_mb": bucket})):
        torch.manual_seed(0)
        model = build()
        w = wrap(make(model.parameters(), lr=0.05), steps, fold=fold, **more, **options)
        for k in range(count):
            run(model, k).backward()
            assert fold == "step" or all(p.grad is None for p in model.parameters())
            w.step()
        results.append([bits(p) for p in model.parameters()] + [w.grad_norm])
    assert results[0] == results[1]


def tokens(k, n=6):
    return torch.randint(0, 10, (n,), generator=torch.Generator().manual_seed(k))


# Forms of parameters and gradients


@both_buckets
@both_updates
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sparse_embeddings(dtype, update, bucket):
    """Beside dense parameters; an index that stands there twice is added up in float32."""

    def build():
        return torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 2)).to(dtype)

    def run(model, k):
        return model(tokens(k)).float().square().sum()

    alike(build, run, bucket, update=update, make=SGD)


@both_buckets
def test_a_table_with_sparse_and_dense_gradients(bucket):
    """In turn, and in one micro-batch."""
    params, w = sgd_pair(n=4, values=(1.0,), bucket_mb=bucket)
    (p,) = params
    index = torch.tensor([0, 2, 2])
    p.gather(0, index, sparse_grad=True).sum().backward()
    p.sum().backward()
    assert p.grad is None
    w.step()
    (p * 2).sum().backward()
    p.gather(0, index, sparse_grad=True).sum().backward()
    w.step()
    assert p.tolist() == [1 - 2.5, 1 - 1.5, 1 - 3.5, 1 - 1.5]


@both_buckets
def test_channels_last(bucket):
    def build():
        return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 2)).to(
            memory_format=torch.channels_last
        )

    def run(model, k):
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(k))
        return model(x.to(memory_format=torch.channels_last)).square().mean()

    alike(build, run, bucket)


class Forms(torch.nn.Module):
    """Complex, zero-size, a transposed one, a view that is not aligned, one without dimensions."""

    def __init__(self):
        super().__init__()
        self.wave = torch.nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.transposed = torch.nn.Parameter(torch.randn(4, 3).t())
        self.odd = torch.nn.Parameter(torch.randn(8)[1:])
        self.scalar = torch.nn.Parameter(torch.randn(()))

    def forward(self, k):
        wave = (self.wave * self.wave.conj()).real.sum() + self.wave.imag.sum() * k
        return wave + self.empty.sum() + (self.transposed * (k + 1)).square().sum() + self.odd.sum() * self.scalar


@both_buckets
@pytest.mark.parametrize("make", [AdamW, SGD])
def test_complex_empty_transposed_unaligned(make, bucket):
    alike(Forms, lambda model, k: model(k), bucket, make=make)


@both_buckets
def test_gradients_that_are_not_contiguous(bucket):
    """As a function of somebody else's may hand them over."""

    class Transposed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p):
            return p.clone()

        @staticmethod
        def backward(ctx, grad):
            return torch.arange(6.0).view(3, 2).t()

    (p,), w = sgd_pair(values=(0.0,), bucket_mb=bucket)
    p.data = torch.zeros(2, 3)
    for _ in range(2):
        Transposed.apply(p).sum().backward()
        w.step()
    assert p.tolist() == [[0.0, -2.0, -4.0], [-1.0, -3.0, -5.0]]


def test_an_autograd_function_that_returns_none():
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p):
            return p.sum()

        @staticmethod
        def backward(ctx, grad):
            return None

    (p, q), w = sgd_pair()
    for _ in range(2):
        (Nothing.apply(p) + q.sum()).backward()
        w.step()
    assert (p[0].item(), q[0].item(), w.updates) == (2.0, 2.0, 1)


@both_buckets
def test_tied_unused_and_frozen(bucket):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight
            self.unused, self.frozen = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).requires_grad_(False)

        def forward(self, k):
            return self.head(self.frozen(self.embed(tokens(k)))).square().mean()

    kept = []

    def build():
        model = Model()
        kept.append((model, bits(model.unused.weight), bits(model.frozen.weight)))
        return model

    alike(build, lambda model, k: model(k), bucket, count=6)
    for model, unused, frozen in kept:
        assert (bits(model.unused.weight), bits(model.frozen.weight)) == (unused, frozen)


def test_a_window_that_touches_p_only():
    """q keeps its bits under AdamW, with weight decay and moments of an earlier window."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    w = wrap(AdamW(params, lr=0.1, weight_decay=0.5), 2, fold="backward")
    for k in range(4):
        (params[0].sum() + (params[1].sum() if k < 2 else 0.0)).backward()
        w.step()
        if k == 1:
            before = bits(params[1])
    assert bits(params[1]) == before
    assert [w.state[p]["step"].item() for p in params] == [2.0, 1.0]
