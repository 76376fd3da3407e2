"""`fold` on every backend: values, marks, and what it must not write."""

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
    partials_agree,
    place,
    same_bits,
    same_values,
    scalar,
    total_tensor,
)
from torch import Tensor

from fusedaccum import backends
from fusedaccum.backends import reference
from fusedaccum.ops import TOUCHED


def normal(numel: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """Values over many magnitudes, so that sums round in most elements."""
    return place((torch.randn(numel) * torch.randn(numel).exp()).to(dtype), offset)


def fold_both(backend: ModuleType, sizes: list[int], windows: list[tuple[list[Tensor | None], Tensor, bool]]) -> Buffer:
    """The same folds by the backend and by the specification: equal in every bit that may be written."""
    ours, theirs = Buffer(sizes), Buffer(sizes)
    for grads, scale, norm in windows:
        backend.fold(*ours.fold_plan(), grads, scale, norm)
        reference.fold(*theirs.fold_plan(), grads, scale, norm)
    assert same_values(ours.flat, theirs.flat)
    assert same_bits(ours.marks, theirs.marks)
    assert ours.padding_intact()
    return ours


def test_every_size_at_every_start_offset(backend):
    """Tails, tile edges and unaligned sources, for each dtype, in one list."""
    cases = [(numel, dtype, offset) for dtype in DTYPES for numel in SIZES for offset in range(17)]
    grads = [normal(*case) for case in cases]
    more = [normal(*case) for case in cases]
    sizes = [numel for numel, _, _ in cases]
    buffer = fold_both(backend, sizes, [(grads, scalar(0.25), False), (more, scalar(0.25), True)])
    model = FoldModel(sizes)
    model.fold(grads, scalar(0.25))
    model.fold(more, scalar(0.25))
    model.check(buffer)
    assert partials_agree(buffer.partials, buffer.square_sums())
    assert all(guards_intact(grad) for grad in grads + more)


def test_a_first_touch_larger_than_the_caches():
    """From 8 Mi elements on the C++ kernels store past the caches. Size makes no difference to the other backends."""
    sizes = [4096 * 800, 1, 17, 4096 * 1000 + 5, 4096 * 400 - 1]
    grads = [normal(n, DTYPES[k % 3], k) for k, n in enumerate(sizes)]
    assert sum(sizes) > 8 << 20
    buffer = fold_both(backends.select(torch.device("cpu"), "compiled"), sizes, [(grads, scalar(1 / 3), True)])
    assert partials_agree(buffer.partials, buffer.square_sums())


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("factor", [1.0, 1 / 3, -0.7])
def test_a_window_of_one_dtype(backend, dtype, factor):
    sizes = [17, 4097, 1]
    windows = [([normal(n, dtype) for n in sizes], scalar(factor), False) for _ in range(4)]
    buffer = fold_both(backend, sizes, windows)
    model = FoldModel(sizes)
    for grads, scale, _ in windows:
        model.fold(grads, scale)
    model.check(buffer)


def test_a_product_is_added_with_one_rounding(backend):
    """scale * grad = 1 + 2^-11 + 2^-24 lies half-way between two float32; only what was there tells up from down."""
    above = 2.0**-60
    start = torch.tensor([above, -above, 0.0])
    buffer = Buffer([3])
    buffer.fill([start])
    backend.fold(*buffer.fold_plan(), [torch.full((3,), 1 + 2.0**-12)], scalar(1 + 2.0**-12), False)
    low = 1 + 2.0**-11
    assert buffer.segment(0).tolist() == [low + 2.0**-23, low, low]


@pytest.mark.parametrize(
    ("dtype", "first", "ones", "want"),
    [(torch.bfloat16, 256.0, 7, 32.875), (torch.float16, 2.0**-24, 7, None), (torch.float16, 40000.0, 0, 5000.0)],
)
def test_sums_keep_what_the_gradients_dtype_would_lose(backend, dtype, first, ones, want):
    """Eight micro-batches at scale 1/8: in bf16, 256 + 1 is 256; in fp16, 2^-24 / 8 is 0."""
    values = [first] + [1.0 if want else first] * ones
    buffer = Buffer([16])
    for value in values:
        backend.fold(*buffer.fold_plan(), [torch.full((16,), value, dtype=dtype)], scalar(0.125), False)
    assert buffer.segment(0).tolist() == [want or 2.0**-24] * 16


def test_first_touch_overwrites_whatever_was_there(backend):
    buffer = Buffer([4097, 5])
    assert buffer.segment(0).isnan().all()
    grads = [torch.ones(4097, dtype=torch.bfloat16), torch.full((5,), 2.0)]
    backend.fold(*buffer.fold_plan(), grads, scalar(0.5), False)
    assert (buffer.segment(0) == 0.5).all()
    assert (buffer.segment(1) == 1.0).all()
    buffer.marks.zero_()
    backend.fold(*buffer.fold_plan(), [None, grads[1]], scalar(0.5), False)
    assert (buffer.segment(1) == 1.0).all(), "a new window does not add to the one before"


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_special_values(backend, dtype):
    """NaN, infinities, the smallest subnormals and -0 go through a first touch unchanged, and add up as IEEE says."""
    info = torch.finfo(dtype)
    values = [torch.nan, torch.inf, -torch.inf, -0.0, 0.0, info.smallest_normal, info.max, info.min]
    values += [info.smallest_normal * info.eps, -info.smallest_normal * info.eps]
    grad = torch.tensor(values, dtype=torch.float64).to(dtype)
    buffer = fold_both(backend, [10], [([grad], scalar(1.0), False)])
    assert same_values(buffer.segment(0), grad.float())
    opposite = fold_both(backend, [10], [([grad], scalar(1.0), False), ([-grad], scalar(1.0), False)])
    assert opposite.segment(0).isnan().tolist() == [True] * 3 + [False] * 7
    assert (bits(opposite.segment(0)[3:]) == 0).all(), "x - x is +0.0"


def test_sums_reach_into_subnormals(backend):
    grads = [torch.full((17,), 2.0**-126), torch.full((17,), -(2.0**-126) * (1 - 2.0**-23))]
    buffer = fold_both(backend, [17], [([grad], scalar(1.0), False) for grad in grads])
    assert (buffer.segment(0) == 2.0**-149).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_scale_zero_contributes_exactly_nothing(backend, dtype, zero):
    poison = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, -1.0], dtype=dtype)
    buffer = Buffer([5, 5])
    before = torch.tensor([1.0, -2.5, torch.inf, 2.0**-149, -3.0])
    buffer.fill([None, before])
    backend.fold(*buffer.fold_plan(), [poison, poison], scalar(zero), True)
    assert (bits(buffer.segment(0)) == 0).all(), "a first touch stores +0.0"
    assert same_bits(buffer.segment(1), before)
    assert buffer.marks.tolist() == [TOUCHED_AND_FRESH] * 2
    assert buffer.partials[0] == 0


def test_a_segment_without_gradient_is_left_alone(backend):
    buffer = Buffer([17, 4097, 17, 0, 0])
    buffer.fill([None, torch.ones(4097), None, None, None], TOUCHED_AND_FRESH)
    buffer.partials.fill_(-1.0)
    flat, marks = buffer.flat.clone(), buffer.marks.clone()
    backend.fold(*buffer.fold_plan(), [None] * 5, scalar(1.0), True)
    assert same_bits(buffer.flat, flat)
    assert same_bits(buffer.marks, marks)
    assert (buffer.partials == -1.0).all()
    grads = [torch.ones(17), None, None, None, torch.ones(0)]
    backend.fold(*buffer.fold_plan(), grads, scalar(1.0), True)
    assert buffer.marks.tolist() == [TOUCHED_AND_FRESH, TOUCHED_AND_FRESH, 0, 0, TOUCHED_AND_FRESH]
    assert same_bits(buffer.segment(1), flat[64 : 64 + 4097])
    assert buffer.segment(2).isnan().all()
    assert buffer.partials.tolist() == [17.0, -1.0, -1.0, -1.0]


def test_marks_say_whether_the_partials_hold(backend):
    buffer = Buffer([17, 17])
    grads = [torch.ones(17), torch.ones(17)]
    backend.fold(*buffer.fold_plan(), grads, scalar(1.0), True)
    assert buffer.marks.tolist() == [TOUCHED_AND_FRESH] * 2
    backend.fold(*buffer.fold_plan(), [None, grads[1]], scalar(1.0), False)
    assert buffer.marks.tolist() == [TOUCHED_AND_FRESH, TOUCHED]
    backend.fold(*buffer.fold_plan(), grads, scalar(1.0), True)
    assert buffer.marks.tolist() == [TOUCHED_AND_FRESH] * 2
    assert buffer.partials.tolist() == [17 * 4.0, 17 * 9.0]


def test_no_segments_at_all(backend):
    buffer = Buffer([])
    backend.fold(*buffer.fold_plan(), [], scalar(1.0), True)
    assert buffer.flat.numel() == 0


def test_gradients_of_any_shape_are_read_in_memory_order(backend):
    grad = torch.randn(3, 5, 7)
    weight = torch.nn.Parameter(torch.randn(4, 4))
    buffer = fold_both(backend, [105, 16], [([grad, weight], scalar(1.0), False)])
    assert torch.equal(buffer.segment(0), grad.view(-1))
    assert torch.equal(buffer.segment(1), weight.detach().view(-1))


def test_written_tensors_tell_autograd(backend):
    buffer = Buffer([17])
    written = (buffer.flat, buffer.partials, buffer.marks)
    before = [tensor._version for tensor in written]
    backend.fold(*buffer.fold_plan(), [torch.ones(17)], scalar(1.0), True)
    assert all(tensor._version > version for tensor, version in zip(written, before, strict=True))


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], list[torch.dtype], list[tuple[float, list[bool], bool]], int]:
    sizes = draw(st.lists(st.integers(0, 70) | st.sampled_from([4095, 4097]), min_size=1, max_size=5))
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=len(sizes), max_size=len(sizes)))
    has_grad = st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))
    scales = st.sampled_from([1.0, 0.125, 1 / 3, 0.1, -2.0, 1e-30, 0.0])
    micro_batches = draw(st.lists(st.tuples(scales, has_grad, st.booleans()), min_size=1, max_size=4))
    return sizes, dtypes, micro_batches, draw(st.integers(0, 2**16))


# The fixture holds no state that an example could change.
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(window=windows())
def test_any_window_is_its_float64_sum(backend, window):
    """And its norm is that of what was stored, whatever was fresh, stale or untouched."""
    sizes, dtypes, micro_batches, seed = window
    torch.manual_seed(seed)
    folds = []
    model = FoldModel(sizes)
    for factor, has_grad, norm in micro_batches:
        parts = enumerate(zip(sizes, dtypes, has_grad, strict=True))
        grads = [normal(n, dtype, k % 17) if present else None for k, (n, dtype, present) in parts]
        model.fold(grads, scalar(factor))
        folds.append((grads, scalar(factor), norm))
    buffer = fold_both(backend, sizes, folds)
    model.check(buffer)

    total = total_tensor()
    backend.square_total(*buffer.norm_plan(), total)
    touched = [buffer.segment(k) for k, count in enumerate(model.folds) if count]
    want = torch.cat([torch.zeros(1), *touched]).double().square().sum()
    assert abs(total[0].item() - want.item()) <= buffer.flat.numel() * 2.0**-52 * want.item()
