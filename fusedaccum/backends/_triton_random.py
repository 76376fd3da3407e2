"""Random bits for the Triton kernels of the update rules."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def random_bits(noise, first, BLOCK: tl.constexpr):
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
