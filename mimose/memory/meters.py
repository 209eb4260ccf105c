"""Reading how much memory is held, and the highest it has been.

Note: [Requested bytes]
An allocator's `allocated_bytes` counts whole blocks: a block of a large segment is not
split where no more than 1 MiB would remain, and which block a tensor gets depends on
the steps before. One and the same step differs by up to 20 MiB so. `requested_bytes` is
what was asked for, and repeats to the byte.
"""

from __future__ import annotations

import abc
import logging
import os
import time
import weakref
from typing import NamedTuple, Protocol

import torch

from mimose.exceptions import BudgetError
from mimose.memory.glibc import HeapFiller, give_back_freed_memory
from mimose.torch_private import device_statistics

_log = logging.getLogger(__name__)

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


class Reading(NamedTuple):
    """One look at a meter."""

    live_bytes: int
    """Held now."""
    peak_bytes: int
    """The highest since the last reset."""


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

    def read(self) -> Reading:
        """Return everything at once, for the boundaries of a measured step."""
        return Reading(self.live_bytes(), self.peak_bytes())

    def held_bytes(self) -> int:
        """Return what counts against a budget now, cached blocks freed."""
        return self.settled_bytes(0)

    def taken_bytes(self) -> int | None:
        """Return all that was ever asked for, freed or not; None where not counted."""
        return None

    def release(self) -> None:
        """Free what is held for the sake of readings, as a session ends."""
        return

    def total_bytes(self) -> int | None:
        """Return what the device has, for budgets given as a fraction."""
        return None


_BASIC = ("live_bytes", "peak_bytes", "reset_peak")
"""What a meter of one's own has to have."""


class _BorrowedMeter(Meter):
    """A user's meter, with the defaults for what it does not do itself."""

    def __init__(self, meter: BasicMeter) -> None:
        self._meter = meter
        for name in dir(Meter):
            if not name.startswith("_") and hasattr(meter, name):
                setattr(self, name, getattr(meter, name))

    def live_bytes(self) -> int:
        return self._meter.live_bytes()

    def peak_bytes(self) -> int:
        return self._meter.peak_bytes()

    def reset_peak(self) -> None:
        self._meter.reset_peak()


def make_meter(meter: Meter | BasicMeter | str | None, device: torch.device) -> Meter:
    """Return the meter for a device.

    Args:
        meter: A `Meter`, which is returned as it is; another object with the methods
            of `BasicMeter`; ``"allocator"``, ``"process"`` or ``"prediction"``; or
            None to choose by the device.
        device: Where the model's parameters are.

    Raises:
        BudgetError: The name is unknown, or reads another device.
    """
    if isinstance(meter, Meter):
        return meter
    if meter is None:
        return _default_meter(device)
    if meter == "allocator" and device.type != "cpu":
        return AllocatorMeter(device)
    if meter == "process":
        return ProcessMeter()
    if meter == "prediction":
        return PredictionMeter(device)
    is_object = not isinstance(meter, (str, type))
    if is_object and all(callable(getattr(meter, name, None)) for name in _BASIC):
        return _BorrowedMeter(meter)  # type: ignore[arg-type]
    msg = (
        f"meter {meter!r} cannot be used for {device}: give 'allocator' (of an "
        f"accelerator), 'process', 'prediction', an object with the methods "
        f"{', '.join(_BASIC)}, or None"
    )
    raise BudgetError(msg)


def _default_meter(device: torch.device) -> Meter:
    if device.type not in ("cpu", "mps"):
        return AllocatorMeter(device)
    reason = "its allocator keeps no peak"
    if device.type == "cpu":
        try:
            return ProcessMeter()
        except (OSError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
    _log.warning(
        "mimose: the memory peak of %s cannot be read here (%s); plans are made by "
        "prediction alone and no step is checked against the budget",
        device,
        reason,
    )
    return PredictionMeter(device)


# ------------------------------------------------------------------ accelerators


class Usage(NamedTuple):
    """An allocator's state at one moment; peaks are those since the last reset."""

    requested_bytes: int
    """Asked for by tensors that live: see Note: [Requested bytes]."""
    requested_peak_bytes: int
    allocated_bytes: int
    """Of the blocks that these live in."""
    allocated_peak_bytes: int
    reserved_bytes: int
    """Taken from the device: these blocks, and free ones kept for later."""
    reserved_peak_bytes: int
    gap_bytes: int
    """Of free blocks in segments that something else lives in."""
    n_retries: int
    """How often the allocator freed its cached blocks since nothing else would do."""
    n_ooms: int
    """Out-of-memory errors raised, caught or not."""


class AllocatorMeter(Meter):
    """An accelerator's caching allocator, through `torch.accelerator`.

    The level is requested bytes; reserved and allocated bytes are read beside them.
    Reading needs no synchronisation: the allocator counts when the host asks for
    memory, not when a kernel uses it.

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
        self.index = index or 0
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
        return Reading(*self._look()[:2])

    def reset_peak(self) -> None:
        """Start a new peak; the user's own reading of it starts anew as well."""
        torch.accelerator.reset_peak_memory_stats(self.index)

    def usage(self) -> Usage:
        """Return all of the allocator's numbers, peaks as over all resets.

        Reserved and allocated peaks are those since `forget_usage`, as far as a reading
        came before each reset; the requested peak is that since the last reset.
        """
        return self._look()._replace(
            reserved_peak_bytes=self._reserved_peak_bytes,
            allocated_peak_bytes=self._allocated_peak_bytes,
        )

    def forget_usage(self) -> None:
        """Begin the reserved and allocated peaks anew, as at the last reset."""
        self._reserved_peak_bytes = self._allocated_peak_bytes = 0

    def held_bytes(self) -> int:
        """Return the bytes reserved, once cached blocks are freed."""
        torch.accelerator.empty_cache()
        return self._look().reserved_bytes

    def taken_bytes(self) -> int | None:
        """Return the bytes of all tensors that were ever made."""
        taken = device_statistics(self.index)["allocated_bytes"]["all"].get("allocated")
        return None if taken is None else int(taken)

    def memory_info(self) -> tuple[int, int]:
        """Return what is free on the device, and all it has."""
        info = getattr(torch.accelerator, "get_memory_info", None)
        if info is not None:
            free, total = info(self.index)
        else:
            free, total = torch.get_device_module(self.device).mem_get_info(self.index)
        return int(free), int(total)

    def total_bytes(self) -> int | None:
        """Return what this process can have: what is free, and what it has taken."""
        return self.memory_info()[0] + self._look().reserved_bytes

    def _look(self) -> Usage:
        """Read, and keep the peaks that a reset would lose."""
        usage = _read_usage(self.index)
        if usage.reserved_peak_bytes > self._reserved_peak_bytes:
            self._reserved_peak_bytes = usage.reserved_peak_bytes
        if usage.allocated_peak_bytes > self._allocated_peak_bytes:
            self._allocated_peak_bytes = usage.allocated_peak_bytes
        return usage


def _read_usage(index: int) -> Usage:
    stats = device_statistics(index)
    allocated = stats["allocated_bytes"]["all"]
    requested = stats.get("requested_bytes", {}).get("all", {})
    if not requested.get("peak"):  # cudaMallocAsync does not count them
        requested = allocated
    reserved = stats["reserved_bytes"]["all"]
    return Usage(
        requested["current"],
        requested["peak"],
        allocated["current"],
        allocated["peak"],
        reserved["current"],
        reserved["peak"],
        stats["inactive_split_bytes"]["all"]["current"],
        stats["num_alloc_retries"],
        stats["num_ooms"],
    )


# ------------------------------------------------------------------ the CPU


class ProcessMeter(Meter):
    """The resident set of this process, on Linux with glibc.

    glibc's heap is made to give memory back: see `mimose.memory.glibc`.

    Note: [Free memory that stays resident]
    Smaller blocks stay in the heap when they are freed, resident as long as any block
    above them lives. What a step grows by then depends on the steps before it: it fills
    such holes first. So a step starts from a trimmed heap. `malloc_trim` takes 1 ms to
    give 12 MiB back, and 100 ms and more in a heap of ten thousand holes; the next one
    waits a hundred times as long as the last took, but for steps that are measured.

    Raises:
        OSError: The kernel's files cannot be read or written (on other systems), or
            malloc is not glibc's.
    """

    noise_bytes = 0.1 * 2**20
    reads_peak = True

    def __init__(self) -> None:
        self._files = [
            os.open("/proc/self/statm", os.O_RDONLY),
            os.open("/proc/self/status", os.O_RDONLY),
            os.open("/proc/self/clear_refs", os.O_WRONLY),
        ]
        weakref.finalize(self, _close, self._files)
        give_back_freed_memory()
        self._filler = HeapFiller()
        self._filler.fill()
        self._trimmed_bytes = 0
        self._next_trim = 0.0
        self.reset_peak()

    def live_bytes(self) -> int:
        """Return the resident set."""
        return int(os.pread(self._files[0], 128, 0).split(b" ", 2)[1]) * _PAGE_BYTES

    def settled_bytes(self, slack_bytes: float) -> int:
        """Return the resident set: see Note: [Free memory that stays resident]."""
        live = self.live_bytes()
        is_due = not slack_bytes or time.monotonic() >= self._next_trim
        if is_due and live - self._trimmed_bytes > slack_bytes:
            began = time.thread_time()  # on a busy machine the clock runs on
            self._filler.fill()
            seconds = time.thread_time() - began
            self._next_trim = time.monotonic() + 100 * seconds
            self._trimmed_bytes = live = self.live_bytes()
        self._trimmed_bytes = min(live, self._trimmed_bytes)
        return live

    def peak_bytes(self) -> int:
        """Return the resident set's high-water mark (``VmHWM``)."""
        text = os.pread(self._files[1], 4096, 0)
        start = text.index(b"VmHWM:") + 6
        return int(text[start : text.index(b"kB", start)]) * 1024

    def reset_peak(self) -> None:
        """Start a new high-water mark at the present resident set."""
        os.pwrite(self._files[2], b"5", 0)

    def read(self) -> Reading:
        """Return the resident set and its peak."""
        live = self.live_bytes()
        return Reading(live, max(live, self.peak_bytes()))

    def release(self) -> None:
        """Leave the heap's holes to whoever needs memory."""
        self._filler.release()

    def total_bytes(self) -> int | None:
        """Return the machine's memory or the cgroup's limit, the smaller."""
        return min([_machine_bytes(), *_cgroup_limits()])


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_limits() -> list[int]:
    limits = []
    for path in _CGROUP_LIMITS:
        try:
            with open(path, encoding="ascii") as file:  # noqa: PTH123 (plain read)
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return limits


class PredictionMeter(Meter):
    """For systems that cannot tell a peak: it reads what is held, if even that.

    Planning goes on by what is counted inside the layers; no step's peak is observed
    and no margin is learned.
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
                return int(file.read().split()[1]) * _PAGE_BYTES
        except OSError:
            return 0

    peak_bytes = live_bytes
    """No peak is known."""

    def reset_peak(self) -> None:
        """Do nothing: there is no peak to reset."""

    def total_bytes(self) -> int | None:
        """Return the machine's memory where the system tells it; of mps its share."""
        if self.device.type == "mps":
            return int(torch.mps.recommended_max_memory())
        try:
            return _machine_bytes()
        except (AttributeError, ValueError, OSError):
            return None
