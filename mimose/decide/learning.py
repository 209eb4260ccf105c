"""When steps under a plan are measured, so that predictions get better."""

from __future__ import annotations

_MOST_STEPS = 40
"""Steps of new shapes that are measured, under a plan or not. Fewer, ..."""
_SETTLED = 4
"""... if so many in a row came out as predicted, ..."""
_NEAR = 0.01
"""... to this share of what they grew by, ..."""
_TELLING = 0.25
"""... and that is at least this share of the largest growth."""
_OFF, _EXACT_OFF = 0.03, 0.005
"""A plan that recomputes is far off if it grew by so much more or less; where readings
are exact, there is a cause to find."""
_MORE_STEPS = 8
"""Steps of new shapes that are then measured."""


class Learning:
    """Goes on until predictions are near, and begins again where one was far off.

    How soon it begins again doubles each time, so that it ends where it does not help.

    Args:
        noise_bytes: By so much an error means nothing.
    """

    def __init__(self, noise_bytes: float) -> None:
        self._noise_bytes = noise_bytes
        self._until = _MOST_STEPS
        self._n_near = 0
        self._n_observed = 0
        self._next = 0

    def is_on(self, n_measured: int) -> bool:
        """Whether the next step of a new shape is worth measuring.

        Args:
            n_measured: Steps measured so far.
        """
        return n_measured < self._until and self._n_near < _SETTLED

    def observe(self, predicted: float, observed: float, scale: float) -> None:
        """Take note of how a step's prediction came out.

        Args:
            predicted: The growth, in bytes.
            observed: The same.
            scale: The largest growth.
        """
        self._n_observed += 1
        if self._n_near < _SETTLED and predicted >= _TELLING * scale:
            is_near = self._is_within(_NEAR, predicted, observed)
            self._n_near = self._n_near + 1 if is_near else 0

    def begin_again_if_off(
        self, predicted: float, observed: float, n_measured: int
    ) -> bool:
        """Go on measuring if a plan that recomputes was far off; return whether it was.

        Args:
            predicted: The growth, in bytes.
            observed: The same.
            n_measured: Steps measured so far.
        """
        off = _OFF if self._noise_bytes else _EXACT_OFF
        if self._n_observed < self._next or self._is_within(off, predicted, observed):
            return False
        self._next = 2 * self._n_observed + _MORE_STEPS
        self._n_near = 0
        self._until = max(self._until, n_measured + _MORE_STEPS)
        return True

    def _is_within(self, share: float, predicted: float, observed: float) -> bool:
        return abs(observed - predicted) <= share * observed + self._noise_bytes
