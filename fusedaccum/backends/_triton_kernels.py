"""The Triton kernels: one program for each tile, whatever the tile's tensors are.

A list of tensors reaches a kernel as a table on the device, int64: a row of words, one for each segment, and a row of
addresses for each list. A word is 2 * kind + touched; a kind has one digit of base 4 for each list, the first list's
the lowest: the code of its tensor's dtype, or ABSENT. A program looks its tile's segment up there, so that one launch
serves all segments and every mix of dtypes. It branches on the kind once, around the whole tile: inside, dtypes are
known when the kernel is compiled, and every load can be issued before the first is used.

Full tiles of aligned tensors take a path without masks: a mask takes away 16-byte accesses even where it is all true.
There, each thread takes 4 elements at a time of every stream, 16 bytes of float32 or 8 of the 16-bit formats: of 8
elements the compiler would store float32 only after an exchange through shared memory.

`live` is a pointer to be used only where LIVE says so; elsewhere every touched segment counts, and it is any tensor.

Under the interpreter (TRITON_INTERPRET=1, set before triton is imported) the same functions run on the CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedaccum import ops

TOUCHED = tl.constexpr(ops.TOUCHED)
FRESH = tl.constexpr(ops.FRESH)
ALIGN = tl.constexpr(ops.ALIGN)
TILE = tl.constexpr(ops.TILE)

ABSENT = tl.constexpr(0)
FLOAT32 = tl.constexpr(1)
BFLOAT16 = tl.constexpr(2)
FLOAT16 = tl.constexpr(3)

# How a tile's elements are reached.
TAIL = tl.constexpr(0)  # with a mask: fewer than a tile
LOOSE = tl.constexpr(1)  # without: a full tile, but the listed tensors may start at any element
WHOLE = tl.constexpr(2)  # without, and they start at multiples of 4 elements
# One element for each thread. With more, what is stored to any address first goes through shared memory, and that and
# the masks take the registers that full tiles need: 112 instead of 64 for an update.
TAIL_BLOCK = tl.constexpr(256)


# Memory movement: elements come as float32 and leave rounded once to nearest even.


@triton.jit
def tile_row(tiles, tile):
    """(segment, first element in the segment, first element in flat, count) of a tile."""
    row = tiles + 4 * tile
    return tl.load(row), tl.load(row + 1), tl.multiple_of(tl.load(row + 2), ALIGN), tl.load(row + 3)


@triton.jit
def counts(word, live, segment, LIVE: tl.constexpr):
    """Whether the window has something for the segment."""
    touched = (word & TOUCHED) != 0
    if LIVE:
        touched &= tl.load(live + segment) != 0
    return touched


@triton.jit
def is_aligned(address, CODE: tl.constexpr):
    """Whether 4 elements at a time can be read from `address` on."""
    return address % (16 if CODE == FLOAT32 else 8) == 0


@triton.jit
def pointer(address, first, CODE: tl.constexpr, PATH: tl.constexpr):
    """A pointer to element `first` of the tensor at `address`."""
    if CODE == FLOAT32:
        place = (address + 4 * first).to(tl.pointer_type(tl.float32))
    elif CODE == BFLOAT16:
        # As integers, because the interpreter has no right bfloat16 arithmetic.
        place = (address + 2 * first).to(tl.pointer_type(tl.uint16))
    else:
        place = (address + 2 * first).to(tl.pointer_type(tl.float16))
    if PATH == WHOLE:
        place = tl.multiple_of(place, 16 if CODE == FLOAT32 else 8)
    return place


@triton.jit
def load_block(place, left, CODE: tl.constexpr, PATH: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements from `place` on; on a tail, zeros from the `left`-th on."""
    lanes = tl.arange(0, BLOCK)
    if PATH == TAIL:
        values = tl.load(place + lanes, mask=lanes < left, other=0)
    else:
        values = tl.load(place + lanes)
    if CODE == BFLOAT16:
        values = (values.to(tl.uint32) << 16).to(tl.float32, bitcast=True)  # the upper half of a float32
    return values.to(tl.float32)


@triton.jit
def store_block(place, left, values, CODE: tl.constexpr, PATH: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    if CODE == BFLOAT16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # A NaN stays one: the carry of the rounding could turn it into an infinity.
        values = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded).to(tl.uint16)
    elif CODE == FLOAT16:
        values = values.to(tl.float16)
    if PATH == TAIL:
        tl.store(place + lanes, values, mask=lanes < left)
    else:
        tl.store(place + lanes, values)


@triton.jit
def _squares(values, left, PATH: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of the squares of 4 neighbours among the first `left` values, in float64, where each square is exact."""
    if PATH == TAIL:
        values = tl.where(tl.arange(0, BLOCK) < left, values, 0.0)
    wide = values.to(tl.float64)
    return tl.sum(tl.reshape(wide * wide, (BLOCK // 4, 4)), axis=1)


# Fold, found_inf and norm


@triton.jit(do_not_specialize=["segment_count"])
def fold_tiles(
    flat,
    partials,
    live,
    tiles,
    table,
    segment_count,
    scale,
    LIVE: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    segment, first, start, count = tile_row(tiles, tile)
    word = tl.load(table + segment)
    address = tl.load(table + segment_count + segment)
    if LIVE:
        # Each segment by the program of its first tile.
        tl.store(live + segment, 1, mask=(first == 0) & (word >> 1 != 0) & (tl.load(scale) != 0))
    for CODE in tl.static_range(1, 4):
        if word >> 1 == CODE:
            if count < TILE:
                total = _fold_tile(flat, address, first, start, count, word, scale, CODE, TAIL, NORM, BLOCK)
            elif not is_aligned(address, CODE):
                total = _fold_tile(flat, address, first, start, TILE, word, scale, CODE, LOOSE, NORM, BLOCK)
            else:
                total = _fold_tile(flat, address, first, start, TILE, word, scale, CODE, WHOLE, NORM, BLOCK)
            if NORM:
                tl.store(partials + tile, tl.sum(total))


@triton.jit
def _fold_tile(
    flat,
    address,
    first,
    start,
    count,
    word,
    scale,
    CODE: tl.constexpr,
    PATH: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    factor = tl.load(scale)
    touched = word & TOUCHED
    total = tl.zeros((BLOCK // 4,), tl.float64)
    for done in range(0, count, BLOCK):
        left = count - done
        target = flat + (start + done)
        if touched:
            values = load_block(target, left, FLOAT32, PATH, BLOCK)
        else:
            values = tl.full((BLOCK,), -0.0, tl.float32)  # x + -0.0 is x, whatever x is
        grad = load_block(pointer(address, first + done, CODE, PATH), left, CODE, PATH, BLOCK)
        # Selects, not products: 0 * inf is not 0, and -0.0 * 0 is not +0.0.
        values = tl.fma(factor, tl.where(factor == 0, 0.0, grad), values)
        values = tl.where((factor == 0) & (touched == 0), 0.0, values)
        store_block(target, left, values, FLOAT32, PATH, BLOCK)
        if NORM:
            total += _squares(values, left, PATH, BLOCK)
    return total


@triton.jit(do_not_specialize=["segment_count"])
def found_inf_tiles(found_inf, tiles, table, segment_count, BLOCK: tl.constexpr):
    segment, first, _, count = tile_row(tiles, tl.program_id(0).to(tl.int64))
    code = tl.load(table + segment) >> 1
    address = tl.load(table + segment_count + segment)
    for CODE in tl.static_range(1, 4):
        if code == CODE:
            if count < TILE:
                largest = _largest_of_tile(address, first, count, CODE, TAIL, BLOCK)
            elif not is_aligned(address, CODE):
                largest = _largest_of_tile(address, first, TILE, CODE, LOOSE, BLOCK)
            else:
                largest = _largest_of_tile(address, first, TILE, CODE, WHOLE, BLOCK)
            if largest >= 0x7F800000:
                tl.store(found_inf, 1.0)  # whoever stores, stores the same


@triton.jit
def _largest_of_tile(address, first, count, CODE: tl.constexpr, PATH: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of the largest magnitude as float32, where infinity is above what is finite, and NaNs above that."""
    largest = tl.zeros((BLOCK,), tl.int32)
    for done in range(0, count, BLOCK):
        values = load_block(pointer(address, first + done, CODE, PATH), count - done, CODE, PATH, BLOCK)
        largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return tl.max(largest)


@triton.jit
def sum_stale_tiles(flat, partials, marks, tiles, BLOCK: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    segment, _, start, count = tile_row(tiles, tile)
    if tl.load(marks + segment) & (TOUCHED | FRESH) == TOUCHED:
        if count < TILE:
            total = _sum_tile(flat, start, count, TAIL, BLOCK)
        else:
            total = _sum_tile(flat, start, TILE, WHOLE, BLOCK)
        tl.store(partials + tile, tl.sum(total))


@triton.jit
def _sum_tile(flat, start, count, PATH: tl.constexpr, BLOCK: tl.constexpr):
    """As `_fold_tile` adds: a pass of its own gives the same bits."""
    total = tl.zeros((BLOCK // 4,), tl.float64)
    for done in range(0, count, BLOCK):
        left = count - done
        total += _squares(load_block(flat + (start + done), left, FLOAT32, PATH, BLOCK), left, PATH, BLOCK)
    return total


@triton.jit(do_not_specialize=["tile_count"])
def sum_partials(partials, marks, tiles, total, tile_count, BLOCK: tl.constexpr):
    """One program: lane i adds the tiles i, i + BLOCK, ..., and the lanes are added last, always in this order."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    sums = tl.zeros((BLOCK,), tl.float64)
    for done in range(0, tile_count, BLOCK):
        tile = done + lanes
        inside = tile < tile_count
        segment = tl.load(tiles + 4 * tile, mask=inside, other=0)
        mark = tl.load(marks + segment, mask=inside, other=0)
        # Partials of untouched segments are left over from earlier windows, and may be anything: they are not read.
        sums += tl.load(partials + tile, mask=inside & ((mark & TOUCHED) != 0), other=0.0)
    tl.store(total, tl.sum(sums))


@triton.jit(do_not_specialize=["segment_count"])
def close(
    scalars,
    steps,
    marks,
    live,
    total,
    divisor,
    max_norm: tl.float64,
    segment_count,
    CLIP: tl.constexpr,
    SKIP_NONFINITE: tl.constexpr,
    LIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    by = tl.load(divisor)
    square = tl.load(total)
    empty = by == 0
    skip = empty
    if SKIP_NONFINITE:
        skip |= not (tl.abs(square) < float("inf"))
    by = tl.where(empty, 1.0, by)
    norm = tl.sqrt(square) / by
    multiplier = 1.0 / by
    if CLIP:
        factor = max_norm / (norm + 1e-6)
        # Not a minimum: a norm that is not a number must stay one.
        multiplier *= tl.where(factor > 1, 1.0, factor)
    tl.store(scalars, tl.where(skip, 0.0, multiplier).to(tl.float32))
    tl.store(scalars + 1, skip.to(tl.float32))
    tl.store(scalars + 2, tl.where(empty, 0.0, norm).to(tl.float32))
    for done in range(0, segment_count, BLOCK):
        segment = done + tl.arange(0, BLOCK)
        inside = segment < segment_count
        counted = (tl.load(marks + segment, mask=inside, other=0) & TOUCHED) != 0
        if LIVE:
            counted &= tl.load(live + segment, mask=inside, other=0) != 0
        tl.store(steps + segment, tl.load(steps + segment, mask=inside) + 1, mask=inside & counted & (not skip))


# What only scales


@triton.jit
def rescale_tiles(flat, marks, tiles, factor, BLOCK: tl.constexpr):
    segment, _, start, count = tile_row(tiles, tl.program_id(0).to(tl.int64))
    if (tl.load(marks + segment) & TOUCHED) != 0:
        if count < TILE:
            _rescale_tile(flat, start, count, factor, TAIL, BLOCK)
        else:
            _rescale_tile(flat, start, TILE, factor, WHOLE, BLOCK)


@triton.jit
def _rescale_tile(flat, start, count, factor, PATH: tl.constexpr, BLOCK: tl.constexpr):
    by = tl.load(factor)
    for done in range(0, count, BLOCK):
        place = flat + (start + done)
        values = by * load_block(place, count - done, FLOAT32, PATH, BLOCK)
        store_block(place, count - done, values, FLOAT32, PATH, BLOCK)


@triton.jit(do_not_specialize=["segment_count"])
def emit_tiles(flat, live, tiles, scalars, table, segment_count, LIVE: tl.constexpr, BLOCK: tl.constexpr):
    segment, first, start, count = tile_row(tiles, tl.program_id(0).to(tl.int64))
    word = tl.load(table + segment)
    address = tl.load(table + segment_count + segment)
    if counts(word, live, segment, LIVE) & (tl.load(scalars + 1) == 0):
        for CODE in tl.static_range(1, 4):
            if word >> 1 == CODE:
                if (count == TILE) & is_aligned(address, CODE):
                    _emit_tile(flat, scalars, address, first, start, TILE, CODE, WHOLE, BLOCK)
                else:
                    _emit_tile(flat, scalars, address, first, start, count, CODE, TAIL, TAIL_BLOCK)


@triton.jit
def _emit_tile(
    flat, scalars, address, first, start, count, CODE: tl.constexpr, PATH: tl.constexpr, BLOCK: tl.constexpr
):
    multiplier = tl.load(scalars)
    for done in range(0, count, BLOCK):
        left = count - done
        values = multiplier * load_block(flat + (start + done), left, FLOAT32, PATH, BLOCK)
        store_block(pointer(address, first + done, CODE, PATH), left, values, CODE, PATH, BLOCK)
