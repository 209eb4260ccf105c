"""The resident set of the process."""

from __future__ import annotations

import gc
import logging
import os
import resource
import time
import weakref

from mimose.memory.glibc import HeapFiller, give_back_freed_memory
from mimose.memory.meters.base import PAGE_BYTES, Meter, Reading

_log = logging.getLogger(__name__)

_MOST_USAGE_ERROR = 2**19
"""Where `getrusage` may be farther off, ``VmHWM`` is read in its place."""


class ProcessMeter(Meter):
    """The resident set of this process, on Linux with glibc.

    glibc's heap is made to give memory back: see `mimose.memory.glibc`.

    Note: [Free memory that stays resident]
    Smaller blocks stay in the heap when they are freed, resident as long as any block
    above them lives. Between two steps that is some 10 MiB in a small transformer, and
    it grew by 29 MiB in 40 steps of a small ResNet. What a step grows by then depends
    on the steps before it: it fills such holes first. So a step starts from a trimmed
    heap. `malloc_trim` takes 1 ms to give 12 MiB back, and 100 ms and more in a heap
    of ten thousand holes; the next one waits a hundred times as long as the last took,
    but for steps that are measured.

    Raises:
        OSError: The kernel's files cannot be read or written (on other systems).
    """

    noise_bytes = 0.1 * 2**20
    reads_peak = True

    def __init__(self) -> None:
        self._files: list[int] = []
        weakref.finalize(self, _close, self._files)
        self._open()
        give_back_freed_memory()
        self._filler = HeapFiller()
        self._filler.fill()
        self._trimmed_bytes = 0
        self._next_trim = 0.0
        self.reset_peak()
        self._has_usage = _usage_error_bytes() <= _MOST_USAGE_ERROR
        self._has_usage = self.rough_peak_bytes() <= self.peak_bytes()
        _process_meters.add(self)

    def _open(self) -> None:
        """Open the kernel's files of this very process; a fork opens its own."""
        _close(self._files)
        for name, mode in (
            ("statm", os.O_RDONLY),
            ("status", os.O_RDONLY),
            ("clear_refs", os.O_WRONLY),
        ):
            self._files.append(os.open(f"/proc/self/{name}", mode))
        self._statm, self._status, self._clear_refs = self._files

    def live_bytes(self) -> int:
        """Return the resident set."""
        return int(os.pread(self._statm, 128, 0).split(b" ", 2)[1]) * PAGE_BYTES

    def settled_bytes(self, slack_bytes: float) -> int:
        """Return the resident set: see Note: [Free memory that stays resident]."""
        live = self.live_bytes()
        if live - self._trimmed_bytes > slack_bytes:
            if slack_bytes and time.monotonic() < self._next_trim:
                return live
            began = time.thread_time()  # on a busy machine the clock runs on
            self._filler.fill()
            seconds = time.thread_time() - began
            self._next_trim = time.monotonic() + 100 * seconds
            live = self.live_bytes()
            self._trimmed_bytes = live
        elif live < self._trimmed_bytes:
            self._trimmed_bytes = live
        return live

    def peak_bytes(self) -> int:
        """Return the resident set's high-water mark (``VmHWM``)."""
        text = os.pread(self._status, 4096, 0)
        start = text.index(b"VmHWM:") + 6
        return int(text[start : text.index(b"kB", start)]) * 1024

    def rough_peak_bytes(self) -> int:
        """Return the high-water mark from `getrusage`, ten times as fast.

        It is up to some 256 KiB too low on two cores, and more on more; and it cannot
        fall below the resident set of the process that this one was forked from. Where
        that matters ``VmHWM`` is read.
        """
        if not self._has_usage:
            return self.peak_bytes()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def reset_peak(self) -> None:
        """Start a new high-water mark at the present resident set."""
        os.pwrite(self._clear_refs, b"5", 0)

    def read(self) -> Reading:
        """Return the resident set, its peak, and the mapped files in it."""
        fields = os.pread(self._statm, 128, 0).split(b" ", 3)
        live = int(fields[1]) * PAGE_BYTES
        return Reading(live, max(live, self.peak_bytes()), int(fields[2]) * PAGE_BYTES)

    def clean_up(self) -> None:
        """Collect what is garbage, and take the holes it leaves in the heap."""
        gc.collect()
        self._filler.fill()

    def release(self) -> None:
        """Leave the heap's holes to whoever needs memory."""
        self._filler.release()

    def total_bytes(self) -> int | None:
        """Return the machine's memory or the cgroup's limit, the smaller."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min([total, *_cgroup_limits()])


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


_process_meters: weakref.WeakSet[ProcessMeter] = weakref.WeakSet()


def _reopen() -> None:
    for meter in list(_process_meters):
        meter._open()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reopen)


def _usage_error_bytes() -> int:
    """Return how far the kernel's counters may lag behind, each core by its batch."""
    cores = os.cpu_count() or 1
    return max(32, 2 * cores) * cores * PAGE_BYTES


def _cgroup_limits() -> list[int]:
    limits = []
    for path in (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        try:
            with open(path, encoding="ascii") as file:  # noqa: PTH123 (plain read)
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return limits
