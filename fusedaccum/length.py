"""How many micro-batches a window has: a number, or a function of the index of the update that is to come."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

from fusedaccum.options import NAME

RULE = (
    "steps must be an int of at least 1, the number of micro-batches per update, a function that returns one for the "
    "0-based index of the coming update, or None, where every step() is to update"
)

Steps = int | Callable[[int], int] | None


def check_steps(steps: Any) -> Steps:
    """What `steps` may be set to. Raises TypeError or ValueError that says what is allowed."""
    return steps if steps is None or callable(steps) else _check_number(steps, f"steps={steps!r}")


def check_change(was: Steps, steps: Any) -> Steps:
    """What `steps` may be set to where it `was` something else. Raises as `check_steps` does."""
    if (was is None) != (steps is None):
        raise ValueError(
            f"{NAME}: steps={steps!r} cannot follow steps={was!r}: who owns the boundary is settled when the optimizer "
            "is wrapped; close() this wrapper and wrap the optimizer again"
        )
    return check_steps(steps)


def _check_number(value: Any, said: str) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{NAME}: {said}, a {type(value).__name__}; {RULE}")
    if value < 1:
        raise ValueError(f"{NAME}: {said}; {RULE}")
    return int(value)


class Length:
    """The length of the window that is to come. value: what `steps` was set to, checked."""

    def __init__(self, value: Steps) -> None:
        self.value = value
        self._asked: tuple[int, int] | None = None  # (index of the update, what the function said)

    @property
    def is_fixed(self) -> bool:
        return not callable(self.value)

    def of_update(self, index: Callable[[], int]) -> int:
        """Micro-batches before update number `index()`, which is asked for only where it matters: it may wait.

        The function is called once for a window. What it raises is raised; TypeError or ValueError for what it may not
        return.
        """
        if not callable(self.value):
            return 1 if self.value is None else self.value
        update = index()
        if self._asked is None or self._asked[0] != update:
            answer = self.value(update)
            self._asked = update, _check_number(answer, f"steps({update}) returned {answer!r}")
        return self._asked[1]

    def ask_again(self) -> None:
        """The window is over: the function is asked anew, with the same index where there was no update."""
        self._asked = None
