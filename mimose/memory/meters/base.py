"""What the session asks of a meter, and what a user may bring."""

from __future__ import annotations

import abc
import os
from typing import NamedTuple, Protocol

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Reading(NamedTuple):
    """One look at a meter."""

    live_bytes: int
    """Held now."""
    peak_bytes: int
    """The highest since the last reset."""
    file_bytes: int
    """Part of `live_bytes` that is mapped files, such as library code (CPU only)."""


class BasicMeter(Protocol):
    """The least a meter of one's own has to do."""

    def live_bytes(self) -> int:
        """Return the bytes held now."""
        ...

    def peak_bytes(self) -> int:
        """Return the most bytes held at any moment since the last reset."""
        ...

    def reset_peak(self) -> None:
        """Start a new peak at what is held now."""
        ...


class Meter(abc.ABC):
    """What the session needs to know of a device's memory.

    Three methods are a meter's own; the others have defaults.
    """

    noise_bytes = float(2**16)
    """Readings of the same thing differ by about this much."""
    reads_peak = True
    """False where the system cannot tell a peak: planning goes on by prediction."""

    @abc.abstractmethod
    def live_bytes(self) -> int:
        """Return the bytes held now: where a step's growth is counted from."""

    @abc.abstractmethod
    def peak_bytes(self) -> int:
        """Return the most bytes held at any moment since the last reset."""

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak at what is held now."""

    def settled_bytes(self, slack_bytes: float) -> int:
        """Return the bytes held now, without what was freed and kept by the allocator.

        Args:
            slack_bytes: How much of the latter may be left in.
        """
        del slack_bytes
        return self.live_bytes()

    def rough_peak_bytes(self) -> int:
        """Return the peak as fast as it can be told: a few pages may be missing."""
        return self.peak_bytes()

    def read(self) -> Reading:
        """Return everything at once, for the boundaries of a measured step."""
        return Reading(self.live_bytes(), self.peak_bytes(), 0)

    def clean_up(self) -> None:
        """Put readings right after somebody has used, and freed, much memory."""
        return

    def held_bytes(self) -> int:
        """Return what counts against a budget now, free blocks given back."""
        return self.settled_bytes(0)

    def release(self) -> None:
        """Give back what is held for the sake of readings, as a session ends."""
        return

    def total_bytes(self) -> int | None:
        """Return what the device has, for budgets given as a fraction."""
        return None


BASIC = ("live_bytes", "peak_bytes", "reset_peak")
"""What a meter of one's own has to have."""


class BorrowedMeter(Meter):
    """A user's meter, with the defaults for what it does not do itself."""

    def __init__(self, meter: BasicMeter) -> None:
        self._meter = meter
        for name in (
            "noise_bytes",
            "reads_peak",
            "settled_bytes",
            "rough_peak_bytes",
            "read",
            "held_bytes",
            "clean_up",
            "release",
            "total_bytes",
        ):
            own = getattr(meter, name, None)
            if own is not None:
                setattr(self, name, own)

    def live_bytes(self) -> int:
        """Return the bytes held now."""
        return self._meter.live_bytes()

    def peak_bytes(self) -> int:
        """Return the most bytes held since the last reset."""
        return self._meter.peak_bytes()

    def reset_peak(self) -> None:
        """Start a new peak."""
        self._meter.reset_peak()
