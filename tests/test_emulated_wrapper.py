"""The wrapper on csrc/cuda, executed on the CPU: what it does with the operators there, against the CPU's own."""

from __future__ import annotations

import emulated
import pytest
import torch
from op_cases import Buffer, scalar
from torch.optim import SGD, AdamW
from wrapper_helpers import LOW_PRECISION, bits, tidy, wrap  # noqa: F401

from fusedaccum import folding

pytestmark = LOW_PRECISION

SHAPES = [(33,), (70, 60), (), (0,), (4097,), (3, 2, 5, 5)]
STEPS = 3
MAKERS = {
    "adamw": lambda params: AdamW(params, lr=0.05, weight_decay=0.3),
    "amsgrad": lambda params: AdamW(params, lr=0.05, amsgrad=True),
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9, nesterov=True),
}
OPTIONS = {
    "plain": {},
    "masters": {"master_weights": True},
    "fp32 moments": {"state_dtype": torch.float32},
    "wrapped": {"update": "wrapped"},
}


def train(make, dtype, windows=3, **options):
    """Windows in which other parameters go without a gradient, the last one short; returns all that was left behind."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    params[-1].data = params[-1].data.to(memory_format=torch.channels_last)
    optimizer = make(params)
    wrapper = wrap(optimizer, STEPS, **options)
    for index in range(STEPS * windows - 1):
        for k, p in enumerate(params):
            if (index + k) % 4:
                p.grad = torch.randn_like(p)
        wrapper.step()
    assert wrapper.flush()
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    return [*map(bits, params), *map(bits, state)], wrapper.grad_norm


@LOW_PRECISION
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_same_bits_as_on_the_cpu(monkeypatch, make, dtype, options):
    want, norm = train(make, dtype, backend="compiled", **options)
    for order in ("forward", "random"):
        emulated.in_order(order)
        monkeypatch.setattr(folding.backends, "select", lambda device, name: emulated)
        got, same_norm = train(make, dtype, **options)
        assert got == want
        # The partial sums are added in another order.
        assert same_norm == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_same_random_numbers(monkeypatch, make):
    """Two windows: an update's rounding, not its number alone, decides about the next one's values."""
    want, _ = train(make, torch.bfloat16, windows=2, backend="compiled", rounding="stochastic")
    assert want != train(make, torch.bfloat16, windows=2, backend="compiled", rounding="stochastic", rounding_seed=1)[0]
    monkeypatch.setattr(folding.backends, "select", lambda device, name: emulated)
    assert train(make, torch.bfloat16, windows=2, rounding="stochastic")[0] == want


def test_a_buffer_that_starts_off_16_bytes_is_refused():
    """The kernels move it in vectors."""
    buffer = Buffer([70])
    flat = torch.zeros(buffer.flat.numel() + 1)[1:]
    _, partials, *rest = buffer.fold_plan()
    with pytest.raises(RuntimeError, match="fold: flat must start at a multiple of 16 bytes"):
        emulated.fold(flat, partials, *rest, [torch.ones(70)], scalar(1.0), False)
    assert not flat.any()


@LOW_PRECISION
def test_clipping(monkeypatch):
    """The clip factor is rounded once to float32 from a norm that is within some roundings of float64."""
    want, _ = train(MAKERS["sgd"], torch.float32, backend="compiled", max_norm=0.5)
    monkeypatch.setattr(folding.backends, "select", lambda device, name: emulated)
    assert train(MAKERS["sgd"], torch.float32, max_norm=0.5)[0] == want
