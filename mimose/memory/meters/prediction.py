"""No reading at all: plans are made by prediction alone."""

from __future__ import annotations

import logging
import os

import torch

from mimose.memory.meters.base import PAGE_BYTES, Meter, Reading

_log = logging.getLogger(__name__)


class PredictionMeter(Meter):
    """For systems that cannot tell a peak: it reads what is held, if even that.

    Planning goes on by what the tracker counts inside the units; no step's peak is
    observed and no margin is learned.
    """

    noise_bytes = float(2**20)
    reads_peak = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def live_bytes(self) -> int:
        """Return what the device's own counter says, else the resident set, else 0."""
        if self.device.type == "mps":
            return int(torch.mps.current_allocated_memory())
        try:
            with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 (hot path)
                return int(file.read().split()[1]) * PAGE_BYTES
        except OSError:
            return 0

    def peak_bytes(self) -> int:
        """Return what is held now: no peak is known."""
        return self.live_bytes()

    def reset_peak(self) -> None:
        """Do nothing: there is no peak to reset."""

    def read(self) -> Reading:
        """Return the bytes held now as live and as peak."""
        live = self.live_bytes()
        return Reading(live, live, 0)

    def total_bytes(self) -> int | None:
        """Return the machine's memory where the system tells it; of mps its share."""
        if self.device.type == "mps":
            return int(torch.mps.recommended_max_memory())
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return None
