"""Work beside training: one queue, and a thread that takes from it. No torch.

A job touches no tensor and no module. It should take a millisecond at most, for so long
a thread of training that is back from an operator may wait for the interpreter's lock;
a longer one returns an iterator and is done item by item. Behind each item the thread
sleeps for several times as long as that took.

The thread is started by the first job and ends when none is left. It holds the queue no
longer than for one job, so it ends with a session that is dropped without a word. As
the interpreter exits it is waited for: a solver cannot be interrupted, and would not
outlive that. A forked child has no thread; its next job starts one.
"""

from __future__ import annotations

import atexit
import enum
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator
from operator import itemgetter
from typing import Any, TypeAlias

_log = logging.getLogger(__name__)

Job: TypeAlias = Callable[[], Iterator[None] | None]
"""Something to do; what it is to change, it changes by itself."""

NAME = "mimose"
"""Of the thread."""
_REST = 4
"""It sleeps for so many times as long as it works."""
_MOST_WAITING = 64
"""Jobs; of more the stalest of the least urgent is dropped."""
_END_SECONDS = 0.02
"""Longest wait for the thread to end, ..."""
_EXIT_SECONDS = 5.0
"""... and as the interpreter exits."""
_MOST_REST = 1.0
"""Longest rest, in seconds: a clock may jump."""
HUNG_SECONDS = 60.0
"""A lesson of which no item ends for so long is not waited for any more."""

_FAILED = (
    "mimose: the worker thread has failed and is not started again. Training goes on: "
    "the steps fit predictions themselves, and plans are neither made ahead nor "
    "improved. Please report this. %s"
)

_URGENCY = itemgetter(0)


class JobKind(enum.IntEnum):
    """Kinds of work, the most urgent first."""

    LEARN = 0
    """Taking in what steps have shown, fits included; one job at a time."""
    PLAN = 1
    """Plans for shapes that are on their way."""
    REFINE = 2
    """Better plans in place of those in use."""


class Worker:
    """Does jobs in a separate thread, the most urgent kind first.

    A job that fails ends the thread, and the log tells why. From then on lessons
    are learned at once, by whoever hands them over, and nothing else is done.

    Args:
        is_inline: Whether jobs are done at once, by whoever hands them over; what one
            raises reaches the caller.
    """

    def __init__(self, *, is_inline: bool = False) -> None:
        self.is_inline = is_inline
        # This is held, not the condition: an interrupt in the midst of a condition's
        # own code would leave it held for ever.
        self._lock = lock()
        self._changed = threading.Condition(self._lock)
        self._jobs: dict[tuple[JobKind, Hashable], Job] = {}
        self._thread: threading.Thread | None = None
        self._learner: threading.Thread | None = None
        """Who is in the midst of a lesson."""
        self._is_hurried = False
        self._is_closed = False
        self._has_failed = False
        self._began = 0.0
        _workers.add(self)

    def submit(self, kind: JobKind, key: Hashable, job: Job) -> None:
        """Take a job.

        Args:
            kind: Its kind.
            key: A job of the same kind and key that waits is replaced.
            job: The job.
        """
        if self._is_closed:
            return
        if self.is_inline:
            for _ in job() or ():
                pass
        elif not self._has_failed:
            self._put(kind, key, job)
        elif kind is JobKind.LEARN:
            self._do(kind, job)

    def _put(self, kind: JobKind, key: Hashable, job: Job) -> None:
        with self._lock:
            self._jobs.pop((kind, key), None)
            self._jobs[kind, key] = job
            if len(self._jobs) > _MOST_WAITING:
                del self._jobs[max(self._jobs, key=_URGENCY)]
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=_work, args=(weakref.ref(self),), name=NAME, daemon=True
                )
                self._thread.start()

    def catch_up(self) -> None:
        """Return when nothing waits to be learned any more; the caller helps."""
        while not self.is_inline:
            with self._lock:
                self._is_hurried = True
                self._changed.notify_all()
                try:
                    while self._is_learning:
                        began = self._began
                        has_changed = self._changed.wait(HUNG_SECONDS)
                        if not has_changed and self._began == began:
                            self._give_up()
                finally:
                    self._is_hurried = False
                taken = self._take(JobKind.LEARN)
            if taken is None:
                return
            self._do(*taken)

    def _give_up(self) -> None:
        """Wait for the thread no more: it hangs in the midst of a lesson."""
        self._learner, self._has_failed = None, True
        frames = sys._current_frames()
        thread = self._thread
        frame = None if thread is None else frames.get(thread.ident or 0)
        where = "" if frame is None else "".join(traceback.format_stack(frame))
        _log.warning(_FAILED, f"It has hung for {HUNG_SECONDS:g} s here:\n{where}")

    @property
    def _is_learning(self) -> bool:
        """Whether another thread is in the midst of a lesson, not before a fork."""
        who = self._learner
        if who is None or who is threading.current_thread():
            return False
        return who.is_alive()

    def _take(self, least: JobKind) -> tuple[JobKind, Job] | None:
        """Take out the most urgent job that may begin, down to a kind."""
        most = JobKind.PLAN if self._is_learning else JobKind.LEARN
        waiting = (key for key in self._jobs if most <= key[0] <= least)
        key = min(waiting, key=_URGENCY, default=None)
        if key is None:
            return None
        if key[0] is JobKind.LEARN:
            self._learner = threading.current_thread()
        return key[0], self._jobs.pop(key)

    def do_next(self) -> bool:
        """Do the next job, in the thread; return whether there may be more."""
        with self._lock:
            taken = None if self._has_failed else self._take(JobKind.REFINE)
            if taken is None:
                self._thread = None
                return False
        self._do(*taken)
        self._rest()
        return True

    def _do(self, kind: JobKind, job: Job) -> None:
        """Do a job, with rests in the thread; what it fails with is logged."""
        is_beside = threading.current_thread() is self._thread
        self._began = time.perf_counter()
        try:
            for _ in job() or ():
                self._rest()
                if self._is_closed or (is_beside and self._has_failed):
                    return
        except Exception as error:
            self._has_failed = True
            text = "".join(traceback.format_exception(error))
            _log.warning(_FAILED, f"The error was:\n{text}")
        finally:
            if kind is JobKind.LEARN:
                with self._lock:
                    if self._learner is threading.current_thread():
                        self._learner = None
                    self._changed.notify_all()

    def _rest(self) -> None:
        """Sleep behind an item, in the thread and where no caller waits."""
        if threading.current_thread() is not self._thread:
            return
        with self._lock:
            if not (self._is_hurried or self._is_closed):
                rest = _REST * (time.perf_counter() - self._began)
                self._changed.wait(min(rest, _MOST_REST))
        self._began = time.perf_counter()

    def close(self, most_seconds: float = _END_SECONDS) -> None:
        """Drop what waits and end the thread. Harmless twice.

        Args:
            most_seconds: Longest wait for its end.
        """
        with self._lock:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(most_seconds)


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for worker in list(_workers):
        worker.close(_EXIT_SECONDS)


def _work(found: weakref.ref[Worker]) -> None:
    """Do jobs until none is left, or none is wanted: what the thread runs."""
    while (worker := found()) is not None and worker.do_next():
        del worker


# -------------------------------------------------------------------------- locks


_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_one_at_a_time = threading.RLock()
_held: list[Any] = []
"""By the thread that forks; the others wait."""


def lock() -> Any:
    """Return a reentrant lock that is free in a forked child.

    A child has but the thread that forked. A lock that another thread held at that
    moment would stay held for ever; so the forking thread takes all of them first, and
    gives them back on both sides. They are held for microseconds each.
    """
    made = threading.RLock()
    _locks.add(made)
    return made


def _take_all() -> None:
    _one_at_a_time.acquire()
    for each in list(_locks):
        each.acquire()
        _held.append(each)


def _give_all_back() -> None:
    while _held:
        _held.pop().release()
    _one_at_a_time.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_take_all, after_in_parent=_give_all_back, after_in_child=_give_all_back
    )
