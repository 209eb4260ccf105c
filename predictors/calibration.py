"""Raising predictions that come out too low as a rule."""

from __future__ import annotations

from math import isfinite as _isfinite
from typing import Any

from ._window import SortedWindow

_LEAST = 8
"""Observations before anything is raised."""


class Calibration:
    """A factor that lets most recent growths lie at or below their prediction.

    A step's peak is the highest of many segments, each of them predicted with an
    error; the highest of several near-equal ones lies above every single prediction
    more often than not. What that comes to depends on the model, and is learned: the
    factor is one plus the quantile of ``observed / predicted - 1`` over the last
    ``window`` observations (as in split conformal prediction), never below 1 and
    never above ``1 + most``. It corrects the prediction; a `Margin` comes on top.

    Args:
        quantile: Share of observations to lie at or below the corrected prediction.
        window: How many observations are remembered.
        most: The most that is added, as a fraction.

    Raises:
        ValueError: If a parameter is out of its range.
    """

    def __init__(
        self, quantile: float = 0.8, window: int = 64, most: float = 0.03
    ) -> None:
        if not 0.0 < quantile < 1.0 or window < _LEAST or most < 0.0:
            msg = (
                f"0 < quantile < 1, window >= {_LEAST} and most >= 0 are needed, got "
                f"{quantile!r}, {window!r} and {most!r}."
            )
            raise ValueError(msg)
        self.quantile = quantile
        self.window = window
        self.most = most
        self.factor = 1.0
        """By what a prediction is to be multiplied."""
        self._residuals = SortedWindow(window)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(factor={self.factor:.4f}, n={len(self._residuals)})"
        )

    def observe(self, predicted_bytes: float, observed_bytes: float) -> None:
        """Take note of how a prediction came out.

        Numbers that are not finite, and predictions of no growth, are passed over.

        Args:
            predicted_bytes: The growth predicted, before it was multiplied.
            observed_bytes: The growth observed.
        """
        if not (predicted_bytes > 0.0 and _isfinite(predicted_bytes)):
            return
        if not _isfinite(observed_bytes):
            return
        self._residuals.append(observed_bytes / predicted_bytes - 1.0)
        self._refresh()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers and lists, ready for JSON."""
        return {"residuals": self._residuals.values()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of another calibration; the parameters stay.

        Args:
            state: What ``state_dict`` returned.
        """
        self._residuals = SortedWindow(self.window, state["residuals"])
        self._refresh()

    def _refresh(self) -> None:
        count = len(self._residuals)
        if count < _LEAST:
            self.factor = 1.0
            return
        usual = self._residuals.exceeded_by_at_most(self.quantile, count)
        self.factor = 1.0 + min(max(0.0, usual), self.most)
