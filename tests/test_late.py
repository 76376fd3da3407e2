"""Late gradients: `square_total` and the updates add them themselves, with the bits of a fold before."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
    bits,
    guards_intact,
    held_back,
    normal,
    partials_agree,
    same_bits,
    total_tensor,
)
from step_cases import GROUPS, Update
from torch import Tensor

from fusedaccum.ops import FRESH, TOUCHED, VOID

RULES = ("adam", "sgd")
FACTORS = (1 / 3, -2.0, 0.125, 1.0, 0.7, 3.0)


def fill(buffer: Buffer) -> None:
    """Segments in turn: touched, untouched, VOID, touched and fresh, touched and without a late gradient."""
    sizes = buffer.segments[:, 1].tolist()
    buffer.fill([normal(n, torch.float32) if k % 5 not in (1, 2) else None for k, n in enumerate(sizes)])
    held_back(buffer, range(2, len(sizes), 5))
    fresh = range(3, len(sizes), 5)
    for k in fresh:  # of sums that the late gradients are not in
        buffer.partials[buffer.tiles_of(k)] = buffer.square_sums()[buffer.tiles_of(k)]
        buffer.marks[k] = TOUCHED_AND_FRESH


def late_for(buffer: Buffer, count: int, dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[Tensor | None]:
    """Gradients of some micro-batches, for segments as `fill` marks them; the first of VOID segments are missing."""
    grads: list[Tensor | None] = []
    for j in range(count):
        for k, n in enumerate(buffer.segments[:, 1].tolist()):
            is_there = k % 5 not in (1, 4) and not (k % 5 == 2 and count > 1 and j == 0)
            grads.append(normal(n, dtypes[(j + k // 5) % len(dtypes)], (3 * j + k) % 17) if is_there else None)
    return grads


def scale_of(count: int) -> Tensor:
    return torch.tensor(FACTORS[:count])


def total_of(
    backend: ModuleType, buffer: Buffer, late: Sequence[Tensor | None] = (), scale: Tensor | None = None
) -> Tensor:
    total = total_tensor()
    backend.square_total(*buffer.norm_plan(late, scale), total)
    return total[:1]


def twins(sizes: list[int]) -> tuple[Buffer, Buffer]:
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        made.append(Buffer(sizes))
        fill(made[-1])
    return made[0], made[1]


# square_total


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_norm_with_late_gradients_is_that_of_a_fold(backend, count):
    late_buffer, folded = twins([n for n in SIZES for _ in range(5)])
    late, scale = late_for(folded, count), scale_of(count)
    flat, marks = late_buffer.flat.clone(), late_buffer.marks.clone()
    got = total_of(backend, late_buffer, late, scale)
    backend.fold(*folded.fold_plan(), late, scale, True)
    assert same_bits(got, total_of(backend, folded))
    touched = (marks[late_buffer.tiles[:, 0]] & TOUCHED) != 0
    assert same_bits(late_buffer.partials[touched], folded.partials[touched])
    assert late_buffer.partials[~touched].isnan().all()
    assert same_bits(late_buffer.flat, flat), "the sums are not stored"
    want = [mark | FRESH if mark & TOUCHED else mark for mark in marks.tolist()]
    assert late_buffer.marks.tolist() == want
    assert same_bits(total_of(backend, late_buffer), got), "what is fresh is added up as it is, VOID or not"
    assert partials_agree(folded.partials[touched], folded.square_sums()[touched])
    assert all(guards_intact(grad) for grad in late if grad is not None)


def test_a_norm_with_late_gradients_of_scale_zero(backend):
    buffer = Buffer([17, 17, 17])
    buffer.fill([torch.ones(17), None, torch.ones(17)])
    held_back(buffer, [1])
    nan, ones = torch.full((17,), torch.nan), torch.ones(17)
    total = total_of(backend, buffer, [nan, nan, nan, None, None, ones], torch.tensor([0.0, 2.0]))
    assert total.item() == 17 * (1.0 + 0.0 + 9.0)


def test_an_infinite_scale_makes_an_infinite_norm(backend):
    """And not one that is not a number: what lies past a segment's end, 0 times infinity, adds nothing."""
    for marked in (TOUCHED, TOUCHED | VOID):
        update = Update("sgd", [17], [2], torch.float32, torch.float32)
        buffer = update.buffer
        buffer.fill([torch.ones(17)], marked)
        late, scale = [torch.ones(17)], torch.tensor([torch.inf])
        assert total_of(backend, buffer, late, scale).item() == torch.inf
        buffer.marks[0], buffer.partials[0] = marked, torch.nan
        update.late, update.late_scale, update.partials = late, scale, buffer.partials
        update.run(backend)
        assert total_of(backend, buffer).item() == torch.inf


# The updates


def update_twins(
    rule: str, param: torch.dtype, state: torch.dtype, master: bool, random: bool = False, offset: int = 0
) -> tuple[Update, Update]:
    made = []
    count = len(GROUPS[rule])
    sizes = [SIZES[(k + offset) % len(SIZES)] for k in range(count)]
    for _ in range(2):
        torch.manual_seed(1)
        update = Update(rule, sizes, [(1, 7, 2, 1000)[(k + offset) % 4] for k in range(count)], param, state, master)
        update.scalars[0] = 0.3
        if random:
            update.random = torch.arange(count + 2) + 2**40
        fill(update.buffer)
        made.append(update)
    return made[0], made[1]


def check_update(backend: ModuleType, late: Update, folded: Update, count: int, zero: bool, norm: bool) -> None:
    """`late` given its gradients, and `folded` with a fold before: the same bits in everything that is written."""
    grads, scale = late_for(folded.buffer, count), scale_of(count)
    late.late, late.late_scale = grads, scale
    late.partials = late.buffer.partials if norm else None
    flat, marks, partials = (t.clone() for t in (late.buffer.flat, late.buffer.marks, late.buffer.partials))
    late.run(backend, zero)
    backend.fold(*folded.buffer.fold_plan(), grads, scale, norm)
    folded.run(backend, zero)
    for a, b in zip(late.lists(), folded.lists(), strict=True):
        assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    for k, mark in enumerate(marks.tolist()):
        offset, numel = late.buffer.segments[k].tolist()
        if mark & TOUCHED and zero:
            assert (bits(late.buffer.segment(k)) == 0).all()
        else:
            assert same_bits(late.buffer.segment(k), flat[offset : offset + numel])
    late.check_surroundings()
    if norm:
        assert late.buffer.marks.tolist() == [m | FRESH if m & TOUCHED else m for m in marks.tolist()]
        if not zero:
            assert same_bits(total_of(backend, late.buffer), total_of(backend, folded.buffer))
    else:
        assert same_bits(late.buffer.marks, marks)
        assert same_bits(late.buffer.partials, partials)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("param", "state", "master"),
    list(itertools.product(DTYPES, DTYPES, (False, True))),
    ids=lambda x: NAMES.get(x) if x in NAMES else f"master={x}",
)
def test_an_update_with_late_gradients_is_a_fold_and_an_update(backend, rule, param, state, master):
    """Every group of options, all kinds of segments and sizes, with and without partials."""
    index = DTYPES.index(param) * 3 + DTYPES.index(state)
    for norm in (False, True):
        pair = update_twins(rule, param, state, master, offset=index + norm)
        check_update(backend, *pair, count=1 + (index + norm) % 3, zero=False, norm=norm)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("zero", [False, True])
def test_any_number_of_late_micro_batches(backend, rule, count, zero):
    pair = update_twins(rule, torch.bfloat16, torch.float32, True, offset=count)
    check_update(backend, *pair, count=count, zero=zero, norm=True)


@pytest.mark.parametrize("rule", RULES)
def test_late_gradients_and_stochastic_rounding(backend, rule):
    pair = update_twins(rule, torch.bfloat16, torch.bfloat16, False, random=True)
    check_update(backend, *pair, count=2, zero=False, norm=True)


@pytest.mark.parametrize("rule", RULES)
def test_partials_without_late_gradients(backend, rule):
    """The norm of what an update reads: stale tiles get their sums, fresh and untouched ones keep theirs."""
    update, plain = update_twins(rule, torch.float32, torch.float32, False)
    for each in (update, plain):
        each.buffer.marks[[k for k in range(len(each.params)) if k % 5 == 2]] = 0
    update.partials = update.buffer.partials
    update.run(backend)
    plain.run(backend)
    for a, b in zip(update.lists(), plain.lists(), strict=True):
        assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    assert update.buffer.marks.tolist() == [m | FRESH if m & TOUCHED else m for m in plain.buffer.marks.tolist()]
    assert same_bits(total_of(backend, update.buffer), total_of(backend, plain.buffer))
    untouched = (update.buffer.marks[update.buffer.tiles[:, 0]] & TOUCHED) == 0
    assert untouched.any()
    assert update.buffer.partials[untouched].isnan().all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("zero", [False, True])
def test_a_skipped_update_adds_nothing(backend, rule, zero):
    update, _ = update_twins(rule, torch.bfloat16, torch.float32, True)
    update.late, update.late_scale = late_for(update.buffer, 2), scale_of(2)
    update.partials = update.buffer.partials
    update.scalars.copy_(torch.tensor([torch.nan, 1.0, torch.nan]))
    before = [tensor.clone() for tensor in itertools.chain(*update.lists())]
    flat, marks = update.buffer.flat.clone(), update.buffer.marks.tolist()
    update.run(backend, zero)
    assert all(same_bits(a, b) for a, b in zip(itertools.chain(*update.lists()), before, strict=True))
    for k, mark in enumerate(marks):
        offset, numel = update.buffer.segments[k].tolist()
        if mark & TOUCHED and zero:
            assert (bits(update.buffer.segment(k)) == 0).all()
        else:
            assert same_bits(update.buffer.segment(k), flat[offset : offset + numel])
    assert update.buffer.marks.tolist() == [mark | FRESH if mark & TOUCHED else mark for mark in marks]
    update.check_surroundings()


@pytest.mark.parametrize("rule", RULES)
def test_written_tensors_tell_autograd(backend, rule):
    update, other = update_twins(rule, torch.float32, torch.float32, False)
    update.late, update.late_scale = late_for(update.buffer, 1), scale_of(1)
    read = [grad for grad in update.late if grad is not None] + [update.late_scale]
    for each, with_partials in ((update, True), (other, False)):
        each.late, each.late_scale = update.late, update.late_scale
        each.partials = each.buffer.partials if with_partials else None
        watched = (each.buffer.partials, each.buffer.marks)
        before = [tensor._version for tensor in (*watched, each.buffer.flat, *read)]
        each.run(backend)
        grown = [t._version > v for t, v in zip((*watched, each.buffer.flat, *read), before, strict=True)]
        assert grown == [with_partials] * 2 + [False] * (1 + len(read))


@pytest.mark.parametrize("rule", RULES)
def test_late_gradients_that_are_negated_lazily(backend, rule):
    pair = [Update(rule, [17], [2], torch.float32, torch.float32) for _ in range(2)]
    totals = []
    for update, grad in zip(pair, (torch._neg_view(-torch.ones(17)), torch.ones(17)), strict=True):
        for a, b in zip(update.lists(), pair[0].lists(), strict=True):
            for x, y in zip(a, b, strict=True):
                x.copy_(y)
        held_back(update.buffer, [0])
        totals.append(total_of(backend, update.buffer, [grad], scale_of(1)))
        update.late, update.late_scale = [grad], scale_of(1)
    for update in pair:
        update.run(backend)
    assert same_bits(*totals)
    assert same_bits(pair[0].params[0], pair[1].params[0])


@st.composite
def updates(draw: st.DrawFn) -> tuple[str, list[int], list[int], list[list[torch.dtype | None]], list[float], int]:
    rule = draw(st.sampled_from(RULES))
    sizes = draw(st.lists(st.integers(0, 70) | st.sampled_from([4095, 4097]), min_size=1, max_size=4))
    n = len(sizes)
    marks = draw(st.lists(st.sampled_from([0, TOUCHED, TOUCHED_AND_FRESH, TOUCHED | VOID]), min_size=n, max_size=n))
    count = draw(st.integers(1, 6))
    row = st.lists(st.sampled_from([*DTYPES, None]), min_size=n, max_size=n)
    rows = draw(st.lists(row, min_size=count, max_size=count))
    scale = st.sampled_from([1.0, 1 / 3, -2.0, 0.0])
    scales = draw(st.lists(scale, min_size=count, max_size=count))
    for k, mark in enumerate(marks):
        if not mark & TOUCHED:
            for each in rows:
                each[k] = None
        elif mark & VOID and all(each[k] is None for each in rows):
            rows[-1][k] = torch.bfloat16
    return rule, sizes, marks, rows, scales, draw(st.integers(0, 2**16))


# The fixture holds no state that an example could change.
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=updates())
def test_any_update_is_a_fold_and_an_update(backend, drawn):
    rule, sizes, marks, rows, scales, seed = drawn
    made = []
    for _ in range(2):
        torch.manual_seed(seed)
        update = Update(rule, sizes, [2] * len(sizes), torch.bfloat16, torch.float32, True)
        update.buffer.fill([normal(n, torch.float32) if m else None for n, m in zip(sizes, marks, strict=True)])
        held_back(update.buffer, [k for k, m in enumerate(marks) if m & VOID])
        for k in (k for k, m in enumerate(marks) if m & FRESH):
            update.buffer.marks[k] = TOUCHED_AND_FRESH
            update.buffer.partials[update.buffer.tiles_of(k)] = update.buffer.square_sums()[update.buffer.tiles_of(k)]
        made.append(update)
    late, folded = made
    grads = [None if d is None else normal(n, d) for row in rows for n, d in zip(sizes, row, strict=True)]
    late.late, late.late_scale, late.partials = grads, torch.tensor(scales), late.buffer.partials
    ahead = total_of(backend, late.buffer, grads, late.late_scale)
    late.run(backend)
    backend.fold(*folded.buffer.fold_plan(), grads, late.late_scale, True)
    folded.run(backend)
    for a, b in zip(late.lists(), folded.lists(), strict=True):
        assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    want = total_of(backend, folded.buffer)
    assert same_bits(total_of(backend, late.buffer), want)
    assert same_bits(ahead, want)
    late.check_surroundings()
