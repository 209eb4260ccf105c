"""Which calls are timed, and what is told of it when a step has ended.

Note: [Which steps teach]
Plans are for ordinary steps, so these teach: the step ran once, under a plan, and its
call was neither counted nor compared, nor was anything made in it for later calls. A
step that is measured counts each operator of what it recomputes, which makes small
layers take twice as long; of such a step only what is rebuilt tensor by tensor teaches,
for that runs outside of all counting. This is how an action that was tried is timed
before a plan uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from mimose.measure.stopwatch import (
    UNTIMED,
    EventStopwatch,
    HostStopwatch,
    Stopwatch,
)
from mimose.types import EventSeconds, TimedEvent

_FIRST_STEPS = 64
"""All of these are timed: plans need the times early. After them, ..."""
_EVERY = 5
"""... on an accelerator, one step in so many, for an event takes microseconds.
Gradients are hardly ever accumulated over so many steps, so all kinds are timed."""
_LACKS = (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What events raise on a device that has none with times."""

_Watch: TypeAlias = HostStopwatch | EventStopwatch
Call: TypeAlias = tuple[int, int]
"""A unit's index, and which of its calls in the step."""


class StepTimes(NamedTuple):
    """What a step's stopwatches say."""

    events: Mapping[Call, TimedEvent]
    """Of the calls that teach."""
    extra_seconds: float | None
    """Of all calls; None where some of them were no ordinary ones."""


_NOTHING_TIMED = StepTimes({}, 0.0)


@dataclass(slots=True)
class Timing:
    """The stopwatches of one step.

    Args:
        device: The model's; None where nothing is timed.
    """

    device: torch.device | None = None
    _watches: dict[Call, tuple[str, _Watch]] = field(default_factory=dict)

    @property
    def is_off(self) -> bool:
        """Whether nothing is timed."""
        return self.device is None

    def stopwatch(self, unit: int, call: int, action: str) -> Stopwatch:
        """Return a call's stopwatch.

        Args:
            unit: The unit's index.
            call: Which of its calls.
            action: Under which it runs.
        """
        if self.device is None:
            return UNTIMED
        made: _Watch
        made = HostStopwatch() if _is_host(self.device) else EventStopwatch(self.device)
        self._watches[unit, call] = action, made
        return made

    def read(self) -> StepTimes | None:
        """Return what all say; None where some of it is not known, or not yet."""
        if self.device is None:
            return None
        if not self._watches:
            return _NOTHING_TIMED
        events: dict[Call, TimedEvent] = {}
        total, is_ordinary = 0.0, True
        for call, (action, watch) in self._watches.items():
            read = watch.read()
            if read is None:
                return None
            total += read[0]
            is_ordinary = is_ordinary and not watch.is_spoilt
            if not watch.is_spoilt and read[0] > 0.0:
                events[call] = TimedEvent(action, EventSeconds(*read))
        return StepTimes(events, total if is_ordinary else None)


class Clock:
    """Hands out the stopwatches of steps.

    Args:
        device: The model's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if _has_times(device) else None
        self._every = 1 if _is_host(device) else _EVERY

    def timing(self, step: int) -> Timing:
        """Return a step's stopwatches; nothing is timed in steps that are not due.

        Args:
            step: Its number.
        """
        is_due = step < _FIRST_STEPS or step % self._every == 0
        return Timing(self._device if is_due else None)


def _is_host(device: torch.device) -> bool:
    return device.type in ("cpu", "meta")


def _has_times(device: torch.device) -> bool:
    """Whether times can be had at all: tried out, not believed."""
    if _is_host(device):
        return True
    try:
        watch = EventStopwatch(device)
        watch.stop(watch.start())
    except _LACKS:
        return False
    return True
