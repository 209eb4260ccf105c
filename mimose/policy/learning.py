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


class Learning:
    """Goes on until predictions are near, or so many steps were measured.

    Args:
        noise_bytes: By so much an error means nothing.
    """

    def __init__(self, noise_bytes: float) -> None:
        self._noise_bytes = noise_bytes
        self._n_near = 0

    def is_on(self, n_measured: int) -> bool:
        """Whether the next step of a new shape is worth measuring.

        Args:
            n_measured: Steps measured so far.
        """
        return n_measured < _MOST_STEPS and self._n_near < _SETTLED

    def is_open(self, n_measured: int) -> bool:
        """Whether there are steps left to be measured.

        Args:
            n_measured: Steps measured so far.
        """
        return n_measured < _MOST_STEPS

    def observe(self, predicted: float, observed: float, scale: float) -> None:
        """Take note of how a step's prediction came out.

        Args:
            predicted: The growth, in bytes.
            observed: The same.
            scale: The largest growth.
        """
        if self._n_near < _SETTLED and predicted >= _TELLING * scale:
            most = _NEAR * observed + self._noise_bytes
            is_near = abs(observed - predicted) <= most
            self._n_near = self._n_near + 1 if is_near else 0
