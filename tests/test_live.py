"""What only the device knows, on every backend: live segments, windows that are skipped, and `found_inf`."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from op_cases import (
    DTYPES,
    NAMES,
    SIZES,
    TOUCHED_AND_FRESH,
    Buffer,
    bits,
    guarded,
    guards_intact,
    place,
    same_bits,
    scalar,
)
from step_cases import GROUPS, Update
from torch import Tensor

from fusedaccum.ops import FRESH, TOUCHED

RULES = ("adam", "sgd")


def live_buffer(sizes: list[int], live: list[int] | None = None) -> Buffer:
    buffer = Buffer(sizes)
    buffer.live = torch.tensor(live or [0] * len(sizes), dtype=torch.uint8)
    return buffer


# fold


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("factor", [1.0, -0.5, 2.0**-149, math.inf, math.nan])
def test_a_fold_makes_its_segments_live(backend, factor, norm):
    """Those with a gradient of at least one element; many tiles, tails, each dtype, and nothing beside them."""
    sizes = list(SIZES) * 3
    buffer = live_buffer(sizes)
    grads = [torch.ones(n, dtype=DTYPES[k % 3]) if k % 4 else None for k, n in enumerate(sizes)]
    backend.fold(*buffer.fold_plan(), grads, scalar(factor), norm)
    assert buffer.live.tolist() == [int(k % 4 > 0 and n > 0) for k, n in enumerate(sizes)]
    assert buffer.padding_intact()


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_fold_with_scale_zero_leaves_live_as_it_is(backend, zero):
    """Touched, zeros and not live, whatever the gradients hold; a segment that was live before stays so."""
    buffer = live_buffer([17, 4097, 5, 0], [0, 1, 0, 0])
    buffer.fill([None, torch.ones(4097), None, None])
    poison = [torch.full((n,), torch.nan) for n in (17, 4097, 5, 0)]
    poison[2] = None
    backend.fold(*buffer.fold_plan(), poison, scalar(zero), True)
    assert buffer.live.tolist() == [0, 1, 0, 0]
    assert buffer.marks.tolist() == [TOUCHED_AND_FRESH, TOUCHED_AND_FRESH, 0, TOUCHED_AND_FRESH]
    assert (bits(buffer.segment(0)) == 0).all()
    assert (buffer.segment(1) == 1).all()


def test_live_gathers_over_a_window(backend):
    buffer = live_buffer([17, 4097, 5])
    ones = [torch.ones(17), torch.ones(4097, dtype=torch.bfloat16), torch.ones(5)]
    seen = []
    for grads, factor in (([ones[0], ones[1], None], 0.0), ([None, ones[1], None], 1.0), ([None, None, ones[2]], 0.5)):
        backend.fold(*buffer.fold_plan(), grads, scalar(factor), False)
        seen.append(buffer.live.tolist())
    assert seen == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert buffer.marks.tolist() == [TOUCHED] * 3


def test_live_changes_no_value_of_a_fold(backend):
    sizes = list(SIZES)
    grads = [torch.randn(n).to(DTYPES[k % 3]) for k, n in enumerate(sizes)]
    buffers = [Buffer(sizes), live_buffer(sizes)]
    for buffer in buffers:
        for factor in (1 / 3, 0.0):
            backend.fold(*buffer.fold_plan(), grads, scalar(factor), True)
    plain, with_live = buffers
    assert same_bits(plain.flat, with_live.flat)
    assert same_bits(plain.partials, with_live.partials)
    assert same_bits(plain.marks, with_live.marks)


def test_a_fold_tells_autograd_of_live(backend):
    buffer = live_buffer([17])
    version = buffer.live._version
    backend.fold(*buffer.fold_plan(), [torch.ones(17)], scalar(1.0), False)
    assert buffer.live._version > version


# close_window


@pytest.mark.parametrize("n", [6, 3000])
def test_only_live_segments_count_the_update(backend, n):
    marks = torch.tensor([0, TOUCHED, TOUCHED_AND_FRESH, 0, TOUCHED, FRESH], dtype=torch.uint8, device="cpu")
    live = torch.tensor([0, 1, 0, 1, 1, 1], dtype=torch.uint8).repeat(n // 6)
    steps, one = torch.arange(n, dtype=torch.float32), scalar(1.0, torch.float64)
    want = steps + torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0]).repeat(n // 6)
    before = live.clone()
    for divisor in (one, torch.zeros_like(one)):
        arguments = (torch.zeros(3), steps, marks.repeat(n // 6), live, one, divisor)
        backend.close_window(*arguments, math.inf, False)
        assert torch.equal(steps, want), "a segment counts where it is touched and live, a skipped window nowhere"
    assert same_bits(live, before)


@pytest.mark.parametrize("max_norm", [math.inf, 1.0])
@pytest.mark.parametrize("divisor", [2.0, 0.0])
@pytest.mark.parametrize("skip_nonfinite", [False, True])
@pytest.mark.parametrize("total", [0.0, 16.0, 1e300, math.inf, math.nan])
def test_a_window_that_is_not_finite_is_skipped_on_demand(backend, total, skip_nonfinite, divisor, max_norm):
    """Its norm stays what it is; a divisor of 0 skips either way, with a norm of 0."""
    scalars, steps = torch.full((3,), -1.0), torch.zeros(2)
    marks = torch.tensor([TOUCHED, 0], dtype=torch.uint8, device="cpu")
    arguments = (scalars, steps, marks, None, scalar(total, torch.float64), scalar(divisor, torch.float64))
    backend.close_window(*arguments, max_norm, skip_nonfinite)
    skip = divisor == 0 or (skip_nonfinite and not math.isfinite(total))
    norm = math.sqrt(total) / divisor if divisor else 0.0
    clip = 1.0 if max_norm == math.inf else max_norm / (norm + 1e-6)
    multiplier = 0.0 if skip else (clip if math.isnan(clip) else min(1.0, clip)) / divisor
    want = torch.tensor([multiplier, float(skip), norm], dtype=torch.float64).float()
    assert torch.allclose(scalars, want, rtol=1e-6, atol=0, equal_nan=True), (scalars, want)
    assert steps.tolist() == [0.0 if skip else 1.0, 0.0]


# emit and the steps


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_emit_leaves_what_is_not_live(backend, dtype):
    sizes = [17, 4097, 4096, 0, 5, 4096]
    buffer = live_buffer(sizes, [1, 0, 1, 0, 1, 0])
    buffer.fill([None if k == 4 else torch.full((n,), 2.0) for k, n in enumerate(sizes)])
    grads = [guarded(n, dtype, k) for k, n in enumerate(sizes)]
    before = [grad.clone() for grad in grads]
    backend.emit(*buffer.step_plan(), torch.tensor([0.25, 0.0, 0.0]), grads)
    written = (0, 2)
    assert all((grads[k] == 0.5).all() for k in written)
    assert all(same_bits(grads[k], before[k]) for k in range(len(sizes)) if k not in written)
    assert all(guards_intact(grad) for grad in grads)


def live_update(rule: str, live: list[int] | None) -> Update:
    sizes = [SIZES[(k + 4) % len(SIZES)] for k in range(len(GROUPS[rule]))]
    update = Update(rule, sizes, [2] * len(sizes), torch.bfloat16, torch.float32, master=True)
    update.buffer.fill([torch.full((n,), 0.5) for n in sizes])
    if live is not None:
        update.buffer.live = torch.tensor(live, dtype=torch.uint8)
    return update


@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_step_leaves_what_is_not_live(backend, rule, zero, skip):
    """Not a bit of it moves, its sum neither; what is live moves as it does without `live`."""
    count = len(GROUPS[rule])
    live = [k % 3 % 2 for k in range(count)]
    runs = []
    for given in (None, live):
        torch.manual_seed(3)
        runs.append(live_update(rule, given))
        runs[-1].scalars[1] = skip
    plain, update = runs
    before = [[t.clone() for t in tensors] for tensors in update.lists()]
    plain.run(backend, zero)
    update.run(backend, zero)
    for k in range(count):
        want = [tensors[k] for tensors in (plain.lists() if live[k] else before)]
        assert all(same_bits(tensors[k], w) for tensors, w in zip(update.lists(), want, strict=True)), f"segment {k}"
        assert (update.buffer.segment(k) == (0.0 if zero and live[k] else 0.5)).all()
    moved = [not same_bits(update.masters[k], before[-1][k]) for k in range(count)]
    assert moved == [bool(live[k] and update.masters[k].numel() and not skip) for k in range(count)]
    assert update.buffer.live.tolist() == live
    update.check_surroundings()


def test_a_window_of_scale_zero_changes_nothing(backend):
    """From the fold to the step, moments that would decay and weight decay among them."""
    update = live_update("adam", [0] * len(GROUPS["adam"]))
    buffer = update.buffer
    buffer.marks.zero_()
    grads = [torch.full((n,), torch.inf) for _, n in buffer.segments.tolist()]
    before = [[t.clone() for t in tensors] for tensors in update.lists()]
    steps, one = update.steps.clone(), scalar(1.0, torch.float64)
    backend.fold(*buffer.fold_plan(), grads, scalar(0.0), True)
    backend.close_window(update.scalars, update.steps, buffer.marks, buffer.live, one, one, math.inf, False)
    update.run(backend, True)
    assert same_bits(update.steps, steps)
    for tensors, start in zip(update.lists(), before, strict=True):
        assert all(same_bits(a, b) for a, b in zip(tensors, start, strict=True))


# found_inf


def found(backend: ModuleType, buffer: Buffer, grads: list[Tensor | None], result: Tensor) -> float:
    before = [tensor.clone() for tensor in (buffer.flat, buffer.marks, *(g for g in grads if g is not None))]
    backend.found_inf(*buffer.plan(), grads, result)
    after = [buffer.flat, buffer.marks, *(g for g in grads if g is not None)]
    assert all(same_bits(a, b) for a, b in zip(after, before, strict=True)), "only the result is written"
    assert guards_intact(result)
    return result.item()


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_one_element_that_is_not_finite_is_found(backend, dtype, offset):
    """First, last, at the edges of tiles, in a tail; the largest finite values around it, and guards that are NaN."""
    sizes = [17, 2 * 4096 + 5, 4096, 1]
    buffer, result = Buffer(sizes), place(torch.zeros(1))
    largest = torch.finfo(dtype).max
    grads = [place(torch.full((n,), largest, dtype=dtype), offset) for n in sizes]
    for grad in grads:
        grad[1::2] = -largest
    assert found(backend, buffer, grads, result) == 0.0
    places = [(0, 0), (0, 16), (1, 0), (1, 2047), (1, 4095), (1, 4096), (1, 8191), (1, 8192), (1, 8196)]
    for n, (k, i) in enumerate([*places, (2, 0), (2, 4095), (3, 0)]):
        kept = grads[k][i].item()
        grads[k][i] = (torch.inf, -torch.inf, torch.nan)[(n + offset) % 3]
        assert found(backend, buffer, grads, result) == 1.0, f"element {i} of gradient {k}"
        grads[k][i] = kept
        assert found(backend, buffer, grads, result) == 0.0, "the next call starts afresh"


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_each_value_that_is_not_finite_is_found(backend, dtype, value):
    buffer, result = Buffer([5, 4096]), torch.zeros(1)
    for k, i in ((0, 4), (1, 77)):
        grads = [torch.zeros(5, dtype=dtype), torch.zeros(4096, dtype=dtype)]
        grads[k][i] = value
        assert found(backend, buffer, grads, guarded(1, torch.float32).copy_(result)) == 1.0


def test_every_nan_is_found_and_every_finite_value_is_not(backend):
    """All of the 16-bit formats, and float32 next to infinity: the smallest NaN, its largest, both signs."""
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    floats = [0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7F7FFFFF, 0x00000001, 0x007FFFFF]
    wide = torch.tensor([*floats, *(f - 2**31 for f in floats)], dtype=torch.int64).to(torch.int32)
    for values in (patterns.view(torch.bfloat16), patterns.view(torch.float16), wide.view(torch.float32)):
        finite = values.isfinite()
        clean = values[finite].clone()
        assert found(backend, Buffer([clean.numel()]), [clean], guarded(1, torch.float32)) == 0.0
        bad = values[~finite]
        for value in bad[:: max(1, bad.numel() // 16)]:
            assert found(backend, Buffer([1]), [value.clone().view(1)], guarded(1, torch.float32)) == 1.0


def test_what_found_inf_does_not_look_at(backend):
    """The buffer, absent gradients, marks: an untouched segment's gradient counts, a touched one without does not."""
    sizes = [17, 4097, 0, 5]
    buffer, result = Buffer(sizes), guarded(1, torch.float32)
    buffer.marks[1] = TOUCHED
    ones = [torch.ones(n, dtype=DTYPES[k % 3]) for k, n in enumerate(sizes)]
    poison = [torch.full((n,), torch.nan, dtype=DTYPES[k % 3]) for k, n in enumerate(sizes)]
    assert buffer.flat.isnan().all(), "as it was left"
    assert found(backend, buffer, [ones[0], None, ones[2], None], result) == 0.0
    assert found(backend, buffer, [ones[0], None, poison[2], poison[3]], result) == 1.0
    assert found(backend, buffer, [ones[0], None, poison[2], ones[3]], result) == 0.0
    assert found(backend, buffer, [ones[0], poison[1], None, None], result) == 1.0
    assert found(backend, buffer, poison, result) == 1.0, "many that find one"


@pytest.mark.parametrize("start", [1.0, torch.nan])
def test_nothing_at_all_is_finite(backend, start):
    for sizes, grads in (([], []), ([0, 0], [torch.ones(0), None]), ([17, 4097], [None, None])):
        result = place(torch.tensor([start]))
        assert found(backend, Buffer(sizes), grads, result) == 0.0
        assert (bits(result) == 0).all()


def test_found_inf_tells_autograd(backend):
    result = torch.zeros(1)
    version = result._version
    backend.found_inf(*Buffer([17]).plan(), [torch.ones(17)], result)
    assert result._version > version
