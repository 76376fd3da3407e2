"""What the host knows, as the Triton kernels read it: words and addresses, see `_triton_kernels`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedaccum.backends import _triton_kernels as kernels
from fusedaccum.backends import _triton_sums as sums
from fusedaccum.ops import FRESH, TOUCHED, VOID

CODES = {
    torch.float32: kernels.FLOAT32.value,
    torch.bfloat16: kernels.BFLOAT16.value,
    torch.float16: kernels.FLOAT16.value,
}


def resolved(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """A kernel reads memory, not the mark of a lazily negated tensor."""
    return [grad.resolve_neg() if grad is not None and grad.is_neg() else grad for grad in grads]


def present(grads: Sequence[Tensor | None], n: int) -> Tensor:
    """Of which of the n segments there is a gradient."""
    there = torch.tensor([grad is not None for grad in grads], dtype=torch.bool, device="cpu")
    return there.view(-1, n).any(dim=0) if n else there


def batches(grads: Sequence[Tensor | None], n: int) -> tuple[list[int], list[int]]:
    """A kind of each segment, with a digit for each micro-batch, and the addresses micro-batch by micro-batch."""
    kinds = [0] * n
    for i, grad in enumerate(grads):
        if grad is not None and grad.numel() > 0:
            kinds[i % n] |= CODES[grad.dtype] << 2 * (i // n)
    return kinds, [0 if grad is None else grad.data_ptr() for grad in grads]


def late(late: list[Tensor | None], marks: Tensor) -> tuple[list[int], list[int]]:
    """The digits and addresses of late gradients, after those of what each sum starts from: see `_triton_sums`."""
    n = marks.numel()
    kinds, addresses = batches(late, n)
    kinds = [
        kind << 2 | sums.STORED * (mark & (TOUCHED | VOID) == TOUCHED) | sums.KNOWN * (mark & FRESH != 0 and kind == 0)
        for kind, mark in zip(kinds, marks.tolist(), strict=True)
    ]
    return kinds, [0] * n + addresses


def listed(lists: list[Sequence[Tensor]], marks: Tensor) -> tuple[list[int], list[int]]:
    """The words of all segments, and their tensors' addresses list by list: see `_triton_kernels`."""
    n = marks.numel()
    kinds, addresses = [0] * n, []
    for k, tensors in enumerate(lists):
        if not tensors:
            addresses += [0] * n
            continue
        places = [tensor.data_ptr() for tensor in tensors]  # 0 where there are no elements
        codes = [CODES[tensor.dtype] << 2 * k for tensor in tensors]
        kinds = [kind + code if place else kind for kind, code, place in zip(kinds, codes, places, strict=True)]
        addresses += places
    return words(kinds, marks), addresses


def words(kinds: list[int], marks: Tensor) -> list[int]:
    return [2 * kind + (mark & TOUCHED) for kind, mark in zip(kinds, marks.tolist(), strict=True)]
