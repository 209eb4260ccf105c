"""How long work that gives way runs without a pause, and where."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from mimose.pauses import giving_way


@dataclass(frozen=True, slots=True)
class Stretch:
    """What ran between two pauses."""

    seconds: float
    """Of the thread's own time: other threads and programs do not count."""
    began: str
    """``file:line`` of the pause before."""
    ended: str
    """The same of the pause that ended it."""


@dataclass(slots=True)
class Stretches:
    """The stretches of some work of one thread."""

    found: list[Stretch] = field(default_factory=list)
    _since: float = 0.0
    _began: str = ""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time what runs inside, from its beginning to its end."""
        with giving_way(self._pause):
            self._began, self._since = "begin", time.thread_time()
            yield
            self._end("end")

    def _pause(self) -> None:
        seconds = time.thread_time() - self._since
        # this function, give_way, and who called that
        self._end(_place(sys._getframe(2)), seconds)

    def _end(self, place: str, seconds: float | None = None) -> None:
        if seconds is None:
            seconds = time.thread_time() - self._since
        self.found.append(Stretch(seconds, self._began, place))
        self._began, self._since = place, time.thread_time()


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
