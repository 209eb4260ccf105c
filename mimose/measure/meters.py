"""Reading how much memory is held, and the highest it has been."""

from __future__ import annotations

import abc
import gc
import logging
import os
import resource
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from mimose.exceptions import BudgetError
from mimose.measure.allocator import Usage, read_usage
from mimose.measure.glibc import Holes, give_back_freed_memory

_log = logging.getLogger(__name__)

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_MOST_USAGE_ERROR = 2**19
"""Where `getrusage` may be farther off, ``VmHWM`` is read in its place."""


class Reading(NamedTuple):
    """One look at a meter."""

    live_bytes: int
    """Held now."""
    peak_bytes: int
    """The highest since the last reset."""
    file_bytes: int
    """Part of `live_bytes` that is mapped files, such as library code (CPU only)."""


class BasicMeter(Protocol):
    """The least a meter of one's own has to do."""

    def live_bytes(self) -> int:
        """Return the bytes held now."""
        ...

    def peak_bytes(self) -> int:
        """Return the most bytes held at any moment since the last reset."""
        ...

    def reset_peak(self) -> None:
        """Start a new peak at what is held now."""
        ...


class Meter(abc.ABC):
    """What the session needs to know of a device's memory.

    Three methods are a meter's own; the others have defaults.
    """

    noise_bytes = float(2**16)
    """Readings of the same thing differ by about this much."""
    reads_peak = True
    """False where the system cannot tell a peak: planning goes on by prediction."""

    @abc.abstractmethod
    def live_bytes(self) -> int:
        """Return the bytes held now: where a step's growth is counted from."""

    @abc.abstractmethod
    def peak_bytes(self) -> int:
        """Return the most bytes held at any moment since the last reset."""

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak at what is held now."""

    def settled_bytes(self, slack_bytes: float) -> int:
        """Return the bytes held now, without what was freed and kept by the allocator.

        Args:
            slack_bytes: How much of the latter may be left in.
        """
        del slack_bytes
        return self.live_bytes()

    def rough_peak_bytes(self) -> int:
        """Return the peak as fast as it can be told: a few pages may be missing."""
        return self.peak_bytes()

    def read(self) -> Reading:
        """Return everything at once, for the boundaries of a measured step."""
        return Reading(self.live_bytes(), self.peak_bytes(), 0)

    def clean_up(self) -> None:
        """Put readings right after somebody has used, and freed, much memory."""
        return

    def held_bytes(self) -> int:
        """Return what counts against a budget now, free blocks given back."""
        return self.settled_bytes(0)

    def release(self) -> None:
        """Give back what is held for the sake of readings, as a session ends."""
        return

    def total_bytes(self) -> int | None:
        """Return what the device has, for budgets given as a fraction."""
        return None


_OWN = ("live_bytes", "peak_bytes", "reset_peak")


class _Borrowed(Meter):
    """A user's meter, with the defaults for what it does not do itself."""

    def __init__(self, meter: BasicMeter) -> None:
        self._meter = meter
        for name in (
            "noise_bytes",
            "reads_peak",
            "settled_bytes",
            "rough_peak_bytes",
            "read",
            "held_bytes",
            "clean_up",
            "release",
            "total_bytes",
        ):
            own = getattr(meter, name, None)
            if own is not None:
                setattr(self, name, own)

    def live_bytes(self) -> int:
        return self._meter.live_bytes()

    def peak_bytes(self) -> int:
        return self._meter.peak_bytes()

    def reset_peak(self) -> None:
        self._meter.reset_peak()


_walls: dict[int, list[float]] = {}
"""By device: the limit as it was, and those of living sessions; the lowest holds."""


class AllocatorMeter(Meter):
    """An accelerator's caching allocator, through `torch.accelerator`.

    The level is requested bytes; reserved and allocated bytes are read beside them: see
    `mimose.measure.allocator`. Reading needs no synchronisation: the allocator counts
    when the host asks for memory, not when a kernel uses it.

    Args:
        device: The accelerator's device.
    """

    noise_bytes = 0.0
    reads_peak = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        index: int | None = getattr(device, "index", None)
        if index is None and torch.accelerator.is_available():
            index = torch.accelerator.current_device_index()
        self._index = index or 0
        self._reserved_peak_bytes = 0
        self._allocated_peak_bytes = 0

    def live_bytes(self) -> int:
        """Return the bytes that tensors have asked for."""
        return self._look().requested_bytes

    def peak_bytes(self) -> int:
        """Return the most bytes that tensors had asked for since the last reset."""
        return self._look().requested_peak_bytes

    def read(self) -> Reading:
        """Return level and peak of one reading."""
        usage = self._look()
        return Reading(usage.requested_bytes, usage.requested_peak_bytes, 0)

    def reset_peak(self) -> None:
        """Start a new peak; the user's own reading of it starts anew as well."""
        torch.accelerator.reset_peak_memory_stats(self._index)

    def usage(self) -> Usage:
        """Return all of the allocator's numbers, peaks as over all resets.

        Reserved and allocated peaks are those since `forget_usage`, as far as a reading
        came before each reset; the requested peak is that since the last reset.
        """
        usage = self._look()
        peaks = self._reserved_peak_bytes, self._allocated_peak_bytes
        if peaks == (usage.reserved_peak_bytes, usage.allocated_peak_bytes):
            return usage  # there was no reset in between; `_replace` costs 3 µs
        return usage._replace(
            reserved_peak_bytes=peaks[0], allocated_peak_bytes=peaks[1]
        )

    def forget_usage(self) -> None:
        """Begin the reserved and allocated peaks anew, as at the last reset."""
        self._reserved_peak_bytes = self._allocated_peak_bytes = 0

    def held_bytes(self) -> int:
        """Return the bytes reserved, once free blocks are given back."""
        self.give_back()
        return self._look().reserved_bytes

    def give_back(self) -> None:
        """Give free blocks back to the device, for which the host waits."""
        torch.accelerator.empty_cache()

    def wall(self, n_bytes: int) -> Callable[[], None]:
        """Make the allocator fail rather than reserve more than some bytes.

        Args:
            n_bytes: The most it may reserve.

        Returns:
            What puts the wall back to where it was.

        Raises:
            BudgetError: The device's allocator knows no such wall.
        """
        module = torch.get_device_module(self.device)
        put = getattr(module, "set_per_process_memory_fraction", None)
        if put is None:
            msg = (
                f"hard_limit: torch.{self.device.type} has no "
                f"set_per_process_memory_fraction, so no wall can be set there; leave "
                f"hard_limit out"
            )
            raise BudgetError(msg)
        get = getattr(module, "get_per_process_memory_fraction", None)
        walls = _walls.setdefault(self._index, [])
        if not walls:
            walls.append(1.0 if get is None else float(get(self._index)))
        wall = min(1.0, n_bytes / self._memory_info()[1])
        walls.append(wall)
        put(min(walls), self._index)

        def undo() -> None:
            walls.remove(wall)
            put(min(walls), self._index)
            if len(walls) == 1:
                walls.clear()

        return undo

    def _memory_info(self) -> tuple[int, int]:
        """Return what is free on the device, and all it has."""
        info = getattr(torch.accelerator, "get_memory_info", None)
        module = torch.get_device_module(self.device)
        free, total = (
            module.mem_get_info(self.device) if info is None else info(self._index)
        )
        return int(free), int(total)

    def total_bytes(self) -> int | None:
        """Return what this process can have: what is free, and what it has taken."""
        return self._memory_info()[0] + self._look().reserved_bytes

    def _look(self) -> Usage:
        """Read, and keep the peaks that a reset would lose."""
        usage = read_usage(self._index)
        if usage.reserved_peak_bytes > self._reserved_peak_bytes:
            self._reserved_peak_bytes = usage.reserved_peak_bytes
        if usage.allocated_peak_bytes > self._allocated_peak_bytes:
            self._allocated_peak_bytes = usage.allocated_peak_bytes
        return usage


class ProcessMeter(Meter):
    """The resident set of this process, on Linux with glibc.

    glibc's heap is made to give memory back: see `mimose.measure.glibc`.

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
        self._holes = Holes()
        self._holes.take()
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
        return int(os.pread(self._statm, 128, 0).split(b" ", 2)[1]) * _PAGE

    def settled_bytes(self, slack_bytes: float) -> int:
        """Return the resident set: see Note: [Free memory that stays resident]."""
        live = self.live_bytes()
        if live - self._trimmed_bytes > slack_bytes:
            if slack_bytes and time.monotonic() < self._next_trim:
                return live
            began = time.thread_time()  # on a busy machine the clock runs on
            self._holes.take()
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
        live = int(fields[1]) * _PAGE
        return Reading(live, max(live, self.peak_bytes()), int(fields[2]) * _PAGE)

    def clean_up(self) -> None:
        """Collect what is garbage, and take the holes it leaves in the heap."""
        gc.collect()
        self._holes.take()

    def release(self) -> None:
        """Leave the heap's holes to whoever needs memory."""
        self._holes.release()

    def total_bytes(self) -> int | None:
        """Return the machine's memory or the cgroup's limit, the smaller."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min([total, *_cgroup_limits()])


class PredictionMeter(Meter):
    """For systems that cannot tell a peak: it reads what is held, if even that.

    Planning goes on by what the tracker counts inside the units; no step's peak is
    observed and no margin is learned.
    """

    noise_bytes = float(2**20)
    reads_peak = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def live_bytes(self) -> int:
        """Return what the device's own counter says, else the resident set, else 0."""
        if self.device.type == "mps":
            return int(torch.mps.current_allocated_memory())
        try:
            with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 (hot path)
                return int(file.read().split()[1]) * _PAGE
        except OSError:
            return 0

    def peak_bytes(self) -> int:
        """Return what is held now: no peak is known."""
        return self.live_bytes()

    def reset_peak(self) -> None:
        """Do nothing: there is no peak to reset."""

    def read(self) -> Reading:
        """Return the bytes held now as live and as peak."""
        live = self.live_bytes()
        return Reading(live, live, 0)

    def total_bytes(self) -> int | None:
        """Return the machine's memory where the system tells it; of mps its share."""
        if self.device.type == "mps":
            return int(torch.mps.recommended_max_memory())
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return None


def make_meter(meter: Meter | BasicMeter | str | None, device: torch.device) -> Meter:
    """Return the meter for a device.

    Args:
        meter: A `Meter`, which is returned as it is; another object with the methods
            of `BasicMeter`; ``"allocator"``, ``"process"`` or ``"prediction"``; or
            None to choose by the device.
        device: Where the model's parameters are.

    Raises:
        BudgetError: The name is unknown.
    """
    if isinstance(meter, Meter):
        return meter
    if meter is not None and not isinstance(meter, str):
        own = [callable(getattr(meter, name, None)) for name in _OWN]
        if isinstance(meter, type) or not all(own):
            msg = f"meter {meter!r} is no object with the methods {', '.join(_OWN)}"
            raise BudgetError(msg)
        return _Borrowed(meter)
    if meter == "allocator":
        if device.type == "cpu":
            msg = "meter 'allocator' reads an accelerator; the model is on the CPU"
            raise BudgetError(msg)
        return AllocatorMeter(device)
    if meter == "process":
        return ProcessMeter()
    if meter == "prediction":
        return PredictionMeter(device)
    if meter is not None:
        msg = (
            f"meter {meter!r} is unknown: use 'allocator', 'process', 'prediction', an "
            f"object with the methods {', '.join(_OWN)}, or None"
        )
        raise BudgetError(msg)
    return _default_meter(device)


def _default_meter(device: torch.device) -> Meter:
    if device.type not in ("cpu", "mps"):
        return AllocatorMeter(device)
    if device.type == "cpu":
        try:
            return ProcessMeter()
        except (OSError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
    else:
        reason = "its allocator keeps no peak"
    _log.warning(
        "mimose: the memory peak of %s cannot be read here (%s); plans are made by "
        "prediction alone and no step is checked against the budget",
        device,
        reason,
    )
    return PredictionMeter(device)


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
    return max(32, 2 * cores) * cores * _PAGE


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
