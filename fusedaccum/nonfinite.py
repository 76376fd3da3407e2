"""What is done about gradients that are not finite: nothing, leave out the window or the micro-batch, or raise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedaccum.folding import describe, times
from fusedaccum.local import local
from fusedaccum.options import NAME
from fusedaccum.spread import agree

if TYPE_CHECKING:
    from fusedaccum.flat_buffer import FlatBuffer
    from fusedaccum.window import Window


class NonFinite:
    """A policy, one of `options.NONFINITE`.

    Under "skip_micro", and where a GradScaler leaves micro-batches out (amp_scaling), also the device's count of those
    that were folded and left out.

    alone: whether no other rank has to raise too; else the reduction looks at the sums of all.
    kept: float64[1], those folded in the open window. Nothing here waits for the device but "raise" and `read_skipped`.
    """

    def __init__(self, policy: str, amp_scaling: bool = False, alone: bool = True) -> None:
        self.policy = policy
        self.amp_scaling = amp_scaling
        self.looks = alone and policy in ("skip_micro", "raise")  # at the gradients, before they are folded
        self.skips_windows = policy in ("skip_window", "skip_micro")
        self.kept: Tensor | None = None
        self._skipped: Tensor | None = None

    @property
    def counts(self) -> bool:
        """Whether only the device knows how many micro-batches a window holds."""
        return self.policy == "skip_micro" or self.amp_scaling

    def look(
        self,
        window: Window,
        grads: list[list[Tensor | None]],
        found_inf: Tensor | None,
        items: float | Tensor | None,
    ) -> Tensor | None:
        """Look at a micro-batch's gradients, by buffer. Returns 1 or 0, float32[1]: whether it is folded.

        None where it is without looking further. found_inf: where it is not 0, somebody has looked. items: where they
        are 0, gradients may hold anything. Raises FloatingPointError under "raise".
        """
        kept = self._look_here(window, grads, items) if self.looks and window.buffers else None
        if found_inf is not None:
            found_inf = found_inf.detach().clone()
            agree("the exchange of a GradScaler's overflows", window.buffers, found_inf)
            unharmed = (found_inf == 0).to(torch.float32)
            kept = unharmed if kept is None else times(kept, unharmed)
        if kept is not None and isinstance(items, Tensor):
            kept = (kept + times(torch.ones_like(kept), items == 0)).clamp_(max=1)
        return kept

    def _look_here(
        self, window: Window, grads: list[list[Tensor | None]], items: float | Tensor | None
    ) -> Tensor | None:
        device = window.buffers[0].device
        found = [b.found_inf(g).to(device) for b, g in zip(window.buffers, grads, strict=True)]
        total = found[0] if len(found) == 1 else torch.stack(found).sum(0)
        agree("the exchange of what is not finite", window.buffers, total)
        if self.policy == "raise":
            if bool(total) and not (isinstance(items, Tensor) and bool(items == 0)):
                raise FloatingPointError(self._names(window))
            return None
        return (total == 0).to(torch.float32)

    @staticmethod
    def _names(window: Window) -> str:
        grads = [(p, local(p.grad)) for p in window.params if p.grad is not None]
        bad = [p for p, grad in grads if not bool(grad.to_dense().isfinite().all())]
        shown = ", ".join(describe(window, p) for p in bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        shown = shown or "what other ranks hold of the parameters"
        return (
            f"{NAME}: gradients must be finite with nonfinite='raise', got infinities or NaNs in {shown}; the window "
            "is as it was: zero_grad() drops this micro-batch, nonfinite='skip_micro' would have left it out"
        )

    def count(self, kept: float | Tensor) -> None:
        """Count a micro-batch that was folded (1), or left out (0)."""
        if isinstance(kept, Tensor):
            kept = kept.to(torch.float64)
            self._skipped = 1 - kept if self._skipped is None else self._skipped + (1 - kept)
        elif self.kept is None:
            kept = torch.tensor(kept, dtype=torch.float64, device="cpu")
        self.kept = kept if self.kept is None else self.kept + kept

    def left_any_out(self, pending: int) -> Tensor | None:
        """Whether one of the window's `pending` micro-batches was left out: bool[1], None where none can have been."""
        return None if self.kept is None else self.kept < pending

    def zero_where_nothing_is_live(self, divisor: float | Tensor, buffers: list[FlatBuffer]) -> float | Tensor:
        """`divisor`, or 0, which skips the update, where nothing is left of the gradients that the window was given.

        The divisor alone does not say so: it counts micro-batches without any gradient too.
        """
        if any(buffer.live is None for buffer in buffers):
            return divisor
        live = [buffer.live.any().to(buffers[0].device) for buffer in buffers]
        return times(torch.stack(live).any().double(), divisor)

    def resume(self, kept: float | None, pending: int) -> None:
        """Take up a saved window: what it has folded, of `pending` micro-batches. None: all, nobody left any out."""
        if pending and (self.counts or kept is not None):
            self.kept = torch.tensor(pending if kept is None else kept, dtype=torch.float64, device="cpu")

    def read_skipped(self) -> int:
        """Micro-batches left out since the last call. Waits for the device."""
        skipped, self._skipped = self._skipped, None
        return 0 if skipped is None else int(skipped)

    def begin_window(self) -> None:
        self.kept = None
