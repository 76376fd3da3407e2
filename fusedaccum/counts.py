"""Updates applied and left out: what the host knows, and what it learns from the device only when somebody asks."""

from __future__ import annotations

import torch
from torch import Tensor


class Counts:
    """Of one wrapper. Reading `updates`, `skipped_windows` or `updated` waits where the device had the last word."""

    def __init__(self) -> None:
        self._updates = 0
        self._skipped_windows = 0
        self.base = 0  # `updates` when they were last loaded
        self.loads = 0
        # Updates that the device may have skipped and whose outcome nobody has read, and how many of them it skipped.
        self._undecided = 0
        self._undecided_skips: Tensor | None = None
        self._undecided_windows: Tensor | None = None  # windows that the host closed, which may count as skipped
        self._last: bool | Tensor = False  # the last step() or flush(): whether it updated, or the device's skip flag

    @property
    def updates(self) -> int:
        self._read()
        return self._updates

    @property
    def skipped_windows(self) -> int:
        self._read()
        return self._skipped_windows

    @property
    def updated(self) -> bool:
        return not bool(self._last) if isinstance(self._last, Tensor) else self._last

    def nothing_updated(self) -> None:
        """The last call was one that updated nothing."""
        self._last = False

    def window_skipped(self) -> None:
        """The host has closed a window without an update."""
        self._skipped_windows += 1
        self._last = False

    def window_without_sums(self, items: float | Tensor, left_out: Tensor | None) -> None:
        """The host has closed a window that holds no sum: a skipped one where the device's count of items is 0 or where
        gradients were left out (bool[1]), else an empty one, which is not counted.
        """
        self._last = False
        reasons = [*([items == 0] if isinstance(items, Tensor) else []), *([] if left_out is None else [left_out])]
        if reasons:
            skipped = torch.stack([reason.reshape(()).to(reasons[0].device) for reason in reasons]).any().long()
            self._undecided_windows = skipped if self._undecided_windows is None else self._undecided_windows + skipped

    def window_closed(self, skip: Tensor | None, counted_elsewhere: bool = False) -> None:
        """An update was launched. skip: the device's flag, an integer tensor of one element; None where it decides
        nothing. counted_elsewhere: the device counts it itself, since it can be replayed.
        """
        if counted_elsewhere:
            self._last = False if skip is None else skip
        elif skip is None:
            self._updates += 1
            self._last = True
        else:
            self._undecided += 1
            self._undecided_skips = skip if self._undecided_skips is None else self._undecided_skips + skip
            self._last = skip

    def _read(self) -> None:
        if self._undecided_skips is not None:
            skipped = int(self._undecided_skips)
            self._skipped_windows += skipped
            self._updates += self._undecided - skipped
            self._undecided, self._undecided_skips = 0, None
        if self._undecided_windows is not None:
            self._skipped_windows += int(self._undecided_windows)
            self._undecided_windows = None

    def set(self, updates: int, skipped_windows: int, updated: bool = False) -> None:
        """What was counted elsewhere, when a state is loaded."""
        self._undecided, self._undecided_skips, self._undecided_windows = 0, None, None
        self._updates, self._skipped_windows, self._last = updates, skipped_windows, updated
        self.base = updates
        self.loads += 1
