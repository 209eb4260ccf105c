"""Meters that know a step's peak however often a session resets it within."""

from __future__ import annotations

import torch

from mimose.meters import AllocatorMeter, Meter, ProcessMeter


class _OverResets(Meter):
    """Keeps the highest peak in mind when a new one is started."""

    _highest_bytes = 0

    def reset_peak(self) -> None:
        """Start a new peak; `step_peak_bytes` keeps the old one in mind."""
        self._highest_bytes = max(self._highest_bytes, self.peak_bytes())
        super().reset_peak()  # type: ignore[safe-super]

    def begin_step(self) -> int:
        """Forget all peaks, and return what is held now."""
        self.reset_peak()
        self._highest_bytes = 0
        return self.live_bytes()

    def step_peak_bytes(self) -> int:
        """Return the most held at any moment since `begin_step`."""
        return max(self._highest_bytes, self.peak_bytes())


class StepMeter(_OverResets, ProcessMeter):
    """The process's resident set, by step."""


class DeviceStepMeter(_OverResets, AllocatorMeter):
    """An accelerator's allocator, by step."""


def step_meter(device: torch.device) -> StepMeter | DeviceStepMeter:
    """Return the meter for a model on a device."""
    return StepMeter() if device.type == "cpu" else DeviceStepMeter(device)
