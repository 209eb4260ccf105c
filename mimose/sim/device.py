"""The module ``torch.sim``: for the simulated accelerator what ``torch.cuda`` is.

A random state is a seed and an offset, which grows by 4 with each operator that draws,
as in CUDA's generators. Kernels have always run when the host continues, so each event
has already happened; streams differ in the time of a hollow device alone. `waits`
counts the calls for which a host would wait for a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mimose.sim.hollow import *  # noqa: F403
from mimose.sim.hollow import hollow_name, set_hollow
from mimose.sim.indices import Device, index_of, n_devices
from mimose.sim.memory import *  # noqa: F403 - each part says what is public
from mimose.sim.memory import mem_get_info, memory_allocated

default_generators: tuple[torch.Generator, ...] = ()
"""The devices' own generators; filled by `mimose.sim.use`."""


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
    """Return a device's name: of a hollow one, the card's."""
    return hollow_name() or f"simulated accelerator {index_of(device)}"


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


def fill_default_generators() -> None:
    """Fetch the devices' own generators, once they are there."""
    global default_generators
    default_generators = tuple(
        torch.ops.sim.default_generator(index) for index in range(n_devices())
    )


def get_rng_state(device: Device = None) -> torch.Tensor:
    """Return a copy of a device's random state: 16 bytes on the CPU."""
    return default_generators[index_of(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    """Put a device's random state back."""
    default_generators[index_of(device)].set_state(state)


def manual_seed(seed: int) -> None:
    """Set the seed of the current device."""
    default_generators[index_of()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Set the seed of all devices."""
    for generator in default_generators:
        generator.manual_seed(seed)


def Stream(device: Device = None, priority: int = 0) -> torch.Stream:
    """Return a new stream of a device.

    Args:
        device: Of which; the current one by default.
        priority: Has no effect.
    """
    del priority
    return torch.Stream(device=torch.device("sim", index_of(device)))


def Event(enable_timing: bool = False) -> torch.Event:
    """Return an event that is not recorded yet.

    A function, for another class is no event to torch's `elapsed_time`.

    Args:
        enable_timing: Whether `elapsed_time` may be asked.
    """
    return torch.Event(device="sim", enable_timing=enable_timing)


def current_stream(device: Device = None) -> torch.Stream:
    """Return this thread's stream of a device."""
    return torch.accelerator.current_stream(index_of(device))


def stream(which: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Make a stream this thread's current one for a while."""
    return contextlib.nullcontext() if which is None else which


def synchronize(device: Device = None) -> None:
    """Wait for a device: nothing to wait for, and one more of `waits`."""
    torch.accelerator.synchronize(index_of(device))


def waits() -> int:
    """Return how often the host would have waited for a device, on CUDA.

    Counted are: reading a number (``item``, ``bool``), synchronising, operators whose
    result has a size that depends on the data (``nonzero``, ``unique``,
    ``masked_select``, an index that is a mask, ``repeat_interleave`` without
    ``output_size``), ``equal``, ``bincount``, and copies between host and device, but
    for those with ``non_blocking`` whose side on the host is pinned.
    """
    return int(torch.ops.sim.waits())


def rng_copies() -> int:
    """Return how often a random state of a device was copied to the host."""
    return int(torch.ops.sim.rng_copies())


def reset() -> dict[int, int]:
    """Reset the device, as between two tests.

    Cached memory is freed; total memory, limits, settings, counters, peaks, the
    seeds and the current device are as after `mimose.sim.use`. While any memory
    is held, the allocator's settings stay as they are.

    Returns:
        The bytes still held, of each device that holds any.
    """
    torch.ops.sim.reset()
    set_hollow(None)
    held = {index: memory_allocated(index) for index in range(device_count())}
    return {index: n_bytes for index, n_bytes in held.items() if n_bytes}
