"""Finds the index of a simulated device."""

from __future__ import annotations

from typing import TypeAlias

import torch

Device: TypeAlias = "torch.device | str | int | None"
"""A device, its name or its index; None and ``"sim"`` are the current one."""


def n_devices() -> int:
    """Return how many simulated devices there are."""
    return int(torch.ops.sim.device_count())


def index_of(device: Device = None) -> int:
    """Return a device's index.

    Raises:
        ValueError: It is none of the simulated accelerator's.
    """
    if isinstance(device, int):
        index: int | None = device
    else:
        found = torch.device("sim") if device is None else torch.device(device)
        index = found.index if found.type == "sim" else -1
    if index is None:
        return torch.accelerator.current_device_index()
    if not 0 <= index < n_devices():
        msg = f"{device!r} is no simulated device: there are sim:0 to {n_devices() - 1}"
        raise ValueError(msg)
    return index
