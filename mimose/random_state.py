"""Torch's random state, on the CPU and on the model's device."""

from __future__ import annotations

import torch


class RandomState:
    """The random state as it is now, to be put back.

    Args:
        device: The model's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._other: torch.Tensor | None = None
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self._other = module.get_rng_state(device)

    def restore(self) -> None:
        """Put it back."""
        torch.set_rng_state(self._cpu)
        if self._other is not None:
            module = torch.get_device_module(self._device)
            module.set_rng_state(self._other, self._device)
