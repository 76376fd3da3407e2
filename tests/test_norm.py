"""The norm of a window: `fold`'s partials and `square_total`, on every backend."""

from __future__ import annotations

import pytest
import torch
from op_cases import (
    DTYPES,
    NAMES,
    SIZES,
    TOUCHED_AND_FRESH,
    Buffer,
    partials_agree,
    same_bits,
    scalar,
    total_tensor,
)

from fusedaccum.ops import FRESH, TOUCHED


def total_of(backend, buffer: Buffer) -> float:
    total = total_tensor()
    backend.square_total(*buffer.norm_plan(), total)
    assert buffer.padding_intact()
    return total[0].item()


def totals_agree(got: float, want: float, additions: int) -> bool:
    return abs(got - want) <= 2 * additions * 2.0**-53 * want


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_the_last_fold_leaves_the_norm_behind(backend, dtype):
    buffer = Buffer(SIZES)
    grads = [torch.randn(n).to(dtype) for n in SIZES]
    backend.fold(*buffer.fold_plan(), grads, scalar(0.3), False)
    backend.fold(*buffer.fold_plan(), grads, scalar(0.3), True)
    want = buffer.square_sums()
    assert partials_agree(buffer.partials, want)
    before = buffer.partials.clone()
    assert totals_agree(total_of(backend, buffer), want.sum().item(), buffer.flat.numel())
    assert same_bits(buffer.partials, before)


def test_stale_tiles_are_read_again_and_fresh_ones_are_not(backend):
    sizes = [4097, 17, 4097, 0]
    buffer = Buffer(sizes)
    buffer.fill([torch.randn(n) for n in sizes])
    buffer.marks[2] = TOUCHED_AND_FRESH
    fresh = buffer.tiles_of(2)
    # Not their sums: so it shows whether they are taken as they are.
    buffer.partials[fresh] = torch.tensor([3.0, 5.0], dtype=torch.float64)
    sums = buffer.square_sums()
    sums[fresh] = buffer.partials[fresh]
    assert totals_agree(total_of(backend, buffer), sums.sum().item(), 9000)
    assert partials_agree(buffer.partials, sums)
    assert buffer.marks.tolist() == [TOUCHED_AND_FRESH] * 4


def test_a_segment_whose_last_gradient_came_earlier_counts(backend):
    buffer = Buffer([17, 4097])
    backend.fold(*buffer.fold_plan(), [torch.ones(17), torch.ones(4097)], scalar(1.0), False)
    backend.fold(*buffer.fold_plan(), [torch.ones(17), None], scalar(1.0), True)
    assert total_of(backend, buffer) == 17 * 4.0 + 4097


@pytest.mark.parametrize("other_marks", [0, FRESH], ids=["unmarked", "fresh"])
def test_untouched_segments_never_reach_the_total(backend, other_marks):
    """They and their partials hold NaN, whatever else their marks say; before, between and after touched ones."""
    buffer = Buffer([4097, 17, 4097, 5, 4097])
    buffer.fill([None, torch.full((17,), 2.0), None, torch.full((5,), 3.0), None])
    buffer.marks[::2] = other_marks
    flat = buffer.flat.clone()
    assert total_of(backend, buffer) == 17 * 4.0 + 5 * 9.0
    assert (buffer.marks[1::2] == TOUCHED_AND_FRESH).all()
    assert same_bits(buffer.flat, flat)
    assert buffer.partials[buffer.tiles_of(0) + buffer.tiles_of(2) + buffer.tiles_of(4)].isnan().all()


def test_nothing_touched(backend):
    assert total_of(backend, Buffer([17, 0])) == 0.0
    assert total_of(backend, Buffer([])) == 0.0


@pytest.mark.parametrize("fresh", [True, False])
def test_squares_that_overflow_float32_give_a_finite_total(backend, fresh):
    buffer = Buffer([4097])
    largest = torch.finfo(torch.float32).max
    grads = [torch.full((4097,), 1e30)]
    grads[0][::2] = largest
    backend.fold(*buffer.fold_plan(), grads, scalar(1.0), fresh)
    want = grads[0].double().square().sum().item()
    assert totals_agree(total_of(backend, buffer), want, 4097)


@pytest.mark.parametrize("fresh", [True, False])
def test_squares_that_underflow_float32_are_not_lost(backend, fresh):
    buffer = Buffer([17])
    backend.fold(*buffer.fold_plan(), [torch.full((17,), 2.0**-149)], scalar(1.0), fresh)
    assert total_of(backend, buffer) == 17 * 2.0**-298


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [0, 4095, 4096])
def test_one_element_that_is_not_finite_shows(backend, fresh, value, where):
    buffer = Buffer([17, 4097])
    grads = [torch.ones(17), torch.ones(4097)]
    grads[1][where] = value
    backend.fold(*buffer.fold_plan(), grads, scalar(1.0), fresh)
    total = total_of(backend, buffer)
    assert total != total if value != value else total == torch.inf
    assert buffer.partials.isfinite().tolist() == [True, where == 4096, where != 4096]


def test_two_runs_give_the_same_bits(backend):
    sizes = [4097, 3 * 4096 + 5, 100] * 3
    grads = [torch.randn(n) * torch.randn(n).mul(5).exp() for n in sizes]
    runs = []
    for _ in range(2):
        buffer = Buffer(sizes)
        backend.fold(*buffer.fold_plan(), grads, scalar(1 / 3), True)
        partials = buffer.partials.clone()
        fresh = total_of(backend, buffer)
        buffer.marks.fill_(TOUCHED)
        runs.append((partials.tolist(), fresh, total_of(backend, buffer)))
    assert runs[0] == runs[1]
    assert runs[0][1] == runs[0][2], "a fold and a pass of its own add in the same order"


def test_written_tensors_tell_autograd(backend):
    buffer = Buffer([17])
    buffer.fill([torch.ones(17)])
    total = total_tensor(0.0)
    written = (buffer.partials, buffer.marks, total)
    before = [tensor._version for tensor in written]
    backend.square_total(*buffer.norm_plan(), total)
    assert all(tensor._version > version for tensor, version in zip(written, before, strict=True))
