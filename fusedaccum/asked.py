"""What can be asked of a wrapper: counts, the norm, sums."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from fusedaccum import modes
from fusedaccum.length import Length, Steps, check_change
from fusedaccum.window import Window


class Asked:
    """The part of `FusedAccumOptimizer` that changes nothing, but for setting `steps`."""

    _window: Window

    @property
    def optimizer(self) -> Optimizer:
        """The wrapped optimizer."""
        return self._window.optimizer

    @property
    def steps(self) -> Steps:
        """Micro-batches per window, or the function that says how many. Set inside a window, it holds from the next.

        Setting raises TypeError or ValueError for anything but an int of at least 1 or a callable.
        """
        return self._window.coming.value

    @steps.setter
    def steps(self, value: Steps) -> None:
        self._window.coming = Length(check_change(self._window.coming.value, value))

    @property
    def pending(self) -> int:
        """Micro-batches in the open window."""
        return self._window.micro_batches

    @property
    def updates(self) -> int:
        """Updates applied so far."""
        return self._window.updates

    @property
    def updated(self) -> bool:
        """Whether the last `step()` or `flush()` changed the parameters; False after `reset()` and loading."""
        return self._window.counts.updated

    @property
    def will_update(self) -> bool:
        """Whether the next `step()` closes the window."""
        return self._window.will_update

    @property
    def skipped_windows(self) -> int:
        """Windows without an update: not finite under a policy that skips, with item counts that were all zero, or with
        gradients of which nothing was left.
        """
        return self._window.counts.skipped_windows

    @property
    def skipped_micro_batches(self) -> int:
        """Micro-batches left out of their window by nonfinite="skip_micro"."""
        return self._window.skipped_micro_batches

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm of what the last window updated with (its mean, or its sum), before clipping; None before the
        first. Of one that was skipped: infinity or NaN; 0 where it had nothing to update with: no gradient, item counts
        that were all zero, every micro-batch left out. Reading it waits for the device.
        """
        return self._window.grad_norm

    def master_grad(self, param: Tensor) -> Tensor:
        """What the open window holds for `param`: float32 (complex64 for complex64), in the parameter's shape.

        The sum so far times 1/steps (with reduction="sum", the sum itself); with item counts, the sum of count *
        gradient, not yet divided. In a step pre-hook: the window's mean before clipping, which the hook may write to.
        Zeros where nothing was folded, and after a boundary. A live view of the flat buffer where there is something:
        `clone()` it to keep it past the boundary.

        Raises ValueError for a tensor that is not one of the optimizer's parameters, RuntimeError while sums are on
        their way to other ranks.
        """
        self._window.check_shown()
        with modes.no_grad():
            return self._window.master_grad(param)
