"""How far the benchmark is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

BAR = 24
NAME = 34


class Progress:
    """Shows which of `total` tasks runs, and how many of its runs are done."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self.total = total
        self.stream = stream
        self.live = stream.isatty()
        self.title = ""
        self.number = 0
        self.runs = 0
        self.began = time.monotonic()

    def begin(self, title: str) -> None:
        """The next task."""
        self.number += 1
        self.title = title
        self._show(f"[{self.number}/{self.total}] {title}", plain=True)

    def expect(self, runs: int) -> None:
        """How many runs the next race has."""
        self.runs = runs

    def tick(self, done: int, name: str) -> None:
        full = BAR * done // max(self.runs, 1)
        bar = "#" * full + "." * (BAR - full)
        spent = time.monotonic() - self.began
        self._show(f"[{self.number}/{self.total}] {self.title} [{bar}] {done}/{self.runs} {spent:.0f} s {name[:NAME]}")

    def note(self, text: str) -> None:
        """What goes on that is no run: building, checking."""
        self._show(f"[{self.number}/{self.total}] {self.title}: {text}")

    def clear(self) -> None:
        """Take the bar away: something is printed now."""
        if self.live:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def _show(self, text: str, plain: bool = False) -> None:
        if self.live:  # cut to the terminal's width, or the next line would not go over this one
            self.stream.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
        elif plain:
            self.stream.write(f"{text}\n")
        self.stream.flush()
