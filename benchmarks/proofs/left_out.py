"""The reserve with one of its parts left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mimose.decide.learning import Learning
from mimose.decide.least_peaks import LeastPeaks
from mimose.decide.reserve import Reserve
from mimose.predictors import GrowthBound


class _FixedBound(GrowthBound):
    """Learns nothing."""

    def observe(
        self,
        predicted_bytes: float,
        observed_bytes: float,
        *,
        is_near: bool = True,
        is_large: bool = True,
    ) -> None:
        """Pass over."""


class _Never(Learning):
    """Measures no planned step within the sizes measured."""

    def is_on(self, n_measured: int) -> bool:
        """Tell that it is over."""
        return False


class _NoPeaks(LeastPeaks):
    """Knows of no impossible budget."""

    def bound(
        self,
        facts: object,
        start_bytes: float,
        state_bytes: float,
    ) -> float:
        """Return nothing."""
        return 0.0


NOTHING = "nothing"
RESERVES: Mapping[str, Callable[[], Reserve]] = {
    "margin": lambda: Reserve(0.0, bound=_FixedBound(0.0, 0.0)),
    "margin beyond its floor": lambda: Reserve(0.0, bound=_FixedBound(0.01)),
    "correction": lambda: Reserve(0.0, bound=GrowthBound(most_correction=0.0)),
    "beyond": lambda: Reserve(0.0, bound=GrowthBound(beyond=0.0)),
    "stages": lambda: Reserve(0.0, stages=()),
    "learning under plans": lambda: Reserve(0.0, learning=_Never(0.0)),
    "least peaks": lambda: Reserve(0.0, least_peaks=_NoPeaks()),
}
PARTS = (NOTHING, *RESERVES)
"""All of them; `NOTHING` is the library as it is."""


def reserve_without(part: str) -> Reserve:
    """Make a reserve for exact readings, without one part."""
    return RESERVES.get(part, lambda: Reserve(0.0))()
