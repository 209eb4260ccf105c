"""Budgets that a measured step proves impossible."""

from __future__ import annotations

from mimose.types import Context, Sizes, StepInput

_MOST_STEPS = 256
"""Steps remembered; then the one that came first is forgotten."""


class LeastPeaks:
    """Remembers what steps with everything recomputed needed.

    A batch at least as large in every size needs at least as much. What held the
    memory may be held twice in the first steps (the optimizer's state still to come),
    so the lower of two bounds counts: that step's peak with the state made since, and
    today's start with that step's growth.
    """

    def __init__(self) -> None:
        self._least: dict[tuple[Context, Sizes], tuple[float, float]] = {}
        """Peaks without the optimizer's state, and growths."""

    def add(
        self,
        facts: StepInput,
        peak_bytes: float,
        growth_bytes: float,
        state_bytes: float,
    ) -> None:
        """Take in one step in which everything was recomputed.

        Args:
            facts: The step.
            peak_bytes: Reached in it.
            growth_bytes: The same over its start.
            state_bytes: Of the optimizer, at that time.
        """
        least = peak_bytes - state_bytes, growth_bytes
        self._least[facts.context, facts.sizes] = least
        if len(self._least) > _MOST_STEPS:
            del self._least[next(iter(self._least))]

    def bound(self, facts: StepInput, start_bytes: float, state_bytes: float) -> float:
        """Return a peak that no plan can go below, 0 if none is known.

        Args:
            facts: The step to come.
            start_bytes: Held now.
            state_bytes: Of the optimizer, now.
        """
        return max(
            (
                min(peak + state_bytes, start_bytes + growth)
                for (context, sizes), (peak, growth) in self._least.items()
                if context == facts.context
                and len(sizes) == len(facts.sizes)
                and all(s <= own for s, own in zip(sizes, facts.sizes, strict=True))
            ),
            default=0.0,
        )
