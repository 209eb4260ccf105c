"""What hands work over has to know: the kinds of work, and where it goes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from typing import Protocol, TypeAlias

Job: TypeAlias = Callable[[], None]
"""Something to do; what it is to change, it changes by itself."""


class Lane(enum.IntEnum):
    """Kinds of work, the most urgent first."""

    LEARN = 0
    """Taking in what steps have shown, fits included."""
    PLAN = 1
    """Plans for shapes that are on their way."""
    REFINE = 2
    """Better plans in place of those in use."""


class Background(Protocol):
    """Takes work; does it at once, or beside training."""

    @property
    def is_inline(self) -> bool:
        """Whether work is done at once, by whoever hands it over."""
        ...

    def submit(self, lane: Lane, key: Hashable, job: Job) -> None:
        """Take a job.

        Args:
            lane: Its kind.
            key: A job of the same lane and key that waits is replaced.
            job: The job.
        """
        ...

    def catch_up(self) -> None:
        """Return when nothing waits to be learned any more."""
        ...

    def expect_wait(self, *, is_urgent: bool) -> None:
        """Say whether the next step will wait for what is to be learned.

        Args:
            is_urgent: Whether it will.
        """
        ...

    def take_failure(self) -> str:
        """Return what a job has failed with, once; "" if none has."""
        ...

    def close(self) -> None:
        """Drop what waits, and do nothing any more. Harmless twice."""
        ...
