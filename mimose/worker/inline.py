"""The twin of the daemon: the same jobs, done at once in the caller's thread."""

from __future__ import annotations

from collections.abc import Hashable

from mimose.worker.base import Job, Lane


class Inline:
    """Does each job as it is handed over; what a job raises reaches the caller."""

    is_inline = True

    def __init__(self) -> None:
        self._is_closed = False

    def submit(self, lane: Lane, key: Hashable, job: Job) -> None:
        """Do a job.

        Args:
            lane: Its kind.
            key: Of no use here, for nothing waits.
            job: The job.
        """
        del lane, key
        if not self._is_closed:
            job()

    def catch_up(self) -> None:
        """Return at once: nothing waits."""

    def expect_wait(self, *, is_urgent: bool) -> None:
        """Do nothing: nothing waits."""

    def take_failure(self) -> str:
        """Return ""."""
        return ""

    def close(self) -> None:
        """Do nothing any more."""
        self._is_closed = True
