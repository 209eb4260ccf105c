"""Finds the one device of a model, because a budget is for one device."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mimose.exceptions import MimoseError
from mimose.tensors import local_bytes

_SMALL_BYTES = 2**14
"""CPU tensors of this size together (counters, scales) do not count beside an
accelerator."""


def only_device(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters and buffers.

    Args:
        model: The model. Without any tensors it counts as on the CPU.

    Raises:
        MimoseError: They are on several devices, or hold no memory (``meta``).
    """
    held: Counter[torch.device] = Counter()
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        held[tensor.device] += 0 if is_lazy(tensor) else local_bytes(tensor)
    cpu = torch.device("cpu")
    if len(held) > 1 and held[cpu] <= _SMALL_BYTES:
        held.pop(cpu, None)
    if len(held) > 1 or any(device.type == "meta" for device in held):
        where = ", ".join(f"{n:,} bytes on {device}" for device, n in held.items())
        msg = (
            f"the model's parameters and buffers are on {len(held)} devices ({where}), "
            f"but a budget is for one device that holds all of them (parts on meta are "
            f"offloaded or have no memory yet): load the model on one device, without "
            f"device_map or offloading, or train with one process for each device"
        )
        raise MimoseError(msg)
    return next(iter(held), cpu)
