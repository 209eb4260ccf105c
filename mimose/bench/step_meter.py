"""One training step measured from outside, however often a session resets its peak."""

from __future__ import annotations

import contextlib
import time
from typing import Any, NamedTuple, TypeAlias

import torch

from mimose.memory.meters import AllocatorMeter, Meter, ProcessMeter, Reading, Usage


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

    def resting_bytes(self) -> int:
        """Return what the process holds between steps, freed memory returned."""
        return self.settled_bytes(0)


class _Level(Meter):
    """What tensors have requested of an accelerator; a budget for it is one on that.

    Not every strategy frees cached blocks, and reserved bytes are then those of all
    steps before. What a step itself needs is the same measure for all.
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

    def read(self) -> Reading:
        """Return level and peak of one reading."""
        return self._allocator.read()

    def total_bytes(self) -> int | None:
        """Return what this process can have."""
        return self._allocator.total_bytes()


class DeviceStepMeter(_OverResets, _Level):
    """What tensors have requested of an accelerator, by step."""

    def resting_bytes(self) -> int:
        """Return what is held between steps."""
        return self.live_bytes()


class ReservedStepMeter(AllocatorMeter):
    """What an accelerator's allocator has reserved, by step.

    A session that is given this meter keeps a budget of reserved bytes. What it reads,
    and what it resets, is seen here too.
    """

    _highest_bytes = 0

    def begin_step(self) -> int:
        """Forget all peaks, and return the bytes of the blocks in use."""
        self.reset_peak()
        usage = self._look()
        self._highest_bytes = usage.reserved_bytes
        return usage.allocated_bytes

    def step_peak_bytes(self) -> int:
        """Return the most reserved at any moment since `begin_step`."""
        self._look()
        return self._highest_bytes

    def resting_bytes(self) -> int:
        """Return the bytes reserved between steps, cached blocks freed."""
        return self.held_bytes()

    def _look(self) -> Usage:
        usage = super()._look()
        self._highest_bytes = max(self._highest_bytes, usage.reserved_peak_bytes)
        return usage


AnyStepMeter: TypeAlias = StepMeter | DeviceStepMeter | ReservedStepMeter


def step_meter(device: torch.device) -> StepMeter | DeviceStepMeter:
    """Return the meter for a model on a device."""
    return StepMeter() if device.type == "cpu" else DeviceStepMeter(device)


def budget_meter(device: torch.device) -> StepMeter | ReservedStepMeter:
    """Return the meter of what a session's budget is about."""
    return StepMeter() if device.type == "cpu" else ReservedStepMeter(device)


def autocast(
    device: torch.device, dtype: str
) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which layers compute in a dtype, given by its name."""
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype))


def synchronise(device: torch.device) -> None:
    """Wait until a device has done all that it was asked."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class MeasuredStep(NamedTuple):
    """What a step took: forward, backward, and whatever else ran in it."""

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
    """A step that has begun: its peak is a new one, its clock runs.

    The device is waited for at both ends.
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
