"""Several micro-batches folded in one pass, on every backend: the bits of one fold after another."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_cases import (
    DTYPES,
    NAMES,
    SIZES,
    TOUCHED_AND_FRESH,
    Buffer,
    FoldModel,
    bits,
    guards_intact,
    held_back,
    normal,
    partials_agree,
    same_bits,
    same_values,
    scalar,
)
from torch import Tensor

from fusedaccum import backends
from fusedaccum.backends import reference
from fusedaccum.ops import TOUCHED, VOID

Batches = list[list[Tensor | None]]
FACTORS = (1 / 3, -2.0, 0.125, 1.0, 0.7, 3.0)


def in_a_row(batches: Batches) -> list[Tensor | None]:
    return [grad for batch in batches for grad in batch]


def fold_both_ways(
    backend: ModuleType, buffers: list[Buffer], batches: Batches, scale: Tensor, norm: bool = True
) -> Buffer:
    """The same micro-batches at once, one after another, and at once by the specification, in three equal buffers."""
    at_once, in_turn, wanted = buffers
    before = at_once.partials.clone()
    backend.fold(*at_once.fold_plan(), in_a_row(batches), scale, norm)
    for batch, factor in zip(batches, scale.tolist(), strict=True):
        backend.fold(*in_turn.fold_plan(), batch, scalar(factor), norm)
    reference.fold(*wanted.fold_plan(), in_a_row(batches), scale, norm)
    for other in (in_turn, wanted):
        assert same_values(at_once.flat, other.flat)
        assert at_once.marks.tolist() == other.marks.tolist()
        assert at_once.live is None or at_once.live.tolist() == other.live.tolist()
    assert same_bits(at_once.partials, in_turn.partials if norm else before)
    assert at_once.padding_intact()
    return at_once


def three(sizes: list[int], start: list[Tensor | None] | None = None) -> list[Buffer]:
    """Equal buffers; a segment starts with what `start` has for it, others are VOID and untouched by turns."""
    made = [Buffer(sizes) for _ in range(3)]
    for buffer in made:
        buffer.fill(start or [None] * len(sizes))
        held_back(buffer, [k for k in range(len(sizes)) if k % 2 and not buffer.marks[k]])
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_every_size_whatever_there_was(backend, dtype, count):
    """Touched, untouched and VOID segments of every size, unaligned, one dtype: loops for one to four, and for any."""
    sizes = [n for n in SIZES for _ in range(4)]
    start = [normal(n, torch.float32) if k % 4 < 2 else None for k, n in enumerate(sizes)]
    batches = [[normal(n, dtype, (7 * j + k) % 17) for k, n in enumerate(sizes)] for j in range(count)]
    scale = torch.tensor(FACTORS[:count])
    buffer = fold_both_ways(backend, three(sizes, start), batches, scale)
    model = FoldModel(sizes)
    model.fold(start, scalar(1.0))
    for batch, factor in zip(batches, scale, strict=True):
        model.fold(batch, factor)
    model.check(buffer)
    assert buffer.marks.tolist() == [TOUCHED_AND_FRESH] * len(sizes)
    assert partials_agree(buffer.partials, buffer.square_sums())
    assert all(guards_intact(grad) for batch in batches for grad in batch)


def test_one_segment_in_several_dtypes(backend):
    """Every order of three dtypes, some of them with a micro-batch between that left nothing."""
    orders = [(a, b, c) for a in DTYPES for b in DTYPES for c in DTYPES]
    sizes = [(17, 4097, 70)[k % 3] for k in range(len(orders))]
    start = [normal(n, torch.float32) if k % 5 < 2 else None for k, n in enumerate(sizes)]
    batches = [[normal(n, orders[k][j], k % 5) if (j + k) % 4 else None for k, n in enumerate(sizes)] for j in range(3)]
    for norm in (False, True):
        fold_both_ways(backend, three(sizes, start), batches, torch.tensor(FACTORS[:3]), norm)


@pytest.mark.parametrize("norm", [False, True])
def test_scales_of_zero_add_nothing_wherever_they_stand(backend, norm):
    """What has a scale of 0 holds NaN; -0.0 stays what it is, and a first touch with nothing else stores +0.0."""
    poison = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan, -0.0] * 4)
    finite = torch.tensor([-0.0, 1.0, -1.5, 0.0, 2.0**-149] * 4)
    for pattern in range(8):
        for zero in (0.0, -0.0):
            present = [bool(pattern >> j & 1) for j in range(3)]
            scale = torch.tensor([0.5 if there else zero for there in present])
            batches = [[finite if there else poison] * 3 for there in present]
            buffer = fold_both_ways(backend, three([20] * 3, [-finite, None, None]), batches, scale, norm)
            assert buffer.flat[:20].isfinite().all()
            if pattern == 0:
                assert same_bits(buffer.segment(0), -finite)
                assert (bits(buffer.segment(1)) == 0).all()
                assert (bits(buffer.segment(2)) == 0).all()


def test_a_segment_lives_where_a_scale_is_not_zero(backend):
    sizes = [17, 4097, 5, 0, 5, 5]
    ones = [torch.ones(n) for n in sizes]
    batches = [[ones[0], None, ones[2], ones[3], None, None], [None, ones[1], ones[2], ones[3], ones[4], None]]
    for scale, live in (
        ([0.0, 0.5], [0, 1, 1, 0, 1, 1]),
        ([0.5, 0.0], [1, 0, 1, 0, 0, 1]),
        ([0.0, 0.0], [0, 0, 0, 0, 0, 1]),
    ):
        buffers = three(sizes, [torch.ones(n) for n in sizes])
        for buffer in buffers:
            buffer.live = torch.tensor([0, 0, 0, 0, 0, 1], dtype=torch.uint8)
        assert fold_both_ways(backend, buffers, batches, torch.tensor(scale)).live.tolist() == live


def test_what_has_no_gradient_is_left_alone(backend):
    """Untouched, touched, fresh and VOID, between segments that are folded."""
    sizes = [17, 4097, 17, 17, 17]
    buffer = Buffer(sizes)
    buffer.fill([None, torch.ones(4097), None, torch.ones(17), None])
    held_back(buffer, [2])
    buffer.marks[1] = TOUCHED_AND_FRESH
    buffer.partials.fill_(-1.0)
    flat = buffer.flat.clone()
    grads = [torch.ones(17, dtype=torch.bfloat16), *[None] * 7, torch.full((17,), 2.0), None]
    backend.fold(*buffer.fold_plan(), grads, torch.tensor([1.0, 0.5]), True)
    assert buffer.marks.tolist() == [TOUCHED_AND_FRESH, TOUCHED_AND_FRESH, TOUCHED | VOID, TOUCHED_AND_FRESH, 0]
    assert (buffer.segment(0) == 1).all()
    assert (buffer.segment(3) == 2).all()
    assert buffer.partials.tolist() == [17.0, -1.0, -1.0, -1.0, 17 * 4.0, -1.0]
    for k in (1, 2, 4):
        offset, numel = buffer.segments[k].tolist()
        assert same_bits(buffer.segment(k), flat[offset : offset + numel])


@pytest.mark.parametrize("mixed", [False, True])
def test_a_first_touch_keeps_negative_zeros(backend, mixed):
    """Nothing is added to nothing: -0.0 and -0.0 is -0.0, and 0.0 where an untouched segment is taken for zeros."""
    for count in range(1, 6):
        grads = [torch.full((17,), -0.0, dtype=DTYPES[j % 3] if mixed else torch.float32) for j in range(count)]
        buffer = Buffer([17])
        backend.fold(*buffer.fold_plan(), grads, torch.ones(count), False)
        assert same_bits(buffer.segment(0), torch.full((17,), -0.0))


def test_sums_are_rounded_after_every_micro_batch(backend):
    """1 + 2^-24 + 2^-24: each addition rounds back to 1, and their sum would not."""
    buffer = Buffer([17])
    small = torch.full((17,), 2.0**-24)
    backend.fold(*buffer.fold_plan(), [torch.ones(17), small, small], torch.ones(3), False)
    assert (buffer.segment(0) == 1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_a_first_touch_larger_than_the_caches(dtype):
    """From 8 Mi elements on the C++ kernels store past the caches, in each of their loops."""
    sizes = [4096 * 800, 17, 4096 * 1300 + 5]
    backend = backends.select(torch.device("cpu"), "compiled")
    assert sum(sizes) > 8 << 20
    for count, norm in ((2, False), (3, True), (5, True)):
        batches = [[torch.randn(n).to(dtype) for n in sizes] for _ in range(count)]
        buffer = Buffer(sizes)
        backend.fold(*buffer.fold_plan(), in_a_row(batches), torch.full((count,), 0.5), norm)
        for k in range(3):  # a product with 0.5 is exact, so that only sums round
            want = 0.5 * batches[0][k].float()
            for batch in batches[1:]:
                want += 0.5 * batch[k].float()
            assert torch.equal(buffer.segment(k), want)
        assert not norm or partials_agree(buffer.partials, buffer.square_sums())
        assert buffer.padding_intact()


def test_gradients_that_are_negated_lazily(backend):
    """One of them, in the second micro-batch: its memory holds the opposite of its values."""
    buffer = Buffer([17, 5])
    grads = [torch.ones(17), torch.ones(5), torch._neg_view(torch.full((17,), 3.0)), None]
    backend.fold(*buffer.fold_plan(), grads, torch.ones(2), False)
    assert (buffer.segment(0) == -2).all()
    assert (buffer.segment(1) == 1).all()


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], list[list[torch.dtype | None]], list[float], list[bool], int]:
    sizes = draw(st.lists(st.integers(0, 70) | st.sampled_from([4095, 4097]), min_size=1, max_size=4))
    count = draw(st.integers(1, 7))
    dtypes = st.sampled_from([*DTYPES, torch.bfloat16, None])
    row = st.lists(dtypes, min_size=len(sizes), max_size=len(sizes))
    rows = draw(st.lists(row, min_size=count, max_size=count))
    scale = st.sampled_from([1.0, 0.125, 1 / 3, -2.0, 1e-30, 0.0])
    scales = draw(st.lists(scale, min_size=count, max_size=count))
    cuts = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return sizes, rows, scales, cuts, draw(st.integers(0, 2**16))


# The fixture holds no state that an example could change.
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(window=windows())
def test_a_window_has_the_same_bits_however_it_is_cut(backend, window):
    """Its micro-batches one by one, all at once, and in groups of any size, each with its norm."""
    sizes, rows, scales, cuts, seed = window
    torch.manual_seed(seed)
    batches = [[None if d is None else normal(n, d) for n, d in zip(sizes, row, strict=True)] for row in rows]
    groups: list[tuple[Batches, list[float]]] = []
    for batch, factor, cut in zip(batches, scales, cuts, strict=True):
        if cut or not groups:
            groups.append(([], []))
        groups[-1][0].append(batch)
        groups[-1][1].append(factor)
    in_groups, at_once = Buffer(sizes), three(sizes)
    for buffer in at_once:
        buffer.marks.zero_()
    for group, factors in groups:
        backend.fold(*in_groups.fold_plan(), in_a_row(group), torch.tensor(factors), True)
    buffer = fold_both_ways(backend, at_once, batches, torch.tensor(scales))
    assert same_values(in_groups.flat, buffer.flat)
    assert same_bits(in_groups.partials, buffer.partials)
    assert in_groups.marks.tolist() == buffer.marks.tolist()
