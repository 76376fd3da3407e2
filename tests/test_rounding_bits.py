"""Stochastic rounding in the operators: every backend draws the specified bits, and rounds with them as it must."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from op_cases import SIZES, bits, same_bits, same_values
from step_cases import GROUPS, PLAIN, Update

from fusedaccum.backends import _reference_random, _triton_rules

WORD = 2**32 - 1
LARGEST = 0x7F7F0000  # the largest finite bfloat16, as a float32's bits
RULES = ("adam", "sgd")


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python's integers, round by round as Salmon et al. 2011 write it."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


# The known answers that its authors publish with Random123.
PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
KNOWN = {
    "zeros": ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    "ones": ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    "pi": (PI, [0xA4093822, 0x299F31D0], [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
}


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN.values(), ids=KNOWN)
def test_known_answers(counter, key, answer):
    assert philox(counter, key) == answer
    words = _reference_random.philox([torch.tensor([word, word]) for word in counter], tuple(key))
    assert [word.tolist() for word in words] == [[word] * 2 for word in answer]


def random_bits(numel: int, seed: int, update: int, stream: int) -> torch.Tensor:
    """What `fusedaccum.ops` says of the bits of each element."""
    halves = []
    for block in range(-(-numel // 8)):
        counter = [block & WORD, block >> 32, stream & WORD, update & WORD]
        for word in philox(counter, [seed & WORD, seed >> 32]):
            halves += [word & 0xFFFF, word >> 16]
    return torch.tensor(halves[:numel], dtype=torch.int64)


def rounded(values: torch.Tensor, seed: int, update: int, stream: int) -> torch.Tensor:
    """float32 to bfloat16, element by element."""
    pattern = bits(values).long()
    draws = random_bits(values.numel(), seed, update, stream).to(values.device)
    upper = (pattern & WORD) + draws >> 16
    up = upper.to(torch.int32).to(torch.int16).view(torch.bfloat16)
    return torch.where((pattern & 0x7FFFFFFF) < LARGEST, up, values.bfloat16())


@triton.jit
def draw(out, random, first, BLOCK: tl.constexpr):
    noise = (random, random + 2, random + 1)
    tl.store(out + tl.arange(0, BLOCK), _triton_rules._random_bits(noise, first.to(tl.int64), BLOCK).to(tl.int64))


def test_triton_counts_elements_in_64_bits():
    """Blocks beyond 2^32, which no test has the memory for."""
    first = 2**36 + 3 * 256
    out = torch.zeros(256, dtype=torch.int64)
    draw[(1,)](out, torch.tensor([2**40 + 9, 5, 6]), first, BLOCK=256)
    want = []
    for block in range(first // 8, first // 8 + 32):
        for word in philox([block & WORD, block >> 32, 6, 5], [9, 2**8]):
            want += [word & 0xFFFF, word >> 16]
    assert out.tolist() == want


SEEDS = [(0, 0), (5, 3), (2**63 - 1, 2**31 + 7), (2**40 + 1, 2**32 + 5)]


def noise(seed: int, update: int, streams: list[int]) -> torch.Tensor:
    return torch.tensor([seed, update, *streams], dtype=torch.int64)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", range(len(SEEDS)))
def test_the_bits_are_those_of_the_specification(backend, rule, case):
    """All sizes at all offsets: the float32 result is that of a float32 parameter which starts from the same value."""
    sizes = [SIZES[(k + case) % len(SIZES)] for k in range(len(GROUPS[rule]))]
    steps = [(2, 1, 7)[k % 3] for k in range(len(sizes))]
    state = (torch.float32, torch.bfloat16, torch.float16, torch.bfloat16)[case]
    streams = [7, 2**32 - 1, 0, 2**31, 5, 6, 8, 9, 10][: len(sizes)]
    single, low = (Update(rule, sizes, steps, dtype, state) for dtype in (torch.float32, torch.bfloat16))
    low.random = noise(*SEEDS[case], streams)
    grads = [torch.randn(n) for n in sizes]
    for k in range(len(sizes)):
        low.params[k].copy_(torch.randn(sizes[k]))
        single.params[k].copy_(low.params[k])
        for name, values in single.state_of(k).items():
            low.state[name][k].copy_(values)
    for update in (single, low):
        update.scalars[0] = 0.3
        update.buffer.fill(grads)
        update.run(backend, zero=case % 2 == 0)
        update.check_surroundings()
    for k, stream in enumerate(streams):
        assert same_values(low.params[k], rounded(single.params[k], *SEEDS[case], stream)), k
        for name, values in single.state_of(k).items():
            assert same_values(low.state_of(k)[name], values)
    moved = [not same_bits(p, q.bfloat16()) for p, q in zip(low.params, single.params, strict=True) if len(p) > 9]
    assert any(moved), "nothing was rounded other than to nearest"


def stored(backend, values: torch.Tensor, random: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """What a bfloat16 parameter holds whose update came out as `values`: 0 - 1 * -value."""
    update = Update("sgd", [values.numel()], [2], torch.bfloat16, torch.bfloat16, groups=[PLAIN["sgd"]])
    update.hyper[0, 0] = 1.0
    whole = torch.full((values.numel() + offset,), -0.0, dtype=torch.bfloat16)
    update.params = [whole[offset:]]
    update.random = random
    update.buffer.fill([-values])
    update.run(backend)
    assert (bits(whole[:offset]) == bits(torch.tensor(-0.0, dtype=torch.bfloat16))).all()
    return update.params[0]


def test_what_bfloat16_holds_is_stored_as_it_is(backend):
    every = torch.arange(-(2**15), 2**15, 5, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    for update in (0, 1):
        assert same_bits(stored(backend, every.float(), noise(1, update, [0])), every)


def test_each_value_becomes_one_of_its_neighbours(backend):
    values = torch.randint(-(2**31), 2**31, (5000,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    values = values[values.abs() < 3.38e38]
    got = stored(backend, values, noise(4, 9, [2]))
    toward_zero = (bits(values) & ~0xFFFF).view(torch.float32)
    away = (bits(toward_zero) + 0x10000).view(torch.float32)
    assert ((got.float() == toward_zero) | (got.float() == away)).all()
    for side in (toward_zero, away):
        assert 0.4 < (got.float() == side).float().mean() < 0.6


def test_beyond_the_largest_number_rounding_is_to_nearest(backend):
    """A finite value becomes infinite where rounding to nearest makes it so, and never by chance."""
    edges = [LARGEST + low for low in (-0x8000, 0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000)]
    values = torch.tensor(edges * 40, dtype=torch.int32).view(torch.float32)
    values = torch.cat([values, -values, torch.tensor([torch.nan, torch.inf, -torch.inf])])
    got = stored(backend, values, noise(3, 0, [0]))
    nearest = values.bfloat16()
    beyond = (values.abs() >= 3.3895313892515355e38) | values.isnan()
    assert beyond.sum() == 7 * 40 * 2 + 3
    assert same_values(got[beyond], nearest[beyond])
    below = got[~beyond].float().abs()
    assert below.isfinite().all()
    assert len(below.unique()) == 2


def test_just_above_the_largest_number_no_draw_makes_it_infinite(backend):
    """Of so many draws some are the largest there is, which alone would."""
    numel, random = 3 * 2**16, noise(2, 0, [0])
    assert (_reference_random.random_bits(random.cpu(), 0, numel) == 0xFFFF).any()
    values = torch.tensor([LARGEST + 1], dtype=torch.int32).view(torch.float32).repeat(numel)
    assert stored(backend, values, random).isfinite().all()


def test_the_mean_is_right(backend):
    """Of n elements a q-th moves up: the count is binomial, and 5 of its standard deviations are never seen."""
    numel, ulp = 3 * 4096 + 5, 2.0**-8
    for sign, q in ((1, 1 / 64), (-1, 1 / 4), (1, 1 - 1 / 1024), (-1, 2.0**-16)):
        values = torch.full((numel,), sign * (0.5 + q * ulp))
        got = stored(backend, values, noise(11, 0, [1])).float() * sign
        assert set(got.tolist()) <= {0.5, 0.5 + ulp}
        moved = int((got > 0.5).sum())
        assert abs(moved - numel * q) <= 5 * math.sqrt(numel * q * (1 - q)) + 1


def test_alignment_makes_no_difference(backend):
    values = torch.rand(4096 + 21) + 0.5
    right = rounded(values, 8, 1, 3)
    for offset in range(9):
        assert same_bits(stored(backend, values, noise(8, 1, [3]), offset), right), offset


def test_seeds_updates_and_streams_draw_numbers_of_their_own(backend):
    values = torch.full((600,), 0.5 + 2.0**-9)
    drawn = [stored(backend, values, noise(*which)) for which in ((1, 1, [1]), (2, 1, [1]), (1, 2, [1]), (1, 1, [2]))]
    for k, one in enumerate(drawn):
        for other in drawn[k + 1 :]:
            # Coins of which half agree: 300 of 600, with a standard deviation of 12.
            assert 235 < (one == other).sum() < 365
    assert same_bits(drawn[0], stored(backend, values, noise(1, 1, [1])))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("param", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes_and_masters_are_rounded_to_nearest(backend, rule, param):
    sizes, kept = [17, 4097, 5], []
    for random in (None, noise(1, 2, [0, 1, 2])):
        torch.manual_seed(3)
        update = Update(rule, sizes, [2] * 3, param, torch.float32, master=param == torch.bfloat16)
        update.random = random
        update.buffer.fill([torch.randn(n) for n in sizes])
        update.run(backend)
        update.check_surroundings()
        kept.append(update.params)
    assert all(map(same_bits, *kept))


def test_masters_of_some_parameters(backend):
    """The one without a master is rounded stochastically, whatever its neighbour has."""
    update = Update("sgd", [600, 600], [2, 2], torch.bfloat16, torch.float32, master=True, groups=[PLAIN["sgd"]] * 2)
    update.masters[1] = torch.zeros(0)
    for tensor in (*update.params, update.masters[0]):
        tensor.fill_(0.5)
    update.hyper[:, 0] = 2.0**-9
    update.random = noise(1, 1, [0, 1])
    update.buffer.fill([torch.full((600,), -1.0)] * 2)
    update.run(backend)
    assert (update.params[0] == (0.5 + 2.0**-9)).all() or (update.params[0] == 0.5).all()
    assert same_bits(update.params[1], rounded(torch.full((600,), 0.5 + 2.0**-9), 1, 1, 1))


@pytest.mark.parametrize("rule", RULES)
def test_a_skipped_window_writes_nothing(backend, rule):
    update = Update(rule, [17, 4097], [2, 2], torch.bfloat16, torch.float32)
    update.random = noise(1, 1, [0, 1])
    update.buffer.fill([torch.ones(17), torch.ones(4097)])
    update.scalars[1] = 1.0
    before = [tensor.clone() for tensor in update.tensors()]
    update.run(backend)
    assert all(map(same_bits, update.tensors(), before))
