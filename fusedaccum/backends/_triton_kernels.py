"""The Triton kernels: one program for each tile, whatever the tile's tensors are.

A list of tensors reaches a kernel as a table on the device, int64: (address, dtype code) for each segment and list. A
program looks up its tile's segment there, so that one launch serves all segments and every mix of dtypes; the branch on
the code is the same for a whole program.

Under the interpreter (TRITON_INTERPRET=1, set before triton is imported) the same functions run on the CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedaccum import ops

TOUCHED = tl.constexpr(ops.TOUCHED)
FRESH = tl.constexpr(ops.FRESH)

ABSENT = tl.constexpr(0)
FLOAT32 = tl.constexpr(1)
BFLOAT16 = tl.constexpr(2)
FLOAT16 = tl.constexpr(3)


# Memory movement: elements come as float32 and leave rounded once to nearest even.


@triton.jit
def _load_plain(place, left, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements from address `place` on, zeros from the `left`-th on.

    A mask takes away 16-byte accesses even where it is all true, so whole blocks have a branch without one.
    """
    lanes = tl.arange(0, BLOCK)
    if (left >= BLOCK) & (place % 16 == 0):
        values = tl.load(tl.multiple_of(place.to(tl.pointer_type(DTYPE)), 16) + lanes)
    else:
        values = tl.load(place.to(tl.pointer_type(DTYPE)) + lanes, mask=lanes < left, other=0)
    return values


@triton.jit
def _store_plain(place, left, values, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    if (left >= BLOCK) & (place % 16 == 0):
        tl.store(tl.multiple_of(place.to(tl.pointer_type(DTYPE)), 16) + lanes, values)
    else:
        tl.store(place.to(tl.pointer_type(DTYPE)) + lanes, values, mask=lanes < left)


@triton.jit
def _load(address, code, first, left, BLOCK: tl.constexpr):
    """Elements `first` to `first` + BLOCK of the tensor at `address`, as float32; zeros where there is no tensor."""
    if code == FLOAT32:
        values = _load_plain(address + 4 * first, left, tl.float32, BLOCK)
    elif code == BFLOAT16:
        # bfloat16 is the upper half of float32. As integers, because the interpreter has no right bfloat16 arithmetic.
        upper = _load_plain(address + 2 * first, left, tl.uint16, BLOCK).to(tl.uint32)
        values = (upper << 16).to(tl.float32, bitcast=True)
    elif code == FLOAT16:
        values = _load_plain(address + 2 * first, left, tl.float16, BLOCK).to(tl.float32)
    else:
        values = tl.zeros((BLOCK,), tl.float32)
    return values


@triton.jit
def _store(address, code, first, left, values, BLOCK: tl.constexpr):
    if code == FLOAT32:
        _store_plain(address + 4 * first, left, values, tl.float32, BLOCK)
    elif code == BFLOAT16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # A NaN stays one: the carry of the rounding could turn it into an infinity.
        upper = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)
        _store_plain(address + 2 * first, left, upper.to(tl.uint16), tl.uint16, BLOCK)
    elif code == FLOAT16:
        _store_plain(address + 2 * first, left, values.to(tl.float16), tl.float16, BLOCK)


@triton.jit
def _sum_squares(values, left, BLOCK: tl.constexpr):
    """The sum of squares of the first `left` values, in float64, where the square of a float32 is exact."""
    wide = tl.where(tl.arange(0, BLOCK) < left, values, 0.0).to(tl.float64)
    return tl.sum(wide * wide)


@triton.jit
def _place(tiles, tile):
    """(segment, first element in the segment, first element in flat, count) of a tile."""
    row = tiles + 4 * tile
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def _is_touched(marks, segment):
    return (tl.load(marks + segment) & TOUCHED) != 0


# Fold and norm


@triton.jit
def fold_tiles(flat, partials, marks, tiles, grads, scale, NORM: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    segment, first, start, count = _place(tiles, tile)
    address = tl.load(grads + 2 * segment)
    code = tl.load(grads + 2 * segment + 1)
    if code != ABSENT:
        factor = tl.load(scale)
        touched = _is_touched(marks, segment)
        total = tl.full((), 0.0, tl.float64)
        for done in range(0, count, BLOCK):
            left = count - done
            # A select, not a product: 0 * inf is not 0, and -0.0 * 0 is not +0.0.
            addend = tl.where(factor == 0, 0.0, _load(address, code, first + done, left, BLOCK))
            product = tl.where(factor == 0, 0.0, factor * addend)
            if touched:
                values = tl.fma(factor, addend, _load(flat.to(tl.int64), FLOAT32, start + done, left, BLOCK))
            else:
                values = product
            _store(flat.to(tl.int64), FLOAT32, start + done, left, values, BLOCK)
            if NORM:
                total += _sum_squares(values, left, BLOCK)
        if NORM:
            tl.store(partials + tile, total)


@triton.jit
def sum_stale_tiles(flat, partials, marks, tiles, BLOCK: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    segment, _, start, count = _place(tiles, tile)
    if tl.load(marks + segment) & (TOUCHED | FRESH) == TOUCHED:
        total = tl.full((), 0.0, tl.float64)
        for done in range(0, count, BLOCK):
            values = _load(flat.to(tl.int64), FLOAT32, start + done, count - done, BLOCK)
            total += _sum_squares(values, count - done, BLOCK)
        tl.store(partials + tile, total)


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
    total,
    divisor,
    max_norm: tl.float64,
    segment_count,
    CLIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    by = tl.load(divisor)
    skip = by == 0
    by = tl.where(skip, 1.0, by)
    norm = tl.sqrt(tl.load(total)) / by
    multiplier = 1.0 / by
    if CLIP:
        factor = max_norm / (norm + 1e-6)
        # Not a minimum: a norm that is not a number must stay one.
        multiplier *= tl.where(factor > 1, 1.0, factor)
    tl.store(scalars, tl.where(skip, 0.0, multiplier).to(tl.float32))
    tl.store(scalars + 1, skip.to(tl.float32))
    tl.store(scalars + 2, tl.where(skip, 0.0, norm).to(tl.float32))
    for done in range(0, segment_count, BLOCK):
        segment = done + tl.arange(0, BLOCK)
        inside = segment < segment_count
        touched = (tl.load(marks + segment, mask=inside, other=0) & TOUCHED) != 0
        tl.store(steps + segment, tl.load(steps + segment, mask=inside) + 1, mask=inside & touched & (not skip))


# What only scales


@triton.jit
def rescale_tiles(flat, marks, tiles, factor, BLOCK: tl.constexpr):
    segment, _, start, count = _place(tiles, tl.program_id(0).to(tl.int64))
    if _is_touched(marks, segment):
        by = tl.load(factor)
        for done in range(0, count, BLOCK):
            values = _load(flat.to(tl.int64), FLOAT32, start + done, count - done, BLOCK)
            _store(flat.to(tl.int64), FLOAT32, start + done, count - done, by * values, BLOCK)


@triton.jit
def emit_tiles(flat, marks, tiles, scalars, grads, BLOCK: tl.constexpr):
    segment, first, start, count = _place(tiles, tl.program_id(0).to(tl.int64))
    address = tl.load(grads + 2 * segment)
    code = tl.load(grads + 2 * segment + 1)
    if _is_touched(marks, segment) & (tl.load(scalars + 1) == 0):
        multiplier = tl.load(scalars)
        for done in range(0, count, BLOCK):
            values = _load(flat.to(tl.int64), FLOAT32, start + done, count - done, BLOCK)
            _store(address, code, first + done, count - done, multiplier * values, BLOCK)


# Update rules. What changes with the group or the step is computed in float64 and rounded once.


@triton.jit
def _power(base, exponent):
    """base ** exponent by repeated squaring, in float64; exponent is a whole number >= 0."""
    result = tl.full((), 1.0, tl.float64)
    while exponent > 0:
        result = tl.where(exponent % 2 == 1, result * base, result)
        base = base * base
        exponent = exponent // 2
    return result


@triton.jit
def _adam_rule(g, p, m, v, v_max, row, step, HAS_MAX):
    """One update: `row` points at the group's hyper-parameters in the order of ops.ADAM_COLUMNS."""
    lr, beta1, beta2, eps = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    weight_decay, decoupled = tl.load(row + 4), tl.load(row + 5)
    # m / (sqrt(v) / root + eps) = root * m / (sqrt(v) + eps * root): one division and one rounding less per element.
    root = tl.sqrt(1.0 - _power(beta2, step))
    step_size = (lr / (1.0 - _power(beta1, step)) * root).to(tl.float32)
    # A weight decay of 0 is left out: 0 * p is not 0 where p is infinite.
    if weight_decay != 0:
        if decoupled != 0:
            p = tl.fma(-(lr * weight_decay).to(tl.float32), p, p)
        else:
            g = tl.fma(weight_decay.to(tl.float32), p, g)
    m = tl.fma((1.0 - beta1).to(tl.float32), g - m, m)
    v = tl.fma((1.0 - beta2).to(tl.float32) * g, g, beta2.to(tl.float32) * v)
    v_hat = v
    if HAS_MAX:
        v_max = tl.maximum(v_max, v, propagate_nan=tl.PropagateNan.ALL)
        v_hat = v_max
    p = tl.fma(-step_size, tl.div_rn(m, tl.sqrt_rn(v_hat) + (eps * root).to(tl.float32)), p)
    return p, m, v, v_max


@triton.jit
def _zero(flat, start, count, BLOCK: tl.constexpr):
    # The loads of the update above may have another layout: all of them must be over before the first zero is stored.
    tl.debug_barrier()
    for done in range(0, count, BLOCK):
        _store(flat.to(tl.int64), FLOAT32, start + done, count - done, tl.zeros((BLOCK,), tl.float32), BLOCK)


@triton.jit
def adam_tiles(flat, marks, tiles, scalars, steps, groups, hyper, table, ZERO: tl.constexpr, BLOCK: tl.constexpr):
    segment, first, start, count = _place(tiles, tl.program_id(0).to(tl.int64))
    if _is_touched(marks, segment):
        if tl.load(scalars + 1) == 0:
            _adam_tile(flat, scalars, steps, groups, hyper, table, segment, first, start, count, BLOCK)
        if ZERO:
            _zero(flat, start, count, BLOCK)


@triton.jit
def _adam_tile(flat, scalars, steps, groups, hyper, table, segment, first, start, count, BLOCK: tl.constexpr):
    row = hyper + 8 * tl.load(groups + segment)
    multiplier = tl.load(scalars)
    multiplier = tl.where(tl.load(row + 7) != 0, -multiplier, multiplier)
    step = tl.load(steps + segment).to(tl.int64)
    entry = table + 10 * segment
    param, param_code = tl.load(entry), tl.load(entry + 1)
    exp_avg, exp_avg_code = tl.load(entry + 2), tl.load(entry + 3)
    exp_avg_sq, exp_avg_sq_code = tl.load(entry + 4), tl.load(entry + 5)
    v_max_address, v_max_code = tl.load(entry + 6), tl.load(entry + 7)
    master, master_code = tl.load(entry + 8), tl.load(entry + 9)
    source = tl.where(master_code == ABSENT, param, master)
    source_code = tl.where(master_code == ABSENT, param_code, master_code)
    # Without amsgrad v_max is neither read nor written, though there may be one from before.
    v_max_code = tl.where(tl.load(row + 6) != 0, v_max_code, ABSENT)
    for done in range(0, count, BLOCK):
        left = count - done
        at = first + done
        p, m, v, v_max = _adam_rule(
            _load(flat.to(tl.int64), FLOAT32, start + done, left, BLOCK) * multiplier,
            _load(source, source_code, at, left, BLOCK),
            _load(exp_avg, exp_avg_code, at, left, BLOCK),
            _load(exp_avg_sq, exp_avg_sq_code, at, left, BLOCK),
            _load(v_max_address, v_max_code, at, left, BLOCK),
            row,
            step,
            v_max_code != ABSENT,
        )
        _store(param, param_code, at, left, p, BLOCK)
        _store(exp_avg, exp_avg_code, at, left, m, BLOCK)
        _store(exp_avg_sq, exp_avg_sq_code, at, left, v, BLOCK)
        _store(v_max_address, v_max_code, at, left, v_max, BLOCK)
        _store(master, master_code, at, left, p, BLOCK)


@triton.jit
def _sgd_rule(g, p, b, row, step, HAS_BUFFER):
    """One update: `row` points at the group's hyper-parameters in the order of ops.SGD_COLUMNS."""
    lr, momentum, dampening = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    weight_decay, nesterov = tl.load(row + 3), tl.load(row + 4)
    # A weight decay of 0 is left out: 0 * p is not 0 where p is infinite.
    if weight_decay != 0:
        g = tl.fma(weight_decay.to(tl.float32), p, g)
    if HAS_BUFFER:
        if step == 1:
            b = g
        else:
            b = tl.fma(momentum.to(tl.float32), b, (1.0 - dampening).to(tl.float32) * g)
        if nesterov != 0:
            g = tl.fma(momentum.to(tl.float32), b, g)
        else:
            g = b
    return tl.fma(-lr.to(tl.float32), g, p), b


@triton.jit
def sgd_tiles(flat, marks, tiles, scalars, steps, groups, hyper, table, ZERO: tl.constexpr, BLOCK: tl.constexpr):
    segment, first, start, count = _place(tiles, tl.program_id(0).to(tl.int64))
    if _is_touched(marks, segment):
        if tl.load(scalars + 1) == 0:
            _sgd_tile(flat, scalars, steps, groups, hyper, table, segment, first, start, count, BLOCK)
        if ZERO:
            _zero(flat, start, count, BLOCK)


@triton.jit
def _sgd_tile(flat, scalars, steps, groups, hyper, table, segment, first, start, count, BLOCK: tl.constexpr):
    row = hyper + 6 * tl.load(groups + segment)
    multiplier = tl.load(scalars)
    multiplier = tl.where(tl.load(row + 5) != 0, -multiplier, multiplier)
    step = tl.load(steps + segment)
    entry = table + 6 * segment
    param, param_code = tl.load(entry), tl.load(entry + 1)
    buffer, buffer_code = tl.load(entry + 2), tl.load(entry + 3)
    master, master_code = tl.load(entry + 4), tl.load(entry + 5)
    source = tl.where(master_code == ABSENT, param, master)
    source_code = tl.where(master_code == ABSENT, param_code, master_code)
    buffer_code = tl.where(tl.load(row + 1) != 0, buffer_code, ABSENT)
    for done in range(0, count, BLOCK):
        left = count - done
        at = first + done
        p, b = _sgd_rule(
            _load(flat.to(tl.int64), FLOAT32, start + done, left, BLOCK) * multiplier,
            _load(source, source_code, at, left, BLOCK),
            _load(buffer, buffer_code, at, left, BLOCK),
            row,
            step,
            buffer_code != ABSENT,
        )
        _store(param, param_code, at, left, p, BLOCK)
        _store(buffer, buffer_code, at, left, b, BLOCK)
        _store(master, master_code, at, left, p, BLOCK)
