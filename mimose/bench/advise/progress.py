"""How far the measuring is: one line that is written over."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_CELLS = 24
_WIDTH = 79


class Progress:
    """A bar, what is being measured, and about how long the rest takes.

    Where the output is no terminal, a line for each tenth.

    Args:
        promised_seconds: That it takes at the most.
        output: Where to.
    """

    def __init__(self, promised_seconds: float, output: TextIO | None = None) -> None:
        self._output = sys.stderr if output is None else output
        self._until = time.monotonic() + promised_seconds
        self._is_terminal = self._output.isatty()
        self._told = -1

    def __call__(self, what: str, share: float) -> None:
        """Show what is going on.

        Args:
            what: In a few words.
            share: That is done, from 0 to 1.
        """
        left = max(0, round(self._until - time.monotonic()))
        text = f"{what}, at most {left // 60}:{left % 60:02d} left"
        if self._is_terminal:
            done = round(share * _CELLS)
            bar = "#" * done + "." * (_CELLS - done)
            self._write(f"\r[{bar}] {text}"[:_WIDTH].ljust(_WIDTH))
        elif int(share * 10) > self._told:
            self._told = int(share * 10)
            self._write(f"mimose advise: {share:.0%}, {text}\n")

    def close(self) -> None:
        """Leave an empty line."""
        if self._is_terminal:
            self._write("\r" + " " * _WIDTH + "\r")

    def _write(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()
