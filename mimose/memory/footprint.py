"""What the process holds of its device, against the budget.

Note: [Level and footprint]
Plans are made for a *level*: the bytes that a step's tensors hold, which a model of
memory can predict to the byte. The budget is about the *footprint*: what the process
takes from the device. On a CPU both are the resident set. On an accelerator the level
is requested bytes and the footprint reserved bytes: the allocator's segments, whose
free parts no other process gets. A budget on what tensors hold was kept once while the
process ran out of memory: 1,181 MiB allocated, 1,376 reserved.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mimose.memory.meters import Meter
from mimose.predictors import LearnedLimit
from mimose.records import Peaks

_log = logging.getLogger(__name__)

_NEAR_BYTES = 2**20
"""So close to the limit a peak is read as exactly as it can be."""


class Footprint:
    """The level is the footprint: a process's resident set, or a user's meter.

    Args:
        meter: Reads the level.
        budget_bytes: The budget.

    Attributes:
        limit: The budget, lowered where memory ran out below it.
        peak_bytes: The highest footprint seen.
    """

    def __init__(self, meter: Meter, budget_bytes: int) -> None:
        self._meter = meter
        self.limit = LearnedLimit(float(budget_bytes))
        meter.reset_peak()
        self.peak_bytes = meter.live_bytes()
        self.is_closed = False
        """Whether the session has ended; what is held then is none of its doing."""

    def close(self) -> None:
        """Take note that the session has ended; what is held then is not its doing."""
        self.is_closed = True

    def least_bytes(self) -> int:
        """Return what is held now and no plan can do without."""
        return self._meter.settled_bytes(0)

    def fold(self) -> Peaks:
        """Read the peaks since the last reset into the session's."""
        peak = self._meter.rough_peak_bytes()
        if peak + _NEAR_BYTES > self.limit.bytes:
            peak = self._meter.peak_bytes()
        self.peak_bytes = max(self.peak_bytes, peak)
        return Peaks(peak)

    def note_level(self, level_bytes: int) -> None:
        """Take in the highest level of a step, from readings of its own.

        Args:
            level_bytes: The level.
        """
        self.peak_bytes = max(self.peak_bytes, level_bytes)

    def begin(self, slack_bytes: float) -> tuple[int, Peaks]:
        """Return the level that a step starts from, and the peaks before it.

        Args:
            slack_bytes: Freed memory that may be part of the level.
        """
        peaks = self.fold()
        return self._meter.settled_bytes(slack_bytes), peaks

    def highest_bytes(self, optimizer_peak_bytes: int) -> int:
        """Return the highest footprint of the session.

        Args:
            optimizer_peak_bytes: The highest level read around optimizer steps.
        """
        return max(self.peak_bytes, optimizer_peak_bytes)

    def level_budget(self, start_bytes: float) -> float:
        """Return the highest level that keeps the footprint within the limit.

        Args:
            start_bytes: The level that the step starts from.
        """
        del start_bytes
        return self.limit.bytes

    def reserved_ratio(self, start_bytes: float) -> float:
        """Return the bytes that `level_budget` counts for each byte of growth.

        Args:
            start_bytes: The level that the step starts from.
        """
        del start_bytes
        return 1.0

    def use_loss(self, *, is_by_rows: bool) -> bool:
        """Count the bytes of steps with such a loss from now on.

        Args:
            is_by_rows: Whether it goes by rows, in blocks that leave smaller gaps.

        Returns:
            Whether they are counted otherwise than before.
        """
        del is_by_rows
        return False

    def raise_wall(self) -> None:
        """Let whoever hands out memory keep the limit, where that can be asked for."""

    def drop_wall(self) -> None:
        """Let it hold no more."""

    def beyond_wall(self, asked_bytes: int) -> int:
        """Return what would be taken now, had the wall not refused it; 0 if it did not.

        Args:
            asked_bytes: Of the allocation that has failed.
        """
        del asked_bytes
        return 0

    def forward_ended(self) -> None:
        """Take note that a step's forward has ended: what it keeps is held."""

    def observe(self, growth_bytes: int) -> None:
        """Take note of a step's growth of the level, as its backward has ended."""
        self.limit.step()

    def ran_out(self, asked_bytes: int = 0) -> None:
        """Take note that an allocation has failed, before anything is given back.

        Args:
            asked_bytes: Of that allocation; 0 if unknown.
        """
        del asked_bytes
        if self._meter.reads_peak:
            self.limit.ran_out(self._meter.peak_bytes())

    def told(self) -> dict[str, Any]:
        """Return the fields of a `Summary` that only some footprints know."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what steps have taught, ready for JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another footprint was taught.

        Args:
            state: What ``state_dict`` returned.
        """
