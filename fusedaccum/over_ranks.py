"""What a wrapper has to offer where a model is trained by several processes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from fusedaccum import ddp, modes, reduction
from fusedaccum.options import NAME
from fusedaccum.window import Window


class OverRanks:
    """The part of `FusedAccumOptimizer` that speaks to other ranks."""

    _window: Window

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """Keep a DistributedDataParallel `model` from reducing gradients, which `process_group` has the wrapper do.

            with opt.no_sync(model):
                for batch in loader:
                    model(batch).loss.backward()
                    opt.step()

        DDP's own no_sync(): the model has to be called inside of it. Raises TypeError for what is no such model,
        RuntimeError without process_group and after `close()`, ValueError for a model of other parameters.
        """
        return ddp.no_sync(self._window, model)

    def consolidate(self, to: int | None = None) -> None:
        """Make each rank's open window the mean of all ranks', so that any rank's `state_dict()` is whole.

        A collective over `process_group`; without one, any rank's dict is whole anyway and nothing is done. The window
        goes on afterwards, here and where it is loaded: on any number of ranks that load the same dict.

        With shard="zero1" it gathers the optimizer state too, and holds it on the CPU until the next micro-batch:
        `state_dict()` is then that of an unsharded wrapper, and `close()` leaves a whole state behind.

        to: the rank (in `process_group`) that is to hold the state, which every rank says; None: all of them.

        Raises RuntimeError, with the window as it was, where ranks hold different numbers of micro-batches, or one has
        not ended by `step()`; and after `close()`.
        """
        window = self._window
        window.check_usable()
        size = 1 if window.ranks is None else window.ranks.size
        if to is not None and (isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < size):
            raise ValueError(f"{NAME}: consolidate(to={to!r}) must be None or a rank of the group, 0 to {size - 1}")
        if window.ranks is None:
            return
        if window.reduced is not None or window.overlap is not None:
            raise RuntimeError(
                f"{NAME}: consolidate() was called while the window was being reduced; call it after step()"
            )
        with modes.no_grad():
            reduction.consolidate(window, to)
            if window.zero1 is not None:
                window.zero1.consolidate(window, to)
