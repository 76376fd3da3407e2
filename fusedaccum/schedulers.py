"""A learning-rate scheduler that counts updates where others count calls."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from fusedaccum.optimizer import FusedAccumOptimizer


class GatedScheduler(LRScheduler):
    """Advances `scheduler` where `optimizer` has updated since the last call, however often `step()` is called.

    scheduler: any scheduler of torch.optim.lr_scheduler, ReduceLROnPlateau included, built on the wrapper or on the
        wrapped optimizer. optimizer: the FusedAccumOptimizer whose `updates` are counted.

    Call `step()` after every micro-batch, or once a window: both are right. Whatever `step` is given (a metric, for
    ReduceLROnPlateau) goes to `scheduler.step`. A call advances it once or not at all, so that a schedule over epochs,
    stepped once an epoch, stays one. Everything else (`get_last_lr`, `last_epoch`, ...) is the scheduler's own.

    Raises TypeError for anything that is not a FusedAccumOptimizer or has no `step`.
    """

    def __init__(self, scheduler: Any, optimizer: FusedAccumOptimizer) -> None:
        if not isinstance(optimizer, FusedAccumOptimizer):
            raise TypeError(
                f"GatedScheduler: optimizer is a {type(optimizer).__name__} and must be the FusedAccumOptimizer "
                "whose updates are counted; a bare optimizer needs no gate"
            )
        if not callable(getattr(scheduler, "step", None)) or isinstance(scheduler, GatedScheduler):
            raise TypeError(
                f"GatedScheduler: scheduler is a {type(scheduler).__name__} and must be a torch.optim.lr_scheduler "
                "scheduler"
            )
        self.scheduler = scheduler
        self.gate = optimizer
        self.seen_updates = optimizer.updates
        self._loads = optimizer._window.counts.loads

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the scheduler if the parameters were updated since the last call; otherwise do nothing."""
        updates, seen, counts = self.gate.updates, self.seen_updates, self.gate._window.counts
        if updates < seen or counts.loads != self._loads:  # loaded since, with or without its count: it begins anew
            seen = min(seen, counts.base)
        self.seen_updates, self._loads = updates, counts.loads
        if updates > seen:
            self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and the number of updates it has followed."""
        return {"scheduler": self.scheduler.state_dict(), "seen_updates": self.seen_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, into a gate over a scheduler of the same kind."""
        if "scheduler" not in state_dict or "seen_updates" not in state_dict:
            raise ValueError(
                f"GatedScheduler: the state dict has the keys {sorted(state_dict)} and needs 'scheduler' and "
                "'seen_updates'; load a bare scheduler's state into `gate.scheduler`"
            )
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self.seen_updates = state_dict["seen_updates"]

    def get_last_lr(self) -> list[Any]:
        """The scheduler's last learning rates, one a parameter group."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[Any]:
        """What the scheduler computes inside its own step."""
        return self.scheduler.get_lr()

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet: unpickling
            raise AttributeError(name)
        return getattr(self.scheduler, name)
