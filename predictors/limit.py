"""The budget that plans are made for, after memory has run out below the one given."""

from __future__ import annotations

_BELOW = 0.98
"""Of what was held when memory ran out, this much is asked for from then on."""
_QUIET_STEPS = 256
"""Steps without another failure before the limit rises; twice as many each time."""
_RISE = 1.0 / 256.0
"""Share of the budget by which it then rises a step."""


class LearnedLimit:
    """Falls below what was held when memory ran out, and rises again slowly.

    What a device has is not what a user thinks it has: another process may hold some of
    it, libraries allocate outside of the allocator, a wall may stand somewhere. An
    out-of-memory shows where. Increase is additive and decrease multiplicative, as for
    congestion windows, and each failure doubles the time before it rises again.

    Args:
        budget_bytes: The most it can be.
    """

    def __init__(self, budget_bytes: float) -> None:
        self._budget_bytes = budget_bytes
        self.bytes = budget_bytes
        """The most bytes to plan for."""
        self._quiet_steps = 0
        self._needed_steps = _QUIET_STEPS // 2

    @property
    def is_lowered(self) -> bool:
        """Whether it is below the budget."""
        return self.bytes < self._budget_bytes

    def ran_out(self, held_bytes: float) -> None:
        """Take note of an allocation that failed.

        Args:
            held_bytes: The most that was held before it did.
        """
        self.bytes = min(self.bytes, _BELOW * held_bytes)
        self._quiet_steps = 0
        self._needed_steps *= 2

    def step(self) -> None:
        """Take note of a step in which memory did not run out."""
        if self.bytes == self._budget_bytes:
            return
        self._quiet_steps += 1
        if self._quiet_steps > self._needed_steps:
            rise = _RISE * self._budget_bytes
            self.bytes = min(self._budget_bytes, self.bytes + rise)
