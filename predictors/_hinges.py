"""Least squares of a line that may begin with a floor, on relative errors."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


class Hinge(NamedTuple):
    """``slope * max(x, knee) + intercept``; a line is a hinge whose knee is 0."""

    slope: float
    intercept: float
    knee: float = 0.0

    @property
    def floor(self) -> float:
        """The value at 0."""
        return self.slope * self.knee + self.intercept

    def at(self, x: Floats) -> Floats:
        """Return the values at (n,) places."""
        values: Floats = self.slope * np.maximum(x, self.knee) + self.intercept
        return values


def relative_errors(hinge: Hinge, x: Floats, y: Floats) -> Floats:
    """Return (n,) errors as shares of the values."""
    errors: Floats = hinge.at(x) / y - 1.0
    return errors


def best_line(x: Floats, y: Floats, intercept: float | None = None) -> Hinge:
    """Return the line of least relative squares that does not fall.

    Args:
        x: (n,) places.
        y: (n,) positive values.
        intercept: What it is at 0; None where that is free.
    """
    weights = 1.0 / (y * y)
    if intercept is not None:
        rise = float((weights * x) @ (y - intercept))
        return Hinge(max(0.0, rise / float((weights * x) @ x)), intercept)
    total = weights.sum()
    mean_x, mean_y = weights @ x / total, weights @ y / total
    away = x - mean_x
    spread = (weights * away) @ away
    # Of one place only the level is known.
    is_spread = spread > 1e-18 * (weights @ (x * x))
    rise = float((weights * away) @ (y - mean_y))
    slope = max(0.0, rise / float(spread)) if is_spread else 0.0
    return Hinge(slope, float(mean_y - slope * mean_x))


def best_knee(x: Floats, y: Floats) -> Hinge:
    """Return the hinge of least relative squares that does not fall.

    The least is found exactly: either the knee is at a measured place, where what is
    left to fit is a line, or it lies between two, where the floor and the line are
    fitted apart and have to meet there.
    """
    found = best_line(x, y)
    least = _squares(found, x, y)
    for hinge in _hinges(x, y):
        squares = _squares(hinge, x, y)
        if squares < least:
            found, least = hinge, squares
    return found


def _squares(hinge: Hinge, x: Floats, y: Floats) -> float:
    errors = relative_errors(hinge, x, y)
    return float(errors @ errors)


def _hinges(x: Floats, y: Floats) -> Iterator[Hinge]:
    for low, high in itertools.pairwise(np.unique(x)):
        slope, intercept, _ = best_line(np.maximum(x, low), y)
        yield Hinge(slope, intercept, float(low))
        floor = best_line(x[x <= low] * 0.0, y[x <= low]).intercept
        slope, intercept, _ = best_line(x[x >= high], y[x >= high])
        if slope > 0.0 and low <= (floor - intercept) / slope <= high:
            yield Hinge(slope, intercept, float((floor - intercept) / slope))
