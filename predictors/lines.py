"""Bytes or seconds of a step by its batch size: a line, or a floor and then a line.

Memory is a line as far as activations grow with the batch, above weights, gradients and
optimizer state; a working buffer that does not depend on the batch is a floor. Time is
flat until the device is full, and then a line. Both are the models of Liu et al., "An
Evaluation of Memory Optimization Methods for Training Neural Networks".
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, overload

import numpy as np

from ._hinges import Hinge, best_knee, best_line, relative_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]
    Fit = Callable[[Floats, Floats], Hinge]

LINE = "line"
"""The form ``slope * x + intercept``."""
KNEE = "knee"
"""The form ``slope * max(x, knee) + intercept``."""
_KNEE_POINTS = 4
"""Fewer points do not tell a knee from a line."""
_CHECKED_POINTS = 3
"""Fewer points leave none to check a line with."""
_CLEARLY = 2.0 / 3.0
"""A knee is kept where it is off by this share of what a line is off by, at points left
out. Of straight series with 4 to 19 points and 0.2 to 10% noise, up to 4% then get
one."""
TOLERANCE = 0.10
"""Mean error at points left out, as a share, above which a series is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One quantity by batch size (or length): ``slope * max(x, knee) + intercept``.

    A line has its knee at 0. Errors are shares of the values; those of a series that
    was not fitted are not known (nan).
    """

    form: str
    """``"line"`` or ``"knee"``."""
    slope: float
    """Bytes or seconds a sample; never negative where fitted."""
    intercept: float
    """Bytes or seconds at 0, as the line beyond the knee has them."""
    knee: float = 0.0
    """Below it the value does not depend on x."""
    r2: float = math.nan
    """Coefficient of determination at the points fitted."""
    mape: float = math.nan
    """Mean absolute relative error at the points fitted."""
    loo_error: float = math.nan
    """Mean absolute relative error at each point when fitted without it."""
    lowest: float = 0.0
    """The smallest x measured."""
    highest: float = math.inf
    """The largest x measured: beyond it is extrapolation."""
    n_points: int = 0
    """Points fitted."""
    refused: str = ""
    """Why nothing may be predicted from it, in words; empty where it may be."""

    @classmethod
    def line(cls, slope: float, intercept: float) -> Series:
        """Return a line that is known."""
        return cls(form=LINE, slope=slope, intercept=intercept)

    @property
    def floor(self) -> float:
        """The value at 0, and up to the knee."""
        return self.slope * self.knee + self.intercept

    @overload
    def predict(self, x: float) -> float: ...

    @overload
    def predict(self, x: Floats) -> Floats: ...

    def predict(self, x: float | Floats) -> float | Floats:
        """Return the value at one x, or at each of (n,)."""
        if isinstance(x, np.ndarray):
            return self._hinge.at(x)
        return self.slope * max(x, self.knee) + self.intercept

    def inverse(self, y: float) -> float:
        """Return the largest x whose value is at most `y`.

        Infinite where the series is flat and not above `y`; 0 where its floor is above
        it, so that no x fits.
        """
        if y < self.floor:
            return 0.0
        if self.slope <= 0.0:
            return math.inf
        return (y - self.intercept) / self.slope

    def refitted(
        self, x: Floats, y: Floats, *, intercept: float | None = None
    ) -> Series:
        """Return a fit of this form to other readings, (n_points,); no errors of it.

        Quick: for resampling. `intercept` is as for `fit_series`.
        """
        fit = best_knee if self.form == KNEE else best_line
        slope, constant, knee = _through_if_negative(fit, x, y, intercept)(x, y)
        return replace(self, slope=slope, intercept=constant, knee=knee)

    @property
    def _hinge(self) -> Hinge:
        return Hinge(self.slope, self.intercept, self.knee)


def fit_series(
    x: ArrayLike,
    y: ArrayLike,
    *,
    form: str | None = None,
    intercept: float | None = None,
    tolerance: float = TOLERANCE,
) -> Series:
    """Fit bytes or seconds by batch sizes, by least squares of relative errors.

    Relative, because times over a wide range of batches are noisy by a share of
    themselves, and a line for the largest alone would miss the fixed time of a step. A
    knee is tried from four points on, and kept where the mean error at points left out
    is below two thirds of a line's; errors at the points fitted always favour it.

    Args:
        x: (n_points,) positive batch sizes or lengths, two or more different ones.
        y: (n_points,) positive bytes or seconds.
        form: ``"line"`` or ``"knee"``; None for what the points say.
        intercept: Where a line comes out negative at 0, it is fitted again through this
            value there, such as the plain model's fixed time; None to leave it.
        tolerance: Mean relative error at points left out above which it is refused.

    Raises:
        ValueError: The points cannot be fitted by anything.
    """
    x, y = _checked(x, y, form)
    fit = _through_if_negative(_fit_of(x, y, form), x, y, intercept)
    hinge = fit(x, y)
    # A knee at or below the least x is a line as far as anybody has looked.
    is_line = fit is not best_knee or (form is None and hinge.knee <= x.min())
    loo_error = float(np.mean(_left_out(fit, x, y)))
    found = Series(
        form=LINE if is_line else KNEE,
        slope=hinge.slope,
        intercept=hinge.intercept,
        knee=0.0 if is_line else hinge.knee,
        r2=r2_score(y, hinge.at(x)),
        mape=float(np.mean(np.abs(relative_errors(hinge, x, y)))),
        loo_error=loo_error,
        lowest=float(x.min()),
        highest=float(x.max()),
        n_points=len(x),
    )
    return _refuse(found, x, y, tolerance)


def r2_score(measured: Floats, predicted: Floats) -> float:
    """Return the coefficient of determination of (n,) predictions.

    Args:
        measured: What is to be explained.
        predicted: What explains it.

    Returns:
        1 for a perfect prediction, 0 for one as good as the mean, negative below; where
        all measured are equal, 1 or minus infinity.
    """
    left = float(np.sum((measured - predicted) ** 2))
    total = float(np.sum((measured - measured.mean()) ** 2))
    if total > 0.0:
        return 1.0 - left / total
    is_met = left <= 1e-18 * float(measured @ measured)
    return 1.0 if is_met else -math.inf


def _checked(x: ArrayLike, y: ArrayLike, form: str | None) -> tuple[Floats, Floats]:
    places, values = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if places.ndim != 1 or places.shape != values.shape:
        msg = (
            f"x has the shape {places.shape} and y {values.shape}: give one value for "
            "each batch size, both (n_points,)"
        )
        raise ValueError(msg)
    for name, given in (("x", places), ("y", values)):
        if not (np.isfinite(given).all() and (given > 0.0).all()):
            msg = f"{name} is {given.tolist()}: every value has to be positive, finite"
            raise ValueError(msg)
    if len(np.unique(places)) < 2:
        msg = f"x is {places.tolist()}: a line needs two different batch sizes"
        raise ValueError(msg)
    if form not in (None, LINE, KNEE):
        msg = f"form is {form!r}: give {LINE!r}, {KNEE!r} or None"
        raise ValueError(msg)
    if form == KNEE and len(np.unique(places)) < _KNEE_POINTS:
        msg = f"a knee needs {_KNEE_POINTS} batch sizes, not {len(np.unique(places))}"
        raise ValueError(msg)
    return places, values


def _fit_of(x: Floats, y: Floats, form: str | None) -> Fit:
    if form is not None:
        return best_knee if form == KNEE else best_line
    if len(np.unique(x)) < _KNEE_POINTS:
        return best_line
    of_line, of_knee = (np.mean(_left_out(f, x, y)) for f in (best_line, best_knee))
    return best_knee if of_knee < _CLEARLY * of_line else best_line


def _through_if_negative(
    fit: Fit, x: Floats, y: Floats, intercept: float | None
) -> Fit:
    """Return the fit, or one through a value at 0 where it is negative there."""
    if intercept is None or fit(x, y).floor >= 0.0:
        return fit
    return lambda x, y: best_line(x, y, intercept)


def _left_out(fit: Fit, x: Floats, y: Floats) -> Floats:
    """Return (n_points,) absolute relative errors, each of a fit without its batch."""
    errors = np.full(len(x), math.nan)
    if len(np.unique(x)) < _CHECKED_POINTS:
        return errors
    for place in np.unique(x):
        out = x == place
        hinge = fit(x[~out], y[~out])
        errors[out] = np.abs(relative_errors(hinge, x[out], y[out]))
    return errors


def _refuse(series: Series, x: Floats, y: Floats, tolerance: float) -> Series:
    """Return the series with the reason why it is refused, if there is one."""
    n_places = len(np.unique(x))
    if n_places < _CHECKED_POINTS:
        reason = (
            f"{n_places} batch sizes leave none to check a line with: measure "
            f"{_KNEE_POINTS} or more"
        )
    elif series.loo_error <= tolerance:
        return series
    else:
        falls = series.slope <= 0.0
        what = "it falls while x grows" if falls else "no line explains it"
        reason = (
            f"{what}: points left out are missed by {series.loo_error:.0%} on average, "
            f"more than {tolerance:.0%} (R² {series.r2:.2f} over {n_places} batch "
            f"sizes, {series.lowest:g} to {series.highest:g})"
        )
    return replace(series, refused=reason)
