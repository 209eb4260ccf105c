"""Finds the one device of a model, because a budget is for one device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mimose.exceptions import MimoseError
from mimose.tensors import local_bytes

_SMALL_BYTES = 4096
"""CPU tensors up to this size (counters, scales) do not count beside an accelerator."""


def only_device(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters and buffers.

    Args:
        model: The model. Without any tensors it counts as on the CPU.

    Raises:
        MimoseError: They are on several devices, or hold no memory (``meta``).
    """
    held = _bytes_by_device(model)
    if any(device.type == "meta" for device in held):
        raise MimoseError(_of_meta(model, held))
    if len(held) > 1:
        raise MimoseError(_of_several(held))
    return next(iter(held), torch.device("cpu"))


def _bytes_by_device(model: nn.Module) -> dict[torch.device, int]:
    """Sum the bytes on each device; small CPU tensors count only on a CPU."""
    held: dict[torch.device, int] = {}
    small = 0
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        n_bytes = 0 if is_lazy(tensor) else local_bytes(tensor)
        if tensor.device.type == "cpu" and n_bytes <= _SMALL_BYTES:
            small += n_bytes
        else:
            held[tensor.device] = held.get(tensor.device, 0) + n_bytes
    cpu = torch.device("cpu")
    if not held or cpu in held:
        held[cpu] = held.get(cpu, 0) + small
    return held


def _shown(held: dict[torch.device, int]) -> str:
    return ", ".join(f"{n:,} bytes on {device}" for device, n in held.items())


def _of_several(held: dict[torch.device, int]) -> str:
    return (
        f"the model's parameters and buffers are on {len(held)} devices "
        f"({_shown(held)}), but a budget is for one device: move the model to one "
        f"(model.to(device), without device_map), or train with one process for each "
        f"device"
    )


def _of_meta(model: nn.Module, held: dict[torch.device, int]) -> str:
    offloaded = next(_offloaded(model), None)
    if offloaded is None:
        what = "load or initialise its weights on one device before you attach"
    else:
        what = (
            f"accelerate's hooks (first on {offloaded}) load offloaded weights in each "
            f"call, which plans do not cover: load the model on one device, without "
            f"device_map or offloading"
        )
    return f"parts of the model have no memory yet ({_shown(held)}): {what}"


def _offloaded(model: nn.Module) -> Iterator[str]:
    """Yield the names of modules whose weights accelerate offloads.

    `_hf_hook` is a private attribute of accelerate, and there is no public one. Without
    it, only the error message says less.
    """
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        hooks = getattr(hook, "hooks", (hook,))  # a SequentialHook has several
        if any(getattr(one, "offload", False) is True for one in hooks):
            yield name or "the model"
