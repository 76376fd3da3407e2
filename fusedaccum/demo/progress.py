"""A progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import TextIO

BAR = 30
PLAIN_LINES = 5


class Progress:
    """Shows how far one run is. `label` names it, `total` is its number of updates."""

    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self.label = label
        self.total = total
        self.stream = stream
        self.live = stream.isatty()
        self.began = time.perf_counter()

    def __call__(self, done: int, loss: float) -> None:
        spent = time.perf_counter() - self.began
        left = spent / done * (self.total - done)
        numbers = f"{done:>{len(str(self.total))}}/{self.total}  loss {loss:.3f}  {spent:3.0f} s, {left:.0f} s left"
        if self.live:
            full = BAR * done // self.total
            bar = "#" * full + "." * (BAR - full)
            self.stream.write(f"\r\x1b[K{self.label} [{bar}] {numbers}" + ("\n" if done == self.total else ""))
        elif done * PLAIN_LINES // self.total > (done - 1) * PLAIN_LINES // self.total:
            self.stream.write(f"{self.label} {numbers}\n")
        self.stream.flush()
