"""Meters: they read how much memory is held, and the peak.

Note: [Requested bytes]
An allocator's `allocated_bytes` counts whole blocks. A block of a large segment is not
split if at most 1 MiB would remain, and which block a tensor gets depends on earlier
steps. So the same step may differ by up to 20 MiB. `requested_bytes` counts the bytes
of the requests, and repeats to the byte.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from mimose.exceptions import BudgetError
from mimose.memory.glibc import HeapFiller, return_freed_memory
from mimose.torch_private import device_statistics

_log = logging.getLogger(__name__)

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Meter(abc.ABC):
    """Everything that a session reads of a device's memory.

    A meter of your own must define the three abstract methods.
    """

    noise_bytes = float(2**16)
    """By about this much two readings of the same quantity differ."""
    reads_peak = True
    """False if the system reads no peak: then plans rely on predictions alone."""

    @abc.abstractmethod
    def live_bytes(self) -> int:
        """Return the bytes held now, from which a step's growth is counted."""

    @abc.abstractmethod
    def peak_bytes(self) -> int:
        """Return the most bytes held at any moment since the last reset."""

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak at what is held now."""

    def settled_bytes(self, slack_bytes: float) -> int:
        """Return the bytes held now, without freed memory that the allocator keeps.

        Args:
            slack_bytes: How much of that memory the result may still contain.
        """
        del slack_bytes
        return self.live_bytes()

    def read(self) -> tuple[int, int]:
        """Return both readings at once, for the boundaries of a measured step."""
        live = self.live_bytes()
        return live, max(live, self.peak_bytes())

    def held_bytes(self) -> int:
        """Free cached blocks, and return the bytes that count against a budget."""
        return self.settled_bytes(0)

    def taken_bytes(self) -> int | None:
        """Return the bytes of all requests so far, freed ones too; None: unknown."""
        return None

    def release(self) -> None:
        """Free what the meter itself holds, when a session ends."""
        return

    def total_bytes(self) -> int | None:
        """Return the device's memory, for budgets given as a share; None: unknown."""
        return None


def make_meter(meter: Meter | str | None, device: torch.device) -> Meter:
    """Return the meter for a device.

    Args:
        meter: A `Meter`, which is returned unchanged; ``"allocator"``
            (`AllocatorMeter`), ``"process"``
            (`ProcessMeter`) or ``"prediction"`` (`PredictionMeter`); or None to choose
            by the device.
        device: The device of the model's parameters.

    Raises:
        BudgetError: The name is unknown, or its meter cannot read this device.
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
    msg = (
        f"meter {meter!r} cannot read {device}: give 'allocator' (for an accelerator), "
        f"'process', 'prediction', a mimose.memory.meters.Meter, or None"
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
        "mimose: the memory peak of %s cannot be read here (%s). Plans rely on "
        "predictions alone, and no step is checked against the budget",
        device,
        reason,
    )
    return PredictionMeter(device)


# ------------------------------------------------------------------ accelerators


class Usage(NamedTuple):
    """The numbers of an allocator at one moment; peaks are since the last reset."""

    requested_bytes: int
    """The bytes of live tensors: Note: [Requested bytes]."""
    requested_peak_bytes: int
    allocated_bytes: int
    """The bytes of their blocks."""
    reserved_bytes: int
    """The bytes taken from the device: these blocks, and free ones kept for reuse."""
    reserved_peak_bytes: int
    gap_bytes: int
    """The bytes of free blocks in segments that also hold tensors."""
    n_retries: int
    """How often the allocator freed its cached blocks and tried again."""
    n_ooms: int
    """Out-of-memory errors so far, caught or not."""


class AllocatorMeter(Meter):
    """Reads an accelerator's caching allocator, through `torch.accelerator`.

    The level is requested bytes; reserved and allocated bytes are read too. A reading
    needs no synchronization, because the allocator counts when the host requests
    memory, not when a kernel uses it.

    Args:
        device: The accelerator's device.
    """

    noise_bytes = 0.0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        index: int | None = getattr(device, "index", None)
        if index is None and torch.accelerator.is_available():
            index = torch.accelerator.current_device_index()
        self.index = index or 0
        self._reserved_peak_bytes = 0

    def live_bytes(self) -> int:
        """Return the requested bytes."""
        return self.usage().requested_bytes

    def peak_bytes(self) -> int:
        """Return the peak of requested bytes since the last reset."""
        return self.usage().requested_peak_bytes

    def read(self) -> tuple[int, int]:
        """Return level and peak of one reading."""
        return self.usage()[:2]

    def reset_peak(self) -> None:
        """Start a new peak, also for other readers of torch's peak counters."""
        torch.accelerator.reset_peak_memory_stats(self.index)

    def usage(self) -> Usage:
        """Return all numbers of the allocator, with the peak over several resets.

        The reserved peak is since `forget_usage`, if the meter was read before each
        reset. The requested peak is since the last reset.
        """
        usage = _read_usage(self.index)
        peak = max(self._reserved_peak_bytes, usage.reserved_peak_bytes)
        self._reserved_peak_bytes = peak
        return usage._replace(reserved_peak_bytes=peak)

    def forget_usage(self) -> None:
        """Start a new reserved peak at the last reset."""
        self._reserved_peak_bytes = 0

    def held_bytes(self) -> int:
        """Free cached blocks, and return the reserved bytes."""
        torch.accelerator.empty_cache()
        return self.usage().reserved_bytes

    def taken_bytes(self) -> int | None:
        """Return the bytes of all tensors so far, also of freed ones."""
        taken = device_statistics(self.index)["allocated_bytes"]["all"].get("allocated")
        return None if taken is None else int(taken)

    def memory_info(self) -> tuple[int, int]:
        """Return the free bytes and all bytes of the device."""
        free, total = torch.get_device_module(self.device).mem_get_info(self.index)
        return int(free), int(total)

    def total_bytes(self) -> int | None:
        """Return what this process can have: free bytes, and what it has reserved."""
        return self.memory_info()[0] + self.usage().reserved_bytes


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
        reserved["current"],
        reserved["peak"],
        stats["inactive_split_bytes"]["all"]["current"],
        stats["num_alloc_retries"],
        stats["num_ooms"],
    )


# ------------------------------------------------------------------ the CPU


class ProcessMeter(Meter):
    """Reads the resident set of this process, on Linux with glibc.

    It makes glibc's heap return freed memory to the system: see `mimose.memory.glibc`.

    Note: [Free memory that stays resident]
    Small blocks stay in the heap when they are freed, and stay resident as long as a
    block above them lives. A step fills these holes first, so its growth would depend
    on earlier steps. So a step starts from a trimmed heap. `malloc_trim` takes 1 ms to
    return 12 MiB, and more than 100 ms in a heap of ten thousand holes. So the next
    call waits a hundred times as long as the last one took, except for measured steps.

    Raises:
        OSError: The kernel's files cannot be read or written (on other systems), or
            malloc is not glibc's.
    """

    noise_bytes = 0.1 * 2**20

    def __init__(self) -> None:
        self._files = [
            os.open("/proc/self/statm", os.O_RDONLY),
            os.open("/proc/self/status", os.O_RDONLY),
            os.open("/proc/self/clear_refs", os.O_WRONLY),
        ]
        weakref.finalize(self, _close, self._files)
        return_freed_memory()
        self._filler = HeapFiller()
        self._filler.fill()
        self._trimmed_bytes = 0
        self._next_trim = 0.0
        self.reset_peak()

    def live_bytes(self) -> int:
        """Return the resident set."""
        return int(os.pread(self._files[0], 128, 0).split(b" ", 2)[1]) * _PAGE_BYTES

    def settled_bytes(self, slack_bytes: float) -> int:
        """Return the resident set, trimmed: Note: [Free memory that stays resident].

        Args:
            slack_bytes: The heap is trimmed if the resident set grew by more.
        """
        live = self.live_bytes()
        is_due = not slack_bytes or time.monotonic() >= self._next_trim
        if is_due and live - self._trimmed_bytes > slack_bytes:
            began = time.thread_time()  # not the clock: the machine may be busy
            self._filler.fill()
            seconds = time.thread_time() - began
            self._next_trim = time.monotonic() + 100 * seconds
            self._trimmed_bytes = live = self.live_bytes()
        self._trimmed_bytes = min(live, self._trimmed_bytes)
        return live

    def peak_bytes(self) -> int:
        """Return the peak of the resident set (``VmHWM``)."""
        text = os.pread(self._files[1], 4096, 0)
        start = text.index(b"VmHWM:") + 6
        return int(text[start : text.index(b"kB", start)]) * 1024

    def reset_peak(self) -> None:
        """Start a new peak at the present resident set."""
        os.pwrite(self._files[2], b"5", 0)

    def release(self) -> None:
        """Free the blocks that occupy the heap's holes."""
        self._filler.release()

    def total_bytes(self) -> int | None:
        """Return the machine's memory or a control group's limit, if smaller."""
        return _host_bytes()


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def _host_bytes() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in control_groups())])


def control_groups() -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of the process's control group and those above.

    A batch system or systemd sets limits below the root, a container at it. The kernel
    takes cached files away where it needs their memory, so these are not in use.
    """
    root, text = Path("/sys/fs/cgroup"), ""
    with contextlib.suppress(OSError):
        text = os.fsdecode(Path("/proc/self/cgroup").read_bytes())
    for line in text.split("\n")[:-1]:
        _, controllers, name = line.split(":", 2)
        if not controllers:  # version 2
            own, files = root / name[1:], ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            own = root / "memory" / name[1:]
            files = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        for group in (own, *own.parents):
            # A container may not see groups above its own; "max" is no limit.
            with contextlib.suppress(OSError, ValueError):
                limit, used = (int((group / file).read_text()) for file in files)
                stat = group / "memory.stat"
                counts = stat.read_text() if stat.exists() else ""
                sums = dict(count.split() for count in counts.splitlines())
                cached = sums.get("total_inactive_file", sums.get("inactive_file", 0))
                yield limit, used - int(cached)


class PredictionMeter(Meter):
    """For systems that read no peak: it reads only what is held, if the system does.

    Plans rely on what is counted inside the layers. No step's peak is observed, and no
    safety margin is learned.
    """

    noise_bytes = float(2**20)
    reads_peak = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def live_bytes(self) -> int:
        """Return the device's own counter, or the resident set, or 0."""
        if self.device.type == "mps":
            return int(torch.mps.current_allocated_memory())
        try:
            with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 (hot path)
                return int(file.read().split()[1]) * _PAGE_BYTES
        except OSError:
            return 0

    peak_bytes = live_bytes
    """There is no peak: the same as `live_bytes`."""

    def reset_peak(self) -> None:
        """Do nothing, because there is no peak."""

    def total_bytes(self) -> int | None:
        """Return the host's memory, or what mps recommends; None: unknown."""
        if self.device.type == "mps":
            return int(torch.mps.recommended_max_memory())
        try:
            return _host_bytes()
        except (AttributeError, ValueError, OSError):
            return None
