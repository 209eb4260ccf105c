"""Budgets that a measured step proves impossible."""

from __future__ import annotations

from dataclasses import dataclass

from mimose.types import Context, Sizes, StepInput

_MOST_STEPS = 256
"""Steps remembered; then the smallest is forgotten."""


@dataclass(frozen=True, slots=True)
class _Least:
    peak_bytes: float
    """Reached with everything recomputed."""
    growth_bytes: float
    """The same over the step's start, mapped files left out."""
    state_bytes: float
    """Of the optimizer, at that time."""


class LeastPeaks:
    """Remembers what steps with everything recomputed needed.

    A batch at least as large in every size needs at least as much. What held the
    memory may be held twice in the first steps (mapped files, the optimizer's state
    still to come), so the lower of two bounds counts: that step's peak with the state
    made since, and today's start with that step's growth.
    """

    def __init__(self) -> None:
        self._least: dict[tuple[Context, Sizes], _Least] = {}

    def add(
        self,
        facts: StepInput,
        peak_bytes: float,
        growth_bytes: float,
        state_bytes: float,
    ) -> None:
        """Take in one step in which everything was recomputed."""
        key = facts.context, facts.sizes
        self._least[key] = _Least(peak_bytes, growth_bytes, state_bytes)
        if len(self._least) > _MOST_STEPS:
            del self._least[min(self._least, key=self._growth)]

    def _growth(self, key: tuple[Context, Sizes]) -> float:
        return self._least[key].growth_bytes

    def bound(
        self,
        facts: StepInput,
        start_bytes: float,
        state_bytes: float,
    ) -> float:
        """Return a peak that no plan can go below, 0 if none is known.

        Args:
            facts: The step to come.
            start_bytes: Held now.
            state_bytes: Of the optimizer, now.
        """
        return max(
            (
                min(
                    least.peak_bytes + state_bytes - least.state_bytes,
                    start_bytes + least.growth_bytes,
                )
                for (context, sizes), least in self._least.items()
                if context == facts.context and _covers(facts.sizes, sizes)
            ),
            default=0.0,
        )


def _covers(sizes: Sizes, smaller: Sizes) -> bool:
    return len(sizes) == len(smaller) and all(
        s >= least for s, least in zip(sizes, smaller, strict=True)
    )
