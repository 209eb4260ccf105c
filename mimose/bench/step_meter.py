"""Measures one training step from outside, even if a session resets its peak."""

from __future__ import annotations

import contextlib
import time
from typing import Any, NamedTuple, TypeAlias

import torch

from mimose.memory.meters import AllocatorMeter, Meter, ProcessMeter, Usage


class _OverResets(Meter):
    """Keeps the highest peak over all resets."""

    _highest_bytes = 0

    def reset_peak(self) -> None:
        """Start a new peak; `step_peak_bytes` still includes the old one."""
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

    def resting_bytes(self) -> int:
        """Return what the process holds between steps, freed memory returned."""
        return self.settled_bytes(0)


class _Level(Meter):
    """The requested memory of an accelerator, for which the budget is.

    If a strategy does not free cached blocks, reserved bytes include those of all
    earlier steps. Requested bytes are comparable for all strategies.
    """

    noise_bytes = 0.0

    def __init__(self, device: torch.device) -> None:
        self._allocator = AllocatorMeter(device)

    def live_bytes(self) -> int:
        """Return the requested bytes."""
        return self._allocator.live_bytes()

    def peak_bytes(self) -> int:
        """Return the most bytes requested since the last reset."""
        return self._allocator.peak_bytes()

    def reset_peak(self) -> None:
        """Start a new peak."""
        self._allocator.reset_peak()

    def read(self) -> tuple[int, int]:
        """Return level and peak from one reading."""
        return self._allocator.read()

    def total_bytes(self) -> int | None:
        """Return the memory that this process can use."""
        return self._allocator.total_bytes()


class DeviceStepMeter(_OverResets, _Level):
    """The requested memory of an accelerator, by step."""

    def resting_bytes(self) -> int:
        """Return what is held between steps."""
        return self.live_bytes()


class ReservedStepMeter(AllocatorMeter):
    """The reserved memory of an accelerator, by step.

    A session with this meter keeps a budget of reserved bytes. The session's readings
    and resets count here too.
    """

    _highest_bytes = 0

    def begin_step(self) -> int:
        """Forget all peaks, and return the bytes of the blocks in use."""
        self.reset_peak()
        usage = self.usage()
        self._highest_bytes = usage.reserved_bytes
        return usage.allocated_bytes

    def step_peak_bytes(self) -> int:
        """Return the most reserved at any moment since `begin_step`."""
        self.usage()
        return self._highest_bytes

    def resting_bytes(self) -> int:
        """Return the bytes reserved between steps, cached blocks freed."""
        return self.held_bytes()

    def usage(self) -> Usage:
        """Return all numbers of the allocator, and keep its peak."""
        before, self._reserved_peak_bytes = self._reserved_peak_bytes, 0
        usage = super().usage()
        self._highest_bytes = max(self._highest_bytes, usage.reserved_peak_bytes)
        self._reserved_peak_bytes = max(before, usage.reserved_peak_bytes)
        return usage._replace(reserved_peak_bytes=self._reserved_peak_bytes)


AnyStepMeter: TypeAlias = StepMeter | DeviceStepMeter | ReservedStepMeter


def step_meter(device: torch.device) -> StepMeter | DeviceStepMeter:
    """Return the meter for a model on a device."""
    return StepMeter() if device.type == "cpu" else DeviceStepMeter(device)


def budget_meter(device: torch.device) -> StepMeter | ReservedStepMeter:
    """Return the meter for a session's budget."""
    return StepMeter() if device.type == "cpu" else ReservedStepMeter(device)


def autocast(
    device: torch.device, dtype: str
) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which layers compute in a dtype, given by its name."""
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype))


def synchronise(device: torch.device) -> None:
    """Wait until a device has finished all work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class MeasuredStep(NamedTuple):
    """The measurements of a step: forward, backward, and all else that ran in it."""

    start_bytes: int
    """Held when it began."""
    peak_bytes: int
    """The most held at any moment until its end, over every reset of the peak."""
    seconds: float

    @property
    def growth_bytes(self) -> int:
        """The peak over what was held at the start."""
        return self.peak_bytes - self.start_bytes


class RunningStep:
    """A step that has begun, with a new peak and a running clock.

    It waits for the device at begin and end.
    """

    def __init__(self, meter: AnyStepMeter, device: torch.device) -> None:
        self._meter = meter
        self._device = device
        self.start_bytes = meter.begin_step()
        synchronise(self._device)
        self._began = time.perf_counter()

    def end(self) -> MeasuredStep:
        """Stop the clock, and read what the step reached."""
        synchronise(self._device)
        seconds = time.perf_counter() - self._began
        peak_bytes = self._meter.step_peak_bytes()
        return MeasuredStep(self.start_bytes, peak_bytes, seconds)
