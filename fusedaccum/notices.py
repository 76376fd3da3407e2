"""Warnings about what would otherwise be lost in silence."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

from torch import Tensor

from fusedaccum.options import NAME

if TYPE_CHECKING:
    from fusedaccum.window import Window


def warn(text: str) -> None:
    """A UserWarning that points at the user's line: the first one that is neither here nor in torch.

    How many frames lie between depends on what led here, and on what torch.compile puts around every call.
    """
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("fusedaccum", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


def warn_low_precision(low: list[Tensor], fused: bool) -> None:
    """Say that `low`, parameters of low precision, lose small updates, and what helps."""
    needs = "" if fused else " (which need the fused update: AdamW, Adam or SGD)"
    warn(
        f"{NAME}: {len(low)} parameters are {low[0].dtype} and are updated without FP32 masters, which loses "
        "most small updates (0.5 - 3e-4 is 0.5 in bfloat16); pass master_weights=True, or for bfloat16 "
        f"rounding='stochastic'{needs}, or keep the parameters in float32"
    )


def warn_low_moments(count: int) -> None:
    """Say that second moments of so many parameters are kept in a dtype in which they cannot decay, and what helps."""
    warn(
        f"{NAME}: the second moments of {count} parameters are kept in bfloat16, as the optimizer has them, where "
        "0.999 * v rounds back to v, so that they never decay; pass state_dtype=torch.float32 (which needs the fused "
        "update)"
    )


def warn_open_window(window: Window, what: str) -> None:
    """Say that an open window goes away, with what would have kept it."""
    warn(
        f"{NAME} {what} with an open window: {window.micro_batches} of {window.length} micro-batches were summed and "
        "never reached the parameters; flush() applies them, reset() drops them, state_dict() keeps them"
    )


def warn_of_folded() -> None:
    """Say that `zero_grad()` drops nothing of a backward that has been folded, and what does."""
    warn(
        f"{NAME}: zero_grad() came after a backward whose gradients fold='backward' has folded already, and before the "
        "step() that counts it; they stay in the window: call step() first, reset() drops the window, and fold='step' "
        "lets zero_grad() drop a backward"
    )


def warn_local_window(window: Window) -> None:
    """Say that a state dict holds the window of one rank alone."""
    warn(
        f"{NAME}: state_dict() holds the open window of rank {window.ranks.rank} alone, of {window.ranks.size}; save "
        "every rank's in a file of its own (torch.distributed.checkpoint writes one for all) and load each into the "
        "same rank, or call consolidate() on all ranks first, after which any rank's is whole"
    )
