"""The module ``torch.sim``: to the simulated accelerator as ``torch.cuda`` to CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.sim.hollow import *  # noqa: F403
from benchmarks.sim.indices import Device, index_of, n_devices
from benchmarks.sim.memory import *  # noqa: F403 - each part says what is public
from benchmarks.sim.memory import mem_get_info, memory_allocated
from benchmarks.sim.random import *  # noqa: F403
from benchmarks.sim.streams import *  # noqa: F403

default_generators: tuple[torch.Generator, ...] = ()
"""The devices' own generators; filled by `benchmarks.sim.use`."""


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What there is to know of a device."""

    name: str
    total_memory: int
    """In bytes."""


@contextlib.contextmanager
def device(which: Device) -> Iterator[None]:
    """Make a device the current one for a while."""
    before = current_device()
    set_device(which)
    try:
        yield
    finally:
        set_device(before)


def current_device() -> int:
    """Return the index of this thread's current device."""
    return torch.accelerator.current_device_index()


def set_device(which: Device) -> None:
    """Make a device this thread's current one."""
    torch.accelerator.set_device_index(index_of(which))


def device_count() -> int:
    """Return how many devices there are."""
    return n_devices()


def get_device_name(device: Device = None) -> str:
    """Return a device's name."""
    return f"simulated accelerator {index_of(device)}"


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Return a device's name and memory."""
    _, total = mem_get_info(device)
    return DeviceProperties(get_device_name(device), total)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return what ``torch.autocast("sim", ...)`` may cast to."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """Return True: the CPU computes with it."""
    return True


def is_available() -> bool:
    """Return True: the device is there once this is ``torch.sim``."""
    return True


def is_initialized() -> bool:
    """Return True: nothing is put off to first use."""
    return True


def init() -> None:
    """Do nothing: all is done when the device is loaded."""


# What torch looks for besides: torch.utils.checkpoint saves random states only where
# `_initialized` is true.
_initialized = True
_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def reset() -> dict[int, int]:
    """Begin anew, as between two tests.

    Cached memory is given back; total memory, limits, settings, counters, peaks, the
    seeds and the current device are as after `benchmarks.sim.use`. While any memory
    is held, the allocator's settings stay as they are.

    Returns:
        The bytes still held, of each device that holds any.
    """
    torch.ops.sim.reset()
    held = {index: memory_allocated(index) for index in range(device_count())}
    return {index: n_bytes for index, n_bytes in held.items() if n_bytes}
