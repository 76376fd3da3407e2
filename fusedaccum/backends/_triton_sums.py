"""Sums with the gradients of several micro-batches, in one pass: see `_triton_kernels` for how tiles find tensors.

The gradients of a segment are digits of its kind like other lists, from digit FIRST on: one for each micro-batch.
Where FIRST is not 0 the digit before says what the sum starts from: STORED, if the flat buffer holds it, and KNOWN, if
the partials are already those of the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedaccum.backends._triton_kernels import (
    ABSENT,
    FLOAT32,
    LOOSE,
    TAIL,
    TILE,
    WHOLE,
    _squares,
    is_aligned,
    load_block,
    pointer,
    store_block,
    tile_row,
)

STORED = 1
KNOWN = 2


@triton.jit
def code_of(KIND: tl.constexpr, LIST: tl.constexpr):
    """What `kind` says of a list: its tensor's dtype, or ABSENT."""
    CODE: tl.constexpr = (KIND >> (2 * LIST)) & 3
    return CODE


@triton.jit
def late_are_aligned(entry, segment_count, KIND: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    aligned = True
    for J in tl.static_range(COUNT):
        if code_of(KIND, FIRST + J) != ABSENT:
            aligned &= is_aligned(tl.load(entry + (1 + FIRST + J) * segment_count), code_of(KIND, FIRST + J))
    return aligned


@triton.jit
def _read(address, at, left, CODE: tl.constexpr, PATH: tl.constexpr, BLOCK: tl.constexpr):
    return load_block(pointer(address, at, CODE, PATH), left, CODE, PATH, BLOCK)


@triton.jit
def sum_block(
    place,
    entry,
    segment_count,
    at,
    left,
    stored,
    scale,
    KIND: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What is stored at `place`, if anything is, and the gradients, added one after the other."""
    if stored:
        values = load_block(place, left, FLOAT32, PATH, BLOCK)
    else:
        # x + -0.0 is x, whatever x is. A contribution that is exactly 0 leaves +0.0.
        values = tl.full((BLOCK,), -0.0, tl.float32)
        for K in tl.static_range(COUNT):
            if code_of(KIND, FIRST + COUNT - 1 - K) != ABSENT:
                values = tl.where(tl.load(scale + COUNT - 1 - K) == 0, tl.zeros((BLOCK,), tl.float32), -0.0)
    for J in tl.static_range(COUNT):
        if code_of(KIND, FIRST + J) != ABSENT:
            address = tl.load(entry + (1 + FIRST + J) * segment_count)
            grad = _read(address, at, left, code_of(KIND, FIRST + J), PATH, BLOCK)
            factor = tl.load(scale + J)
            # Selects, not products: 0 * inf is not 0.
            values = tl.where(factor == 0, values, tl.fma(factor, grad, values))
    return values


@triton.jit(do_not_specialize=["segment_count"])
def fold_several_tiles(
    flat,
    partials,
    live,
    tiles,
    table,
    segment_count,
    scale,
    KINDS: tl.constexpr,
    COUNT: tl.constexpr,
    LIVE: tl.constexpr,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """KINDS: the kinds that occur. Without STORE only the partials are left behind."""
    tile = tl.program_id(0).to(tl.int64)
    segment, first, start, count = tile_row(tiles, tile)
    entry = table + segment
    word = tl.load(entry)
    place = (first, start)
    if LIVE:
        # Each segment by the program of its first tile.
        for J in tl.static_range(COUNT):
            there = (word >> (1 + 2 * J)) & 3 != 0
            tl.store(live + segment, 1, mask=(first == 0) & there & (tl.load(scale + J) != 0))
    for K in tl.static_range(len(KINDS)):
        if word >> 1 == KINDS[K]:
            if count < TILE:
                total = _sum_tile(
                    flat, entry, segment_count, place, count, word, scale, KINDS[K], COUNT, TAIL, NORM, STORE, BLOCK
                )
            elif not late_are_aligned(entry, segment_count, KINDS[K], 0, COUNT):
                total = _sum_tile(
                    flat, entry, segment_count, place, TILE, word, scale, KINDS[K], COUNT, LOOSE, NORM, STORE, BLOCK
                )
            else:
                total = _sum_tile(
                    flat, entry, segment_count, place, TILE, word, scale, KINDS[K], COUNT, WHOLE, NORM, STORE, BLOCK
                )
            if NORM:
                tl.store(partials + tile, tl.sum(total))


@triton.jit
def _sum_tile(
    flat,
    entry,
    segment_count,
    place,
    count,
    word,
    scale,
    KIND: tl.constexpr,
    COUNT: tl.constexpr,
    PATH: tl.constexpr,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, start = place
    total = tl.zeros((BLOCK // 4,), tl.float64)
    for done in range(0, count, BLOCK):
        left, target = count - done, flat + (start + done)
        values = sum_block(
            target, entry, segment_count, first + done, left, word & 1, scale, KIND, 0, COUNT, PATH, BLOCK
        )
        if STORE:
            store_block(target, left, values, FLOAT32, PATH, BLOCK)
        if NORM:
            total += _squares(values, left, PATH, BLOCK)
    return total


@triton.jit
def read_sum(
    place,
    late,
    at,
    left,
    KIND: tl.constexpr,
    LISTS: tl.constexpr,
    LATE: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the update reads. LATE: None where that is what is stored, else the number of late lists."""
    if LATE is None:
        return load_block(place, left, FLOAT32, PATH, BLOCK)
    else:
        entry, segment_count, scale, _ = late
        HAS: tl.constexpr = code_of(KIND, LISTS) % 2  # STORED
        return sum_block(place, entry, segment_count, at, left, HAS, scale, KIND, LISTS + 1, LATE, PATH, BLOCK)


@triton.jit
def has_norm(KIND: tl.constexpr, LISTS: tl.constexpr, NORM: tl.constexpr):
    HAS: tl.constexpr = NORM and code_of(KIND, LISTS) < 2  # not KNOWN
    return HAS
