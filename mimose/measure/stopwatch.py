"""How long what an action does takes, timed where it is done.

Note: [Seconds where they are added]
Steps differ by more than an action adds, so differences of whole steps would say
nothing. What an action adds happens in a few places, though: around the forward, and in
backward where something runs again. These are timed, and nothing else; a kept call has
no stopwatch.

On a CPU it is the thread's own time: on a machine that does other things as well the
wall's was off by 25% in the median step, this by 7%. With several threads it is still
the wall's where the machine is free, for threads wait for each other busily.

On an accelerator the host is ahead of what it has asked for. There two events are put
on the stream around each place, and the time between them is read at a later step, if
both have happened by then: nobody waits.
"""

from __future__ import annotations

import time
from typing import Any, Protocol, TypeAlias

import torch

Moment: TypeAlias = Any
"""When something began: the host's time, or an event."""


class Stopwatch(Protocol):
    """Adds up what one call of a unit takes longer than if it were kept."""

    def start(self) -> Moment:
        """Return this moment."""
        ...

    def stop(self, began: Moment) -> None:
        """Count the time since a moment."""
        ...

    def leave_out(self, began: Moment) -> None:
        """Count the time since a moment off: the forward ran, as it would anyway."""
        ...

    def spoil(self) -> None:
        """Take note that this call is no ordinary one: its time teaches nothing."""
        ...


class Times:
    """What a stopwatch says.

    Attributes:
        is_spoilt: Whether the call was no ordinary one.
    """

    __slots__ = ("is_spoilt",)

    def __init__(self) -> None:
        self.is_spoilt = False

    def spoil(self) -> None:
        """Take note that this call is no ordinary one."""
        self.is_spoilt = True


class HostStopwatch(Times):
    """By the host's clock, where the host computes.

    Attributes:
        seconds: Added by the action, so far.
        forward_seconds: Of the forward itself.
    """

    __slots__ = ("forward_seconds", "seconds")

    def __init__(self) -> None:
        self.is_spoilt = False
        self.seconds = 0.0
        self.forward_seconds = 0.0

    start = staticmethod(time.thread_time)

    def stop(self, began: float) -> None:
        """Count the time since a moment."""
        self.seconds += time.thread_time() - began

    def leave_out(self, began: float) -> None:
        """Count the time since a moment off."""
        passed = time.thread_time() - began
        self.seconds -= passed
        self.forward_seconds += passed

    def read(self) -> tuple[float, float]:
        """Return the seconds added, and the forward's."""
        return self.seconds, self.forward_seconds


_Pair: TypeAlias = tuple[torch.Event, torch.Event]


class EventStopwatch(Times):
    """By events on the current stream of an accelerator.

    Args:
        device: The accelerator.
    """

    __slots__ = ("_added", "_device", "_forward")

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._added: list[_Pair] = []
        self._forward: list[_Pair] = []

    def start(self) -> torch.Event:
        """Return this moment of the stream."""
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def stop(self, began: torch.Event) -> None:
        """Count the time since a moment."""
        self._added.append((began, self.start()))

    def leave_out(self, began: torch.Event) -> None:
        """Count the time since a moment off."""
        self._forward.append((began, self.start()))

    def read(self) -> tuple[float, float] | None:
        """Return the seconds added, and the forward's; None before all has happened."""
        pairs = [*self._added, *self._forward]
        if not all(event.query() for pair in pairs for event in pair):
            return None
        forward = _seconds(self._forward)
        return _seconds(self._added) - forward, forward


def _seconds(pairs: list[_Pair]) -> float:
    return sum(began.elapsed_time(ended) for began, ended in pairs) / 1e3


class _Untimed:
    """Times nothing."""

    def start(self) -> None:
        """Do nothing."""

    def stop(self, began: Moment) -> None:
        """Do nothing."""

    def leave_out(self, began: Moment) -> None:
        """Do nothing."""

    def spoil(self) -> None:
        """Do nothing."""


UNTIMED: Stopwatch = _Untimed()
