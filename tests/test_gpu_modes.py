"""Folding during the backward, and steps=None, on a GPU: streams, memory, and the values of the other modes."""

from __future__ import annotations

import pytest
import torch
from test_gpu import DEVICE, kernels  # noqa: F401
from torch.optim import SGD, AdamW
from wrapper_helpers import LOW_PRECISION, bits, tidy, wrap  # noqa: F401

pytestmark = [pytest.mark.gpu, LOW_PRECISION]

STEPS = 3


class Branches(torch.nn.Module):
    """Two halves, the second one on a stream of its own: its gradients are made there too."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.halves = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)) for _ in range(2)
        )
        self.to(DEVICE, dtype)
        self.side = torch.cuda.Stream()

    def forward(self, x):
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            second = self.halves[1](x)
        first = self.halves[0](x)
        torch.cuda.current_stream().wait_stream(self.side)
        return first + second


def train(dtype, backend, **options):
    model = Branches(dtype)
    optimizer = wrap(AdamW(model.parameters(), lr=1e-2), backend=backend, max_norm=0.1, **options)
    random = torch.Generator().manual_seed(1)
    for call in range(3 * STEPS):
        x = torch.randn(256, 512, generator=random).to(DEVICE, dtype)
        loss = model(x).float().square().mean()
        (loss / STEPS if options["steps"] is None else loss).backward()
        if options["steps"] is not None or call % STEPS == STEPS - 1:
            optimizer.step()
            optimizer.zero_grad()
    return [bits(p.cpu()) for p in model.parameters()], optimizer.grad_norm


@pytest.mark.parametrize("bucket_mb", [1e-6, 1, 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_folding_in_the_backward_gives_the_same_bits(dtype, bucket_mb, kernels):  # noqa: F811
    expected = train(dtype, kernels, steps=STEPS)
    assert train(dtype, kernels, steps=STEPS, fold="backward", bucket_mb=bucket_mb) == expected


def test_the_caller_owning_the_boundary_is_as_near_as_rounding_lets_it(kernels):  # noqa: F811
    _, norm = train(torch.float32, kernels, steps=STEPS)
    _, live = train(torch.float32, kernels, steps=None)
    assert abs(live - norm) <= 1e-4 * norm


def test_grads_are_views_of_one_buffer(kernels):  # noqa: F811
    model = Branches(torch.bfloat16)
    optimizer = wrap(SGD(model.parameters(), lr=1.0), steps=None, backend=kernels)
    for _ in range(2):
        model(torch.ones(4, 512, device=DEVICE, dtype=torch.bfloat16)).float().sum().backward()
    grads = [p.grad for p in model.parameters()]
    assert {g.dtype for g in grads} == {torch.float32}
    assert len({g.untyped_storage().data_ptr() for g in grads}) == 1
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    assert float(norm) > 0.5
    assert abs(optimizer.grad_norm - 0.5) < 1e-3


@pytest.mark.parametrize("fold", ["step", "backward"])
def test_gradients_in_memory_at_once(fold, kernels):  # noqa: F811
    """40 gradients of 1 MiB: all of them with fold="step", one bucket of 4 with fold="backward"."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(40))).to(DEVICE)
    more = {"bucket_mb": 4} if fold == "backward" else {}
    optimizer = wrap(SGD(layers.parameters(), lr=1e-3), steps=4, fold=fold, backend=kernels, **more)
    x = torch.ones(1, 512, device=DEVICE)
    for _ in range(4):
        layers(x).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layers(x).sum().backward()
    peak = torch.cuda.max_memory_allocated() - held
    assert (peak > 40 << 20) if fold == "step" else (peak < 8 << 20)
    optimizer.step()
