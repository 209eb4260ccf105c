"""The daemon: a thread of a session that does what no step has to wait for.

Note: [Giving way]
Threads take turns at the interpreter's lock, and whoever is back from an operator
waits for whoever has it. So the thread has it for a tenth of a millisecond at a time,
and then sleeps for many times as long: training is slowed by no more than that share,
however much there is to do. As long as nothing is planned, steps wait for what the last
one has taught: until the next one is there it sleeps for a moment only, and while that
waits not at all.

Note: [Its life]
It is started by the first job, and ends with the session: when that is closed, when it
is dropped without a word, and as the interpreter exits. A job that gives way ends there
and then. A solver cannot be interrupted, so only the interpreter's exit waits for it;
nobody else needs what it finds. The thread knows the queue alone, never the session. A
forked child has no thread; its first job starts one.
"""

from __future__ import annotations

import atexit
import threading
import time
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from functools import partial

from mimose.pauses import giving_way
from mimose.worker.base import Job, Lane
from mimose.worker.forks import lock

_BURST_SECONDS = 0.0001
"""For so long the interpreter's lock is kept, ..."""
_PAUSE_SECONDS = 0.002
"""... and for so long left to others."""
_SHORT_SECONDS = 0.00005
"""Where the next step would wait: just long enough that others come to their turn."""
_MOST_WAITING = 64
"""Jobs of a kind that wait; of more the oldest is dropped, for it is the stalest."""
_END_SECONDS = 0.02
"""Longest wait for the thread to end, ..."""
_EXIT_SECONDS = 5.0
"""... and as the interpreter exits: a thread in a solver would not outlive that."""
NAME = "mimose"


class Daemon:
    """Does jobs in a thread of its own, the most urgent kind first.

    A job that fails ends the thread, and `take_failure` tells why. From then on lessons
    are learned at once, by whoever hands them over, and nothing else is done.
    """

    is_inline = False

    def __init__(self) -> None:
        self._queue = _Queue()
        self._end = weakref.finalize(self, _Queue.close, self._queue)

    def submit(self, lane: Lane, key: Hashable, job: Job) -> None:
        """Take a job.

        Args:
            lane: Its kind.
            key: A job of the same lane and key that waits is replaced.
            job: The job.
        """
        if not self._queue.has_failed:
            self._queue.put(lane, key, job)
        elif lane is Lane.LEARN:
            self._queue.do_here(job)

    def catch_up(self) -> None:
        """Return when nothing waits to be learned any more."""
        self._queue.wait_for_lessons()

    def expect_wait(self, *, is_urgent: bool) -> None:
        """Say whether the next step will wait for what is to be learned.

        Args:
            is_urgent: Whether it will.
        """
        self._queue.is_urgent = is_urgent

    def take_failure(self) -> str:
        """Return what a job has failed with, once; "" if none has."""
        return self._queue.take_failure()

    def close(self) -> None:
        """Drop what waits and end the thread. Harmless twice."""
        self._end()


class _Ended(BaseException):
    """Ends a job that gives way where nobody waits for it any more."""


class _Queue:
    """What the thread and those who hand over work share."""

    # The lock itself is held, not the condition: an interrupt that comes between two
    # steps of a condition's own code would leave it held for ever.

    def __init__(self) -> None:
        self._lock = lock()
        self._changed = threading.Condition(self._lock)
        self._lanes: tuple[OrderedDict[Hashable, Job], ...] = tuple(
            OrderedDict() for _ in Lane
        )
        self._thread: threading.Thread | None = None
        self._running: Lane | None = None
        self._n_hurried = 0
        self._failure = ""
        self._is_closed = False
        self.has_failed = False
        self.is_urgent = False
        _queues.add(self)

    # ------------------------------------------------------------------ handing over

    def put(self, lane: Lane, key: Hashable, job: Job) -> None:
        with self._lock:
            if self._is_closed:
                return
            jobs = self._lanes[lane]
            jobs[key] = job
            jobs.move_to_end(key)
            if len(jobs) > _MOST_WAITING:
                jobs.popitem(last=False)
            self._start()
            self._changed.notify_all()

    def _start(self) -> None:
        """Start the thread, if there is none: at first, and in a forked child."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._running = None
        self._thread = threading.Thread(
            target=_work, args=(self,), name=NAME, daemon=True
        )
        self._thread.start()

    def wait_for_lessons(self) -> None:
        if threading.current_thread() is self._thread:
            return
        with self._lock:
            try:
                self._n_hurried += 1
                while self._is_learning() and not self.has_failed:
                    self._start()
                    self._changed.wait()
            finally:
                self._n_hurried -= 1
        if self.has_failed:
            self._do_all_here()

    def _is_learning(self) -> bool:
        is_waiting = bool(self._lanes[Lane.LEARN]) or self._running is Lane.LEARN
        return is_waiting and not self._is_closed

    def _do_all_here(self) -> None:
        while (job := self._take(Lane.LEARN)) is not None:
            self.do_here(job)

    def do_here(self, job: Job) -> None:
        """Do a job in the caller's thread; what it fails with is told as well."""
        try:
            job()
        except Exception as error:
            self.fail(error)

    def _take(self, lane: Lane) -> Job | None:
        with self._lock:
            jobs = self._lanes[lane]
            return jobs.popitem(last=False)[1] if jobs else None

    # ------------------------------------------------------------------ the thread

    def next(self) -> Job | None:
        """Wait for a job and return it; None at the end."""
        with self._lock:
            self._running = None
            self._changed.notify_all()
            while not (self._is_closed or any(self._lanes)):
                self._changed.wait()
            if self._is_closed:
                return None
            lane = next(lane for lane in Lane if self._lanes[lane])
            self._running = lane
            return self._lanes[lane].popitem(last=False)[1]

    @property
    def is_hurried(self) -> bool:
        """Whether somebody waits for the thread."""
        return bool(self._n_hurried)

    def end_if_closed(self) -> None:
        """Leave a job that nobody waits for any more."""
        if self._is_closed:
            raise _Ended

    @property
    def pause_seconds(self) -> float:
        """How long to sleep after a burst."""
        is_short = self.is_urgent and self._running is Lane.LEARN
        return _SHORT_SECONDS if is_short else _PAUSE_SECONDS

    def fail(self, error: BaseException) -> None:
        """Do no more: a job has failed."""
        told = "".join(traceback.format_exception(error))
        with self._lock:
            self._failure, self.has_failed = told, True
            self._running = None
            self._changed.notify_all()

    # ------------------------------------------------------------------ the end

    def take_failure(self) -> str:
        told, self._failure = self._failure, ""
        return told

    def close(self, most_seconds: float = _END_SECONDS) -> None:
        with self._lock:
            self._is_closed = True
            for jobs in self._lanes:
                jobs.clear()
            self._changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(most_seconds)


_queues: weakref.WeakSet[_Queue] = weakref.WeakSet()
"""Those that live: as long as their session, and their thread."""


@atexit.register
def _end_all() -> None:
    for queue in list(_queues):
        queue.close(_EXIT_SECONDS)


def _work(queue: _Queue) -> None:
    """Do jobs until the end: what the thread runs."""
    last = [time.perf_counter()]
    with giving_way(partial(_pause, queue, last)):
        while (job := queue.next()) is not None:
            last[0] = time.perf_counter()
            try:
                job()
            except _Ended:
                return
            except BaseException as error:
                queue.fail(error)
                return
            finally:
                del job  # else it lives on while the thread waits


def _pause(queue: _Queue, last: list[float]) -> None:
    """Sleep after a burst: Note: [Giving way]."""
    queue.end_if_closed()
    if time.perf_counter() - last[0] < _BURST_SECONDS or queue.is_hurried:
        return
    time.sleep(queue.pause_seconds)
    last[0] = time.perf_counter()
