"""Streams and events of the simulated accelerator.

Each device has one stream, and its kernels have run when the host goes on: an event has
always happened. What would make a host wait for a device is counted: see `waits`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from benchmarks.sim.indices import Device, index_of

__all__ = [
    "Event",
    "Stream",
    "current_stream",
    "default_stream",
    "rng_copies",
    "stream",
    "synchronize",
    "waits",
]


def Stream(device: Device = None, priority: int = 0) -> torch.Stream:
    """Return the one stream of a device, as if it were new.

    Args:
        device: Of which; the current one by default.
        priority: Has no effect.
    """
    del priority
    return torch.Stream(device=torch.device("sim", index_of(device)))


def Event(enable_timing: bool = False) -> torch.Event:
    """Return an event that is not recorded yet.

    A function, for a class of its own is no event to torch's `elapsed_time`.

    Args:
        enable_timing: Whether `elapsed_time` may be asked.
    """
    return torch.Event(device="sim", enable_timing=enable_timing)


def current_stream(device: Device = None) -> torch.Stream:
    """Return a device's stream."""
    return Stream(device)


default_stream = current_stream


@contextlib.contextmanager
def stream(which: torch.Stream | None) -> Iterator[None]:
    """Do nothing for a while: a device has one stream."""
    del which
    yield


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
