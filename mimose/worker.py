"""The worker thread: one queue of jobs beside training. No torch.

A job touches no tensor and no module. It should take at most a millisecond, because a
training thread may wait that long for the interpreter's lock. A longer job returns an
iterator and runs item by item. After each item the thread sleeps for several times its
duration.

The first job starts the thread, which ends when no job is left. It refers to the queue
only during a job, so it also ends with a session that is dropped without `detach`. The
interpreter waits for it at exit, because a solver cannot be interrupted and would not
survive the exit. A forked child has no thread; its next job starts one.
"""

from __future__ import annotations

import atexit
import enum
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator
from operator import itemgetter
from typing import TypeAlias

_log = logging.getLogger(__name__)

Job: TypeAlias = Callable[[], Iterator[None] | None]
"""A function that does the work and stores its result itself."""

NAME = "mimose"
"""The thread's name."""
_REST = 4
"""The thread sleeps this many times as long as it works."""
_MOST_WAITING = 64
"""The most jobs that wait. Beyond it, the oldest of the least urgent is dropped."""
_END_SECONDS = 0.02
"""The longest wait for the thread's end."""
_EXIT_SECONDS = 5.0
"""The same at the interpreter's exit."""
_MOST_REST = 1.0
"""The longest rest in seconds, because a clock may jump."""
HUNG_SECONDS = 60.0
"""If no item of a lesson ends for this long, nothing waits for it any more."""

_FAILED = (
    "mimose: the worker thread has failed and is not started again. Training goes on: "
    "the steps fit predictions themselves, and plans are not made ahead. Please report "
    "this. %s"
)

_URGENCY = itemgetter(0)


class JobKind(enum.IntEnum):
    """Kinds of work, the most urgent first."""

    LEARN = 0
    """Learn from steps, with fits; one job at a time."""
    PLAN = 1
    """Make plans for expected shapes."""


class Worker:
    """Does jobs in a separate thread, the most urgent kind first.

    If a job fails, the thread ends and the log says why. From then on `submit` runs
    lessons at once, and drops other jobs.

    Args:
        is_inline: Whether `submit` runs each job at once; its errors reach the caller.
    """

    def __init__(self, *, is_inline: bool = False) -> None:
        self.is_inline = is_inline
        # Hold this lock, not the condition: an interrupt inside the condition's own
        # code would never release it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs: dict[tuple[JobKind, Hashable], Job] = {}
        self._thread: threading.Thread | None = None
        self._learner: threading.Thread | None = None
        """The thread that runs a lesson."""
        self._is_hurried = False
        self._is_closed = False
        self._has_failed = False
        self._began = 0.0
        _workers.add(self)

    def submit(self, kind: JobKind, key: Hashable, job: Job) -> None:
        """Add a job.

        Args:
            kind: Its kind.
            key: It replaces a waiting job of the same kind and key.
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
        """Return when no lesson waits; this thread runs lessons too."""
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
        """Stop waiting for the thread, which hangs in a lesson."""
        self._learner, self._has_failed = None, True
        frames = sys._current_frames()
        thread = self._thread
        frame = None if thread is None else frames.get(thread.ident or 0)
        where = "" if frame is None else "".join(traceback.format_stack(frame))
        _log.warning(_FAILED, f"It has hung for {HUNG_SECONDS:g} s here:\n{where}")

    @property
    def _is_learning(self) -> bool:
        """Whether another thread of this process runs a lesson."""
        who = self._learner
        if who is None or who is threading.current_thread():
            return False
        return who.is_alive()

    def _take(self, least: JobKind) -> tuple[JobKind, Job] | None:
        """Remove and return the most urgent job that may begin, down to a kind."""
        most = JobKind.PLAN if self._is_learning else JobKind.LEARN
        waiting = (key for key in self._jobs if most <= key[0] <= least)
        key = min(waiting, key=_URGENCY, default=None)
        if key is None:
            return None
        if key[0] is JobKind.LEARN:
            self._learner = threading.current_thread()
        return key[0], self._jobs.pop(key)

    def do_next(self) -> bool:
        """Do the next job in the thread; return whether there may be more."""
        with self._lock:
            taken = None if self._has_failed else self._take(JobKind.PLAN)
            if taken is None:
                self._thread = None
                return False
        self._do(*taken)
        self._rest()
        return True

    def _do(self, kind: JobKind, job: Job) -> None:
        """Do a job, with rests in the thread; log its error."""
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
        """Sleep after an item, in the thread and if no caller waits."""
        if threading.current_thread() is not self._thread:
            return
        with self._lock:
            if not (self._is_hurried or self._is_closed):
                rest = _REST * (time.perf_counter() - self._began)
                self._changed.wait(min(rest, _MOST_REST))
        self._began = time.perf_counter()

    def close(self, most_seconds: float = _END_SECONDS) -> None:
        """Drop all jobs and end the thread. A second call does nothing.

        Args:
            most_seconds: The longest wait for its end.
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
    """Run by the thread: do jobs until none is left or the worker is gone."""
    while (worker := found()) is not None and worker.do_next():
        del worker
