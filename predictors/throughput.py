"""Whether a method that saves memory raises the throughput: the rule of PAPAYA.

Source: Liu et al., "An Evaluation of Memory Optimization Methods for Training Neural
Networks" (PAPAYA, https://github.com/LiuXiaoxuanPKU/papaya). Memory limits the batch,
and the samples of a batch share the fixed time of a step. Bytes are a line in the
batch: activations grow with it; weights, gradients and optimizer state do not. A
working buffer of constant size is a floor below which the line does not matter. Time is
constant until the device is busy, and then a line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]

TOLERANCE, MEMORY_TOLERANCE = 0.10, 0.05
"""A fit of seconds, or of bytes, is refused if its mean relative error at left-out
points is larger. Bytes repeat, so a larger error means that the form is wrong."""
REACH = 2.0
"""How many times the largest measured batch a verdict may reach. PAPAYA's series,
fitted up to half of their largest batch, predict its bytes to 5% and its seconds to 8%;
fitted up to a third, to 10% and 14%. (Without those of DTR, whose form changes on the
way.)"""
_KNEE_POINTS = 4
"""Fewer points do not distinguish a knee from a line. With two points, none is left to
check a line."""
_CLEARLY = 2.0 / 3.0
"""A knee is used if its error at left-out points is below this share of the line's. Of
straight series with 4 to 19 points and 0.2 to 10% noise, at most 4% then get a knee."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One quantity as a function of the batch: ``slope * max(x, knee) + intercept``.

    A line has its knee at 0. Errors are relative; they are nan if the series was not
    fitted.
    """

    slope: float
    """Bytes or seconds for each sample; a fitted slope is never negative."""
    intercept: float
    """The value of the line at 0, in bytes or seconds."""
    knee: float = 0.0
    """Below this x the value is constant."""
    loo_error: float = math.nan
    """Mean absolute relative error at each point if it is left out of the fit."""
    lowest: float = 0.0
    """The smallest measured x."""
    highest: float = math.inf
    """The largest measured x; beyond it is extrapolation."""
    refused: str = ""
    """Why nothing may be predicted from the series; empty if it may."""

    @property
    def floor(self) -> float:
        """The value at 0, and up to the knee."""
        return self.slope * self.knee + self.intercept

    def predict(self, x: Any) -> Any:
        """Return the value at one x, or the (n,) values at (n,) x."""
        return self.slope * np.maximum(x, self.knee) + self.intercept

    def inverse(self, y: float) -> float:
        """Return the largest x whose value is at most `y`.

        It is infinite if the series is flat and at most `y`, and 0 if its floor is
        above `y`.
        """
        if y < self.floor:
            return 0.0
        return (y - self.intercept) / self.slope if self.slope > 0.0 else math.inf


def fit_series(
    x: ArrayLike,
    y: ArrayLike,
    *,
    intercept: float | None = None,
    tolerance: float = TOLERANCE,
) -> Series:
    """Fit bytes or seconds to batch sizes, by least squares of relative errors.

    Errors are relative, because the noise of times is proportional to them, and because
    a fit of the largest batches alone would miss the fixed time of a step. With four
    points or more a knee is tried too. It is used if its mean error at left-out points
    is below two thirds of the line's.

    Args:
        x: (n_points,) Positive batch sizes or lengths, at least two different ones.
        y: (n_points,) Positive bytes or seconds.
        intercept: If the line is negative at 0, it is fitted again through this value
            at 0, such as the fixed time of the plain model. None to leave it negative.
        tolerance: The series is refused if its mean relative error at left-out points
            is larger.

    Returns:
        The series; `Series.refused` says why it may not be used, if so.

    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    n_places = len(np.unique(x))
    fit: _Fitter = _best_line
    if n_places >= _KNEE_POINTS:
        of_line, of_knee = (_left_out(each, x, y) for each in (_best_line, _best_knee))
        fit = _best_knee if of_knee < _CLEARLY * of_line else _best_line
    found = fit(x, y)
    if intercept is not None and found.floor < 0.0:
        fit = partial(_best_line, intercept=intercept)
        found = fit(x, y)
    found = replace(
        found,
        knee=found.knee if found.knee > x.min() else 0.0,  # else a line in the range
        loo_error=_left_out(fit, x, y),
        lowest=float(x.min()),
        highest=float(x.max()),
    )
    return replace(found, refused=_why_refused(found, n_places, tolerance))


_Fitter = Callable[[Floats, Floats], Series]


def _best_line(x: Floats, y: Floats, intercept: float | None = None) -> Series:
    """Return the line of least relative squares with a slope of at least 0.

    Args:
        x: (n,) Batch sizes.
        y: (n,) Positive values.
        intercept: The fixed value at 0; None to fit it.
    """
    weights = 1.0 / (y * y)
    if intercept is not None:
        rise = float((weights * x) @ (y - intercept))
        slope = max(0.0, rise / float((weights * x) @ x))
        return Series(slope=slope, intercept=intercept)
    total = weights.sum()
    mean_x, mean_y = weights @ x / total, weights @ y / total
    away = x - mean_x
    spread = (weights * away) @ away
    # One batch size determines only the level.
    is_spread = spread > 1e-18 * (weights @ (x * x))
    rise = float((weights * away) @ (y - mean_y))
    slope = max(0.0, rise / float(spread)) if is_spread else 0.0
    return Series(slope=slope, intercept=float(mean_y - slope * mean_x))


def _best_knee(x: Floats, y: Floats) -> Series:
    """Return the knee of least relative squares with a slope of at least 0.

    The minimum is exact. Either the knee is at a measured batch size, and the rest is
    the fit of a line. Or it lies between two: then floor and line are fitted
    separately, and must meet there.
    """

    def squares(series: Series) -> float:
        errors = series.predict(x) / y - 1.0
        return float(errors @ errors)

    return min((_best_line(x, y), *_knees(x, y)), key=squares)


def _knees(x: Floats, y: Floats) -> Iterator[Series]:
    for low, high in itertools.pairwise(np.unique(x)):
        line = _best_line(np.maximum(x, low), y)
        yield replace(line, knee=float(low))
        floor = _best_line(x[x <= low] * 0.0, y[x <= low]).intercept
        line = _best_line(x[x >= high], y[x >= high])
        if line.slope > 0.0 and low <= line.inverse(floor) <= high:
            yield replace(line, knee=line.inverse(floor))


def _left_out(fit: _Fitter, x: Floats, y: Floats) -> float:
    """Return the mean relative error at left-out batches; nan for less than three."""
    places = np.unique(x)
    if len(places) < _KNEE_POINTS - 1:
        return math.nan
    errors = np.empty(len(x))
    for place in places:
        out = x == place
        errors[out] = np.abs(fit(x[~out], y[~out]).predict(x[out]) / y[out] - 1.0)
    return float(errors.mean())


def _why_refused(series: Series, n_places: int, tolerance: float) -> str:
    """Return why a series is refused; empty if it is not."""
    if n_places < _KNEE_POINTS - 1:
        return (
            f"{n_places} batch sizes are too few to check a line: measure at least "
            f"{_KNEE_POINTS}"
        )
    if series.loo_error <= tolerance:
        return ""
    what = "no line fits" if series.slope > 0.0 else "it falls as the batch grows"
    return (
        f"{what}: the mean error at left-out points is {series.loo_error:.0%}, more "
        f"than {tolerance:.0%} (over {n_places} batch sizes, {series.lowest:g} to "
        f"{series.highest:g})"
    )
