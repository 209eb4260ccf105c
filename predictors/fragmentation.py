"""How much more an allocator takes from its device than is asked of it."""

from __future__ import annotations

from collections import deque
from math import exp, sqrt
from statistics import median
from typing import Any

_NEAR = 0.5
"""Steps of at least this share of the largest growth tell of large steps."""
_FADE = 4.0
"""Observations after which a third is left of the prior."""


class FragmentationRatio:
    """A windowed upper envelope of reserved growth over requested growth.

    A caching allocator takes segments from the device and hands out parts of them.
    What lies between is fragmentation, in parts of segments that nobody asks for. Its
    share falls with the size of a step, so only steps of at least half of the largest
    growth in the window count. The ratio is the largest of these, and above it the
    distance from their median to it divided by the root of their number: of few
    observations the next may well be higher. Until there are some, a prior holds.

    Args:
        prior: The ratio before any observation; at least as high as `floor`.
        floor: The least ratio.
        window: How many observations are remembered.

    Raises:
        ValueError: A parameter is out of its range.
    """

    def __init__(
        self, prior: float = 1.5, floor: float = 1.0, window: int = 256
    ) -> None:
        if not 0.0 <= floor <= prior or window < 1:
            msg = (
                f"0 <= floor <= prior and window >= 1 are needed, got {floor!r}, "
                f"{prior!r} and {window!r}."
            )
            raise ValueError(msg)
        self.prior = prior
        self.floor = floor
        self._seen: deque[tuple[float, float]] = deque(maxlen=window)
        self._value = prior

    def __repr__(self) -> str:
        return f"{type(self).__name__}(value={self.value:.3f}, n={len(self._seen)})"

    @property
    def value(self) -> float:
        """Reserved bytes to count for each requested byte of growth."""
        return self._value

    def observe(self, requested_bytes: float, reserved_bytes: float) -> None:
        """Take in a step.

        Args:
            requested_bytes: By how much its requested bytes grew; none tells nothing.
            reserved_bytes: By how much the reserved bytes grew.
        """
        if requested_bytes <= 0.0:
            return
        self._seen.append((requested_bytes, max(0.0, reserved_bytes) / requested_bytes))
        self._value = self._envelope()

    def _envelope(self) -> float:
        largest = max(size for size, _ in self._seen)
        ratios = [ratio for size, ratio in self._seen if size >= _NEAR * largest]
        highest = max(ratios)
        spread = (highest - median(ratios)) / sqrt(len(ratios))
        doubt = (self.prior - self.floor) * exp(-len(ratios) / _FADE)
        return max(self.floor + doubt, highest + spread)

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen, ready for JSON."""
        return {"seen": [list(pair) for pair in self._seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another one has seen; the parameters stay.

        Args:
            state: What ``state_dict`` returned.
        """
        pairs = ((float(size), float(ratio)) for size, ratio in state["seen"])
        self._seen = deque(pairs, maxlen=self._seen.maxlen)
        self._value = self._envelope() if self._seen else self.prior
