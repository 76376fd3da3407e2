"""The update rules as Triton kernels: see `_triton_kernels` for how a tile finds its tensors and moves them.

What changes with the group or the step is computed in float64 and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fusedaccum.backends._triton_kernels import (
    ABSENT,
    BFLOAT16,
    FLOAT32,
    TAIL,
    TAIL_BLOCK,
    TILE,
    WHOLE,
    counts,
    is_aligned,
    load_block,
    pointer,
    store_block,
    tile_row,
)


@triton.jit
def _power(base, exponent):
    """base ** exponent by repeated squaring, in float64; exponent is a whole number >= 0."""
    result = tl.full((), 1.0, tl.float64)
    while exponent > 0:
        result = tl.where(exponent & 1 == 1, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@triton.jit
def _decayed(g, p, lr, weight_decay, decoupled):
    """(g, p) after weight decay. A decay of 0 is left out: 0 * p is not 0 where p is infinite."""
    shrunk = tl.fma(-(lr * weight_decay).to(tl.float32), p, p)
    added = tl.fma(weight_decay.to(tl.float32), p, g)
    decays = weight_decay != 0
    return tl.where(decays & (decoupled == 0), added, g), tl.where(decays & (decoupled != 0), shrunk, p)


@triton.jit
def _code(KIND: tl.constexpr, LIST: tl.constexpr):
    """What `kind` says of a list: its tensor's dtype, or ABSENT."""
    CODE: tl.constexpr = (KIND >> (2 * LIST)) & 3
    return CODE


@triton.jit
def _are_aligned(lists, KIND: tl.constexpr):
    aligned = True
    for LIST in tl.static_range(len(lists)):
        if _code(KIND, LIST) != ABSENT:
            aligned &= is_aligned(lists[LIST], _code(KIND, LIST))
    return aligned


@triton.jit
def _read(lists, at, left, KIND: tl.constexpr, LIST: tl.constexpr, PATH: tl.constexpr, BLOCK: tl.constexpr):
    CODE: tl.constexpr = _code(KIND, LIST)
    return load_block(pointer(lists[LIST], at, CODE, PATH), left, CODE, PATH, BLOCK)


@triton.jit
def _write(lists, at, left, values, KIND: tl.constexpr, LIST: tl.constexpr, PATH: tl.constexpr, BLOCK: tl.constexpr):
    CODE: tl.constexpr = _code(KIND, LIST)
    store_block(pointer(lists[LIST], at, CODE, PATH), left, values, CODE, PATH, BLOCK)


@triton.jit
def _random_bits(noise, first, BLOCK: tl.constexpr):
    """16 random bits for each of BLOCK elements of a segment from `first` on, a multiple of 4.

    A lane makes those of 4 neighbours, which in full tiles are what its thread has of every stream, so that none are
    exchanged; it takes the half of a block of Philox that belongs to them. noise: pointers to (seed, stream, number of
    the update), which are read here: the keys of all rounds, kept from one call to the next, would take more registers
    than there are.
    """
    pack = first // 4 + tl.arange(0, BLOCK // 4)
    low, high = (pack >> 1).to(tl.uint32), (pack >> 33).to(tl.uint32)
    seed, stream, update = tl.load(noise[0]), tl.load(noise[1]), tl.load(noise[2])
    a, b, c, d = tl.philox(seed, low, high, stream.to(tl.uint32), update.to(tl.uint32))
    upper = pack % 2 == 1
    words = tl.join(tl.where(upper, c, a), tl.where(upper, d, b))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BLOCK,))


@triton.jit
def _write_param(
    lists,
    at,
    left,
    p,
    noise,
    KIND: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    RANDOM: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the parameter: rounded stochastically where RANDOM says so, it is bfloat16 and has no master."""
    if RANDOM and not HAS_MASTER and _code(KIND, 0) == BFLOAT16:
        bits = p.to(tl.uint32, bitcast=True)
        # Not from the largest finite bfloat16 on, which must not become infinite by chance: `store_block` rounds those.
        small = (bits & 0x7FFFFFFF) < 0x7F7F0000
        cut = (bits + _random_bits(noise, at, BLOCK)) & 0xFFFF0000
        p = tl.where(small, cut, bits).to(tl.float32, bitcast=True)
    _write(lists, at, left, p, KIND, 0, PATH, BLOCK)


@triton.jit
def _zero(place, left, PATH: tl.constexpr, BLOCK: tl.constexpr):
    store_block(place, left, tl.zeros((BLOCK,), tl.float32), FLOAT32, PATH, BLOCK)


@triton.jit
def _zero_tile(flat, start, count):
    """What is left of a step that is skipped: too rare for a path of its own."""
    for done in range(0, count, TAIL_BLOCK):
        _zero(flat + (start + done), count - done, TAIL, TAIL_BLOCK)


@triton.jit
def _by_kind(
    RULE: tl.constexpr,
    flat,
    scalars,
    row,
    step,
    lists,
    place,
    count,
    noise,
    kind,
    KINDS: tl.constexpr,
    RANDOM: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply a rule, `_adam_tile` or `_sgd_tile`, to a tile of one of KINDS: the kinds there is code for."""
    for k in tl.static_range(len(KINDS)):
        if kind == KINDS[k]:
            if (count == TILE) & _are_aligned(lists, KINDS[k]):
                RULE(flat, scalars, row, step, lists, place, TILE, noise, KINDS[k], RANDOM, ZERO, WHOLE, BLOCK)
            else:
                RULE(flat, scalars, row, step, lists, place, count, noise, KINDS[k], RANDOM, ZERO, TAIL, TAIL_BLOCK)


@triton.jit(do_not_specialize=["segment_count"])
def adam_tiles(
    flat,
    live,
    tiles,
    scalars,
    steps,
    groups,
    hyper,
    random,
    table,
    segment_count,
    KINDS: tl.constexpr,
    LIVE: tl.constexpr,
    RANDOM: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """KINDS: the kinds that may occur. For others there is no code."""
    segment, first, start, count = tile_row(tiles, tl.program_id(0).to(tl.int64))
    entry = table + segment
    word = tl.load(entry)
    if counts(word, live, segment, LIVE):
        if tl.load(scalars + 1) == 0:
            row = hyper + 8 * tl.load(groups + segment)
            step = tl.load(steps + segment).to(tl.int32)
            params, exp_avgs = tl.load(entry + segment_count), tl.load(entry + 2 * segment_count)
            exp_avg_sqs, v_maxes = tl.load(entry + 3 * segment_count), tl.load(entry + 4 * segment_count)
            lists = (params, exp_avgs, exp_avg_sqs, v_maxes, tl.load(entry + 5 * segment_count))
            place, noise = (first, start), (random, random + 2 + segment, random + 1)
            # Without amsgrad v_max is neither read nor written, though there may be one from before.
            kind = tl.where(tl.load(row + 6) != 0, word >> 1, (word >> 1) & ~(3 << 6))
            _by_kind(_adam_tile, flat, scalars, row, step, lists, place, count, noise, kind, KINDS, RANDOM, ZERO, BLOCK)
        elif ZERO:
            _zero_tile(flat, start, count)


@triton.jit
def _adam_tile(
    flat,
    scalars,
    row,
    step,
    lists,
    place,
    count,
    noise,
    KIND: tl.constexpr,
    RANDOM: tl.constexpr,
    ZERO: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`row` points at the group's hyper-parameters, in the order of ops.ADAM_COLUMNS."""
    first, start = place
    HAS_MAX: tl.constexpr = _code(KIND, 3) != ABSENT
    HAS_MASTER: tl.constexpr = _code(KIND, 4) != ABSENT
    lr, beta1, beta2, eps = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    weight_decay, decoupled = tl.load(row + 4), tl.load(row + 5)
    multiplier = tl.load(scalars)
    multiplier = tl.where(tl.load(row + 7) != 0, -multiplier, multiplier)
    # m / (sqrt(v) / root + eps) = root * m / (sqrt(v) + eps * root): one division and one rounding less per element.
    root = tl.sqrt(1.0 - _power(beta2, step))
    step_size = (lr / (1.0 - _power(beta1, step)) * root).to(tl.float32)
    rooted_eps = (eps * root).to(tl.float32)
    rise1, rise2, keep2 = (1.0 - beta1).to(tl.float32), (1.0 - beta2).to(tl.float32), beta2.to(tl.float32)

    for done in range(0, count, BLOCK):
        at, left = first + done, count - done
        g = load_block(flat + (start + done), left, FLOAT32, PATH, BLOCK)
        p = _read(lists, at, left, KIND, 4 if HAS_MASTER else 0, PATH, BLOCK)
        m = _read(lists, at, left, KIND, 1, PATH, BLOCK)
        v = _read(lists, at, left, KIND, 2, PATH, BLOCK)
        if HAS_MAX:
            v_max = _read(lists, at, left, KIND, 3, PATH, BLOCK)
        g, p = _decayed(g * multiplier, p, lr, weight_decay, decoupled)
        m = tl.fma(rise1, g - m, m)
        v = tl.fma(rise2 * g, g, keep2 * v)
        v_hat = v
        if HAS_MAX:
            v_hat = tl.maximum(v_max, v, propagate_nan=tl.PropagateNan.ALL)
            _write(lists, at, left, v_hat, KIND, 3, PATH, BLOCK)
        p = tl.fma(-step_size, tl.div_rn(m, tl.sqrt_rn(v_hat) + rooted_eps), p)
        _write_param(lists, at, left, p, noise, KIND, HAS_MASTER, RANDOM, PATH, BLOCK)
        _write(lists, at, left, m, KIND, 1, PATH, BLOCK)
        _write(lists, at, left, v, KIND, 2, PATH, BLOCK)
        if HAS_MASTER:
            _write(lists, at, left, p, KIND, 4, PATH, BLOCK)
        if ZERO:
            # The load above may have another layout: every thread must have its elements before one stores a zero.
            tl.debug_barrier()
            _zero(flat + (start + done), left, PATH, BLOCK)


@triton.jit(do_not_specialize=["segment_count"])
def sgd_tiles(
    flat,
    live,
    tiles,
    scalars,
    steps,
    groups,
    hyper,
    random,
    table,
    segment_count,
    KINDS: tl.constexpr,
    LIVE: tl.constexpr,
    RANDOM: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """KINDS: as in `adam_tiles`."""
    segment, first, start, count = tile_row(tiles, tl.program_id(0).to(tl.int64))
    entry = table + segment
    word = tl.load(entry)
    if counts(word, live, segment, LIVE):
        if tl.load(scalars + 1) == 0:
            row = hyper + 6 * tl.load(groups + segment)
            step = tl.load(steps + segment)
            params, buffers = tl.load(entry + segment_count), tl.load(entry + 2 * segment_count)
            lists = (params, buffers, tl.load(entry + 3 * segment_count))
            place, noise = (first, start), (random, random + 2 + segment, random + 1)
            # Without momentum its buffer is neither read nor written, though there may be one from before.
            kind = tl.where(tl.load(row + 1) != 0, word >> 1, (word >> 1) & ~(3 << 2))
            _by_kind(_sgd_tile, flat, scalars, row, step, lists, place, count, noise, kind, KINDS, RANDOM, ZERO, BLOCK)
        elif ZERO:
            _zero_tile(flat, start, count)


@triton.jit
def _sgd_tile(
    flat,
    scalars,
    row,
    step,
    lists,
    place,
    count,
    noise,
    KIND: tl.constexpr,
    RANDOM: tl.constexpr,
    ZERO: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`row` points at the group's hyper-parameters, in the order of ops.SGD_COLUMNS."""
    first, start = place
    HAS_BUFFER: tl.constexpr = _code(KIND, 1) != ABSENT
    HAS_MASTER: tl.constexpr = _code(KIND, 2) != ABSENT
    lr, momentum, dampening = tl.load(row), tl.load(row + 1).to(tl.float32), tl.load(row + 2)
    weight_decay, nesterov = tl.load(row + 3), tl.load(row + 4)
    multiplier = tl.load(scalars)
    multiplier = tl.where(tl.load(row + 5) != 0, -multiplier, multiplier)

    for done in range(0, count, BLOCK):
        at, left = first + done, count - done
        g = load_block(flat + (start + done), left, FLOAT32, PATH, BLOCK)
        p = _read(lists, at, left, KIND, 2 if HAS_MASTER else 0, PATH, BLOCK)
        if HAS_BUFFER:
            b = _read(lists, at, left, KIND, 1, PATH, BLOCK)
        g, p = _decayed(g * multiplier, p, lr, weight_decay, 0.0)
        if HAS_BUFFER:
            b = tl.where(step == 1, g, tl.fma(momentum, b, (1.0 - dampening).to(tl.float32) * g))
            g = tl.where(nesterov != 0, tl.fma(momentum, b, g), b)
            _write(lists, at, left, b, KIND, 1, PATH, BLOCK)
        p = tl.fma(-lr.to(tl.float32), g, p)
        _write_param(lists, at, left, p, noise, KIND, HAS_MASTER, RANDOM, PATH, BLOCK)
        if HAS_MASTER:
            _write(lists, at, left, p, KIND, 2, PATH, BLOCK)
        if ZERO:
            # The load above may have another layout: every thread must have its elements before one stores a zero.
            tl.debug_barrier()
            _zero(flat + (start + done), left, PATH, BLOCK)
