"""What happens between the last fold and the update: `close_window`, `rescale`, `emit`, on every backend."""

from __future__ import annotations

import math

import pytest
import torch
from op_cases import (
    DTYPES,
    NAMES,
    SIZES,
    TOUCHED_AND_FRESH,
    UNIT,
    Buffer,
    guarded,
    guards_intact,
    random_bits,
    same_bits,
    same_values,
    scalar,
)

from fusedaccum.ops import FRESH, TOUCHED


def close(
    backend, total: float, divisor: float, max_norm: float, skip_nonfinite: bool = False
) -> tuple[float, float, float]:
    scalars = torch.full((3,), -1.0)
    arguments = (torch.zeros(0), torch.zeros(0, dtype=torch.uint8))
    values = scalar(total, torch.float64), scalar(divisor, torch.float64)
    backend.close_window(scalars, *arguments, None, *values, max_norm, skip_nonfinite)
    return tuple(scalars.tolist())


def rounded_once(got: float, want: float) -> bool:
    """`got` is `want` rounded to float32, up to the few float64 roundings that led to `want`."""
    return abs(got - want) <= (UNIT[torch.float32] + 8 * 2.0**-53) * abs(want) + 2.0**-150


@pytest.mark.parametrize("max_norm", [math.inf, 1.0, 1e-3, 0.3, 1e4])
@pytest.mark.parametrize("divisor", [1.0, 3.0, 8.0, 0.7])
@pytest.mark.parametrize("total", [0.0, 1.0, 2.0, 1e-20, 12345.678, 1e70])
def test_multiplier_and_norm(backend, total, divisor, max_norm):
    norm = math.sqrt(total) / divisor
    want = 1 / divisor * min(1.0, max_norm / (norm + 1e-6))
    multiplier, skip, got_norm = close(backend, total, divisor, max_norm)
    assert rounded_once(multiplier, want)
    assert skip == 0.0
    assert rounded_once(got_norm, norm)


@pytest.mark.parametrize("max_norm", [0.5, 1.0, 2.0, 100.0])
def test_the_clip_factor_is_that_of_torch(backend, max_norm):
    """torch computes it in float32: a norm of n elements (n roundings at most), a sum, a quotient, a product."""
    p = torch.nn.Parameter(torch.zeros(64))
    p.grad = torch.randn(64) / 4
    before = p.grad.clone()
    multiplier, _, norm = close(backend, before.double().square().sum().item(), 1.0, max_norm)
    stock = torch.nn.utils.clip_grad_norm_([p], max_norm)
    assert abs(norm - stock.item()) <= 64 * UNIT[torch.float32] * norm
    assert ((multiplier * before - p.grad).abs() <= 68 * UNIT[torch.float32] * before.abs()).all()
    assert (multiplier < 1) == (max_norm < norm)


@pytest.mark.parametrize("total", [torch.nan, torch.inf])
def test_a_norm_that_is_not_finite(backend, total):
    """As in clip_grad_norm_: NaN makes the multiplier NaN, infinity makes it 0. Without clipping it has no say."""
    multiplier, skip, norm = close(backend, total, 2.0, 1.0)
    assert math.isnan(multiplier) if math.isnan(total) else multiplier == 0.0
    assert skip == 0.0
    assert math.isnan(norm) if math.isnan(total) else norm == math.inf
    assert close(backend, total, 2.0, math.inf)[:2] == (0.5, 0.0)


@pytest.mark.parametrize("total", [0.0, 4.0, torch.nan])
@pytest.mark.parametrize("max_norm", [1.0, math.inf])
def test_a_divisor_of_zero_skips(backend, total, max_norm):
    assert close(backend, total, 0.0, max_norm) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize("n", [5, 3000])
def test_touched_segments_count_the_update(backend, n):
    marks = torch.tensor([0, TOUCHED, FRESH, TOUCHED_AND_FRESH, 0], dtype=torch.uint8, device="cpu").repeat(n // 5)
    steps = torch.arange(n, dtype=torch.float32)
    scalars = torch.zeros(3)
    total, zero = scalar(1.0, torch.float64), scalar(0.0, torch.float64)
    backend.close_window(scalars, steps, marks, None, total, total, math.inf, False)
    want = torch.arange(n) + torch.tensor([0, 1, 0, 1, 0]).repeat(n // 5)
    assert torch.equal(steps, want.float())
    backend.close_window(scalars, steps, marks, None, total, zero, math.inf, False)
    assert torch.equal(steps, want.float()), "a skipped window is no update"


def test_rescale(backend):
    sizes = list(SIZES)
    buffer = Buffer(sizes)
    values = [random_bits(n) if k % 4 else None for k, n in enumerate(sizes)]
    buffer.fill(values, TOUCHED_AND_FRESH)
    backend.rescale(*buffer.plan(), scalar(4 / 3))
    for k, before in enumerate(values):
        if before is None:
            assert buffer.segment(k).isnan().all()
        else:
            assert same_values(buffer.segment(k), before * scalar(4 / 3))
    assert buffer.padding_intact()
    assert buffer.marks.tolist() == [TOUCHED if k % 4 else 0 for k in range(len(sizes))]


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_emit_rounds_once(backend, dtype):
    """float32 of every kind, ties and overflow included, into unaligned outputs."""
    sizes = list(SIZES)
    buffer = Buffer(sizes)
    values = [random_bits(n) for n in sizes]
    # Half-way between two bfloat16 and two float16, towards an even and an odd neighbour; just over; overflows.
    ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8 + 2.0**-23, 65520.0, 3.4e38]
    # NaNs that a carry would turn into zero, and whose payload lies in the bits that are dropped.
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    special = torch.cat([torch.tensor(ties), nans])
    for block in values:
        block[: len(special)] = special[: block.numel()]
    buffer.fill(values)
    grads = [guarded(n, dtype, k % 17) for k, n in enumerate(sizes)]
    backend.emit(*buffer.step_plan(), torch.tensor([1.0, 0.0, 0.0]), grads)
    assert all(same_values(grad, block.to(dtype)) for grad, block in zip(grads, values, strict=True))
    backend.emit(*buffer.step_plan(), torch.tensor([0.3, 0.0, 0.0]), grads)
    assert all(same_values(grad, (0.3 * block).to(dtype)) for grad, block in zip(grads, values, strict=True))
    assert all(guards_intact(grad) for grad in grads)
    assert buffer.padding_intact()


def test_emit_mixes_dtypes_and_leaves_the_rest(backend):
    sizes = [17, 4097, 5, 0, 16]
    buffer = Buffer(sizes)
    buffer.fill([torch.ones(17), torch.ones(4097), None, torch.ones(0), torch.ones(16)])
    grads = [torch.zeros(n, dtype=DTYPES[k % 3]) for k, n in enumerate(sizes)]
    backend.emit(*buffer.step_plan(), torch.tensor([0.25, 1.0, 0.0]), grads)
    assert not any(grad.any() for grad in grads), "skip is set"
    backend.emit(*buffer.step_plan(), torch.tensor([0.25, 0.0, 0.0]), grads)
    assert [grad.unique().tolist() for grad in grads] == [[0.25], [0.25], [0.0], [], [0.25]]
    grads[2] = torch.zeros(0)
    backend.emit(*buffer.step_plan(), torch.tensor([0.5, 0.0, 0.0]), grads)
    assert [grad.unique().tolist() for grad in grads] == [[0.5], [0.5], [], [], [0.5]]


def test_written_tensors_tell_autograd(backend):
    buffer = Buffer([17])
    buffer.fill([torch.ones(17)])
    scalars, steps, grad = torch.zeros(3), torch.zeros(1), torch.zeros(17)
    one = scalar(1.0, torch.float64)
    written = (scalars, steps, grad, buffer.flat, buffer.marks)
    before = [tensor._version for tensor in written]
    backend.close_window(scalars, steps, buffer.marks, None, one, one, 1.0, False)
    backend.emit(*buffer.step_plan(), scalars, [grad])
    backend.rescale(*buffer.plan(), scalar(2.0))
    assert all(tensor._version > version for tensor, version in zip(written, before, strict=True))


def test_gradients_keep_their_bits_where_nothing_is_touched(backend):
    buffer = Buffer([17])
    grad = random_bits(17)
    before = grad.clone()
    backend.emit(*buffer.step_plan(), torch.tensor([1.0, 0.0, 0.0]), [grad])
    assert same_bits(grad, before)
