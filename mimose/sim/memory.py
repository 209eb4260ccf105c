"""The memory of the simulated accelerator: as in `torch.cuda`, with knobs for tests."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.accelerator import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)

from mimose.sim.indices import Device, index_of
from mimose.torch_private import memory_info

__all__ = [
    "MemoryEvent",
    "empty_cache",
    "fail_allocation",
    "get_per_process_memory_fraction",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_history",
    "memory_reserved",
    "memory_stats",
    "record_memory_history",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "set_expandable_segments",
    "set_garbage_collection_threshold",
    "set_limit",
    "set_max_split_size",
    "set_others",
    "set_per_process_memory_fraction",
    "set_total_memory",
]


class MemoryEvent(NamedTuple):
    """One thing that the allocator did."""

    kind: str
    """``alloc``, ``free``; ``segment_alloc``, ``segment_free``; ``segment_map`` and
    ``segment_unmap`` of expandable segments; ``oom``."""
    address: int
    """Where; of an ``oom`` the bytes that the device has free."""
    n_bytes: int
    """How much: as asked for, or of the segment."""


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the bytes that a device has free, and has in all."""
    return memory_info(index_of(device))


def set_total_memory(n_bytes: int, device: Device = None) -> None:
    """Set what a device has in all: 80 GiB at first."""
    _check_size("total memory", n_bytes)
    torch.ops.sim.set_total(index_of(device), n_bytes)


def set_others(n_bytes: int, device: Device = None) -> None:
    """Set what other processes hold of a device: none at first."""
    _check_size("memory of other processes", n_bytes)
    torch.ops.sim.set_others(index_of(device), n_bytes)


def fail_allocation(nth: int, device: Device = None) -> None:
    """Make the nth allocation from now fail, once, even with free memory; 0: none."""
    torch.ops.sim.fail_allocation(index_of(device), nth)


def set_limit(n_bytes: int | None, device: Device = None) -> None:
    """Set the most that this process may reserve of a device; None for all it has."""
    if n_bytes is not None:
        _check_size("limit", n_bytes)
    torch.ops.sim.set_limit(index_of(device), n_bytes)


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Set what this process may reserve of a device, as a share of what it has.

    Raises:
        ValueError: It is not between 0 and 1.
    """
    _check_share("fraction", fraction)
    _, total = mem_get_info(device)
    set_limit(int(fraction * total), device)


def get_per_process_memory_fraction(device: Device = None) -> float:
    """Return which share of a device this process may reserve; 1.0: all."""
    limit: int | None = torch.ops.sim.get_limit(index_of(device))
    _, total = mem_get_info(device)
    return 1.0 if limit is None else limit / total


def set_expandable_segments(enabled: bool) -> None:
    """Switch expandable segments on or off, for all devices.

    Raises:
        RuntimeError: Memory is held: free all tensors and call `empty_cache` first.
    """
    torch.ops.sim.set_expandable_segments(enabled)


def set_garbage_collection_threshold(share: float) -> None:
    """Set from which share of the limit on cached segments are freed by age.

    It works where a limit is set, as on CUDA. 0 switches it off.
    """
    _check_share("threshold", share)
    torch.ops.sim.set_garbage_collection_threshold(float(share))


def set_max_split_size(n_bytes: int | None) -> None:
    """Set the size from which on blocks are not split; None: all are.

    Raises:
        RuntimeError: Memory is held: free all tensors and call `empty_cache` first.
    """
    if n_bytes is not None:
        _check_size("largest size that is split", n_bytes)
    torch.ops.sim.set_max_split_bytes(n_bytes)


def record_memory_history(enabled: bool = True, device: Device = None) -> None:
    """Begin a new history of what the allocator does, or end it and forget it."""
    torch.ops.sim.record_history(index_of(device), enabled)


def memory_history(device: Device = None) -> list[MemoryEvent]:
    """Return what the allocator did since `record_memory_history` was called."""
    kinds, addresses, sizes = torch.ops.sim.history(index_of(device))
    return list(map(MemoryEvent, kinds, addresses, sizes))


def _check_size(name: str, n_bytes: int) -> None:
    if n_bytes < 0:
        msg = f"a {name} of {n_bytes} bytes is less than none: give 0 or more"
        raise ValueError(msg)


def _check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        msg = f"a {name} of {share} is out of range: give 0 to 1"
        raise ValueError(msg)
