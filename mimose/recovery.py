"""Putting a step back to where it began, to run it again."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import nn


def is_out_of_memory(error: BaseException) -> bool:
    """Tell an allocation that failed from any other error, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "DefaultCPUAllocator: can't allocate memory" in text
        or "out of memory" in text.lower()
    )


class Snapshot:
    """Random state and changing buffers as they were when a step began.

    Args:
        device: The model's device, whose random state is taken along.
        buffers: Buffers that a forward changes, as (module, name).
    """

    def __init__(
        self, device: torch.device, buffers: Sequence[tuple[nn.Module, str]]
    ) -> None:
        self._device = device
        self._buffers = tuple(buffers)
        self._values: list[torch.Tensor] = []
        self._cpu_state: torch.Tensor | None = None
        self._device_state: torch.Tensor | None = None

    def take(self) -> None:
        """Take the snapshot, over an earlier one."""
        self._cpu_state = torch.get_rng_state()
        if self._device.type != "cpu":
            self._device_state = torch.get_device_module(self._device).get_rng_state(
                self._device
            )
        self._values = [buffer.detach().clone() for buffer in self._present()]

    def restore(self) -> None:
        """Put everything back, in place."""
        if self._cpu_state is not None:
            torch.set_rng_state(self._cpu_state)
        if self._device_state is not None:
            torch.get_device_module(self._device).set_rng_state(
                self._device_state, self._device
            )
        with torch.no_grad():
            for buffer, value in zip(self._present(), self._values, strict=True):
                buffer.copy_(value)

    def _present(self) -> list[torch.Tensor]:
        found = [module._buffers[name] for module, name in self._buffers]
        return [buffer for buffer in found if buffer is not None]


def release_memory(device: torch.device) -> None:
    """Collect cycles that pin tensors and give cached blocks back."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


class Gradients:
    """The gradients of a model as they are now, to be put back.

    Where none are there yet (the window has just begun) this costs nothing; else it
    holds a copy of each.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._grads = [
            (p, None if p.grad is None else p.grad.detach().clone())
            for p in model.parameters()
            if p.requires_grad
        ]

    def restore(self) -> None:
        """Put the gradients back; in place where they still are."""
        for parameter, grad in self._grads:
            if grad is None or parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad.detach_().copy_(grad)
