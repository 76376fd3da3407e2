"""In which order a tensor's elements lie in memory: that of its segment, and of its moments."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides in which a dense tensor made like `tensor` holds its elements: `tensor`'s own where it is dense.

    That is the memory order of a segment, and of the moments `torch.zeros_like` makes.
    """
    return torch.empty_like(tensor.detach(), device="meta").stride()


def in_memory_order(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """`tensor`'s elements as a 1-D float tensor in the order of `stride`: a view where it has that order, else a copy.

    Complex tensors are read as pairs of floats.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.stride() != stride:
        tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return torch.view_as_real(flat).view(-1) if tensor.is_complex() else flat


def densified(grad: Tensor) -> Tensor:
    """A sparse gradient as a dense one of float32 (complex64 as it is). Entries that stand there twice are added up."""
    grad = grad.detach()
    # Converted first: to_dense() would add entries of a 16-bit format up in 16 bits.
    values = grad._values() if grad.is_complex() else grad._values().float()
    return torch.sparse_coo_tensor(grad._indices(), values, grad.shape, check_invariants=False).to_dense()
