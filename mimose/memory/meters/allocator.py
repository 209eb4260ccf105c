"""An accelerator's caching allocator."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from mimose.memory.meters.base import Meter, Reading
from mimose.memory.meters.usage import Usage, read_usage

_log = logging.getLogger(__name__)


_walls: dict[int, list[float]] = {}
"""By device: the limit as it was, and those that stand; the lowest holds."""
_NO_WALL = "torch.%s has no set_per_process_memory_fraction: no wall keeps the budget"


class AllocatorMeter(Meter):
    """An accelerator's caching allocator, through `torch.accelerator`.

    The level is requested bytes; reserved and allocated bytes are read beside them: see
    `mimose.memory.meters.usage`. Reading needs no synchronisation: the allocator
    counts when the host asks for memory, not when a kernel uses it.

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
        self._total_bytes: int | None = None

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
        """
        module = torch.get_device_module(self.device)
        put = getattr(module, "set_per_process_memory_fraction", None)
        if put is None:
            if self._index not in _walls:
                _walls[self._index] = []
                _log.warning(_NO_WALL, self.device.type)
            return lambda: None
        get = getattr(module, "get_per_process_memory_fraction", None)
        walls = _walls.setdefault(self._index, [])
        if not walls:
            walls.append(1.0 if get is None else float(get(self._index)))
        if self._total_bytes is None:
            self._total_bytes = self._memory_info()[1]
        wall = min(1.0, n_bytes / self._total_bytes)
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
