"""The random numbers of the `reference` backend, and rounding with them: plain torch, on words of 32 bits in int64."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
LARGEST_BFLOAT16 = 0x7F7F0000  # as a float32's bits


def philox(counter: list[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Philox4x32-10 (Salmon et al. 2011). counter: four words, int64 tensors of one shape; key: two words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product takes 64 bits: it may turn negative in int64, and its words are those of the unsigned one.
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32 & WORD) ^ c1 ^ k0, b & WORD, (a >> 32 & WORD) ^ c3 ^ k1, a & WORD
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return [c0, c1, c2, c3]


def random_bits(random: Tensor, k: int, numel: int) -> Tensor:
    """16 random bits for each element of segment k, int64. random: see `fusedaccum.ops`."""
    seed, update, stream = (int(random[at]) for at in (0, 1, 2 + k))
    block = torch.arange(-(-numel // 8), device=random.device)
    same = torch.ones_like(block)
    counter = [block & WORD, block >> 32, same * (stream & WORD), same * (update & WORD)]
    words = torch.stack(philox(counter, (seed & WORD, seed >> 32)), 1)
    return torch.stack((words & 0xFFFF, words >> 16), 2).view(-1)[:numel]


def stochastic(values: Tensor, random: Tensor, k: int) -> Tensor:
    """`values`, float32, rounded stochastically to bfloat16, but where only rounding to nearest can be right."""
    bits = values.view(torch.int32).long()
    rounded = (bits + random_bits(random, k, values.numel()) & ~0xFFFF).int().view(torch.float32)
    return torch.where((bits & 0x7FFFFFFF) < LARGEST_BFLOAT16, rounded, values)
