"""Whether a method that saves memory raises the throughput: the rule of PAPAYA.

Source: Liu et al., "An Evaluation of Memory Optimization Methods for Training Neural
Networks" (PAPAYA, https://github.com/LiuXiaoxuanPKU/papaya). Memory limits the batch,
and the samples of a batch share the fixed time of a step. Bytes are a line in the
batch: activations grow with it; weights, gradients and optimizer state do not. A
working buffer of constant size is a floor below which the line does not matter. Time is
constant until the device is busy, and then a line. `compare` compares the full models
of two methods; `p_score` and `p_point` are one inequality for methods with the same
constants.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]

LINE, KNEE = "line", "knee"
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
_ROUNDING = 1e-9
_ROUNDS = 5
"""Rounds of the fit, each with less weight on steps with large errors."""


# ------------------------------------------------------------------ series


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One quantity as a function of the batch: ``slope * max(x, knee) + intercept``.

    A line has its knee at 0. Errors are relative; they are nan if the series was not
    fitted.
    """

    form: str
    """``"line"`` or ``"knee"``."""
    slope: float
    """Bytes or seconds for each sample; a fitted slope is never negative."""
    intercept: float
    """The value of the line at 0, in bytes or seconds."""
    knee: float = 0.0
    """Below this x the value is constant."""
    r2: float = math.nan
    """Coefficient of determination at the fitted points."""
    loo_error: float = math.nan
    """Mean absolute relative error at each point if it is left out of the fit."""
    lowest: float = 0.0
    """The smallest measured x."""
    highest: float = math.inf
    """The largest measured x; beyond it is extrapolation."""
    refused: str = ""
    """Why nothing may be predicted from the series; empty if it may."""

    @classmethod
    def line(cls, slope: float, intercept: float) -> Series:
        """Return a line with known numbers."""
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
        """Return the value at one x, or the (n,) values at (n,) x."""
        if isinstance(x, np.ndarray):
            return _at(self, x)
        return self.slope * max(x, self.knee) + self.intercept

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
    form: str | None = None,
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
        form: ``"line"`` or ``"knee"``; None to choose by the points.
        intercept: If the line is negative at 0, it is fitted again through this value
            at 0, such as the fixed time of the plain model. None to leave it negative.
        tolerance: The series is refused if its mean relative error at left-out points
            is larger.

    Returns:
        The series; `Series.refused` says why it may not be used, if so.

    Raises:
        ValueError: The shapes differ, a value is not positive and finite, there are too
            few different x, or `form` is unknown.
    """
    x, y = _checked(x, y, form)
    fit: _Fitter = _best_knee if form == KNEE else _best_line
    if form is None and len(np.unique(x)) >= _KNEE_POINTS:
        of_line, of_knee = (_left_out(each, x, y) for each in (_best_line, _best_knee))
        fit = _best_knee if of_knee < _CLEARLY * of_line else _best_line
    found = fit(x, y)
    if intercept is not None and found.floor < 0.0:
        fit = partial(_best_line, intercept=intercept)
        found = fit(x, y)
    if form is None and found.knee <= x.min():  # a line in the measured range
        found = replace(found, form=LINE, knee=0.0)
    found = replace(
        found,
        r2=r2_score(y, _at(found, x)),
        loo_error=_left_out(fit, x, y),
        lowest=float(x.min()),
        highest=float(x.max()),
    )
    return replace(found, refused=_why_refused(found, len(np.unique(x)), tolerance))


def fit_rates(work: ArrayLike, seconds: ArrayLike, guess: ArrayLike) -> Floats:
    """Fit seconds as a sum of work, each times a non-negative rate.

    It minimizes the squares of relative errors. A step with more than three times the
    median error gets less weight: it may have waited for something else.

    Args:
        work: (n_steps, n_rates) Work of each step, such as 1, FLOPs and bytes. At most
            about six columns.
        seconds: (n_steps,) Positive seconds of each step.
        guess: (n_rates,) A weak prior: the product with the rates should be near 0.

    Returns:
        (n_rates,) The rates, in seconds for each 1 of work.
    """
    values = np.asarray(seconds, dtype=np.float64)[:, None]
    shares = np.vstack((np.asarray(work, dtype=np.float64) / values, guess))
    target = np.append(np.ones(len(values)), 0.0)
    scale = np.linalg.norm(shares, axis=0)
    shares = shares / np.where(scale == 0.0, 1.0, scale)
    weights = np.ones(len(target))
    rates = np.zeros(shares.shape[1])
    for _ in range(_ROUNDS):
        rates = _non_negative(shares * weights[:, None], target * weights)
        off = np.abs(shares @ rates - target)[:-1]
        weights[:-1] = 1.0 / np.sqrt(
            np.maximum(1.0, off / (3.0 * np.median(off) + 1e-4))
        )
    return rates / np.where(scale == 0.0, 1.0, scale)


def _non_negative(design: Floats, target: Floats) -> Floats:
    """Return the non-negative least squares, by trying all subsets of the columns.

    There are about four columns. SciPy's solver would have to be imported in every
    session that makes a report.
    """
    best, least = np.zeros(design.shape[1]), float(target @ target)
    for used in itertools.product((True, False), repeat=design.shape[1]):
        columns = np.flatnonzero(used)
        found = np.linalg.lstsq(design[:, columns], target, rcond=None)[0]
        rest = target - design[:, columns] @ found
        if (found >= 0.0).all() and rest @ rest < least:
            best, least = np.zeros(design.shape[1]), float(rest @ rest)
            best[columns] = found
        if all(used) and best.any():
            break
    return best


def r2_score(measured: Floats, predicted: Floats) -> float:
    """Return the coefficient of determination (R²) of (n,) predictions.

    Returns:
        1 for a perfect prediction, 0 for one as good as the mean, less for a worse one;
        if all measured values are equal, 1 or minus infinity.
    """
    left = float(np.sum((measured - predicted) ** 2))
    total = float(np.sum((measured - measured.mean()) ** 2))
    if total > 0.0:
        return 1.0 - left / total
    return 1.0 if left <= 1e-18 * float(measured @ measured) else -math.inf


_Fitter = Callable[[Floats, Floats], Series]


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
            msg = f"{name} is {given.tolist()}: each value must be positive and finite"
            raise ValueError(msg)
    n_places = len(np.unique(places))
    if n_places < 2:
        msg = f"x is {places.tolist()}: a line needs two different batch sizes"
        raise ValueError(msg)
    if form not in (None, LINE, KNEE):
        msg = f"form is {form!r}: give {LINE!r}, {KNEE!r} or None"
        raise ValueError(msg)
    if form == KNEE and n_places < _KNEE_POINTS:
        msg = f"a knee needs {_KNEE_POINTS} different batch sizes, got {n_places}"
        raise ValueError(msg)
    return places, values


def _at(series: Series, x: Floats) -> Floats:
    values: Floats = series.slope * np.maximum(x, series.knee) + series.intercept
    return values


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
        return Series.line(max(0.0, rise / float((weights * x) @ x)), intercept)
    total = weights.sum()
    mean_x, mean_y = weights @ x / total, weights @ y / total
    away = x - mean_x
    spread = (weights * away) @ away
    # One batch size determines only the level.
    is_spread = spread > 1e-18 * (weights @ (x * x))
    rise = float((weights * away) @ (y - mean_y))
    slope = max(0.0, rise / float(spread)) if is_spread else 0.0
    return Series.line(slope, float(mean_y - slope * mean_x))


def _best_knee(x: Floats, y: Floats) -> Series:
    """Return the knee of least relative squares with a slope of at least 0.

    The minimum is exact. Either the knee is at a measured batch size, and the rest is
    the fit of a line. Or it lies between two: then floor and line are fitted
    separately, and must meet there.
    """

    def squares(series: Series) -> float:
        errors = _at(series, x) / y - 1.0
        return float(errors @ errors)

    found = min((_best_line(x, y), *_knees(x, y)), key=squares)
    return replace(found, form=KNEE)


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
        errors[out] = np.abs(_at(fit(x[~out], y[~out]), x[out]) / y[out] - 1.0)
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
        f"than {tolerance:.0%} (R² {series.r2:.2f} over {n_places} batch sizes, "
        f"{series.lowest:g} to {series.highest:g})"
    )


# ------------------------------------------------------------------ methods


class Best(NamedTuple):
    """The best throughput in a given memory."""

    batch: float
    """Samples a step; 0 if none fits, infinite if memory does not grow with them."""
    samples_per_second: float


@dataclass(frozen=True, slots=True)
class MethodModel:
    """Memory and time of a step as functions of the batch, under one method.

    Source: the lines of PAPAYA (see `compare`). A batch need not be a whole number.
    """

    name: str
    """The name of the method."""
    memory: Series
    """The peak of a step in bytes."""
    seconds: Series
    """The time of a step in seconds."""

    @property
    def refused(self) -> str:
        """Why the model may not be used; empty if it may."""
        parts = (("memory", self.memory), ("time", self.seconds))
        found = (f"{self.name}'s {what}: {s.refused}" for what, s in parts if s.refused)
        return "; ".join(found)

    def largest_batch(self, memory_bytes: float) -> float:
        """Return the largest batch that fits, in samples.

        Args:
            memory_bytes: The memory. Leave some free for fragmentation (PAPAYA uses 0.8
                of the device).

        Returns:
            The batch; 0 if less than one sample fits, infinite if memory does not grow.
        """
        batch = self.memory.inverse(memory_bytes)
        return batch if batch >= 1.0 - _ROUNDING else 0.0

    def best_throughput(self, memory_bytes: float) -> Best:
        """Return the batch that fits and has the most samples a second.

        If a step has a fixed time, this is the largest batch that fits. If the line is
        negative at 0, it may be the batch at the knee or the smallest measured one:
        between these the throughput is monotonic.

        Args:
            memory_bytes: The memory, as for `largest_batch`.
        """
        largest = self.largest_batch(memory_bytes)
        if largest <= 0.0:
            return Best(0.0, 0.0)
        found = Best(largest, self._rate(largest))
        turn = max(1.0, self.seconds.knee, self.seconds.lowest)
        if self.seconds.intercept < 0.0 and turn < largest:
            found = max(found, Best(turn, self._rate(turn)), key=lambda best: best[1])
        return found

    def _rate(self, batch: float) -> float:
        """Return samples a second; 0 if the predicted seconds are not positive."""
        if math.isinf(batch):
            slope = self.seconds.slope
            return 1.0 / slope if slope > 0.0 else math.inf
        seconds = self.seconds.predict(batch)
        return batch / seconds if seconds > 0.0 else 0.0


def p_score(plain: MethodModel, method: MethodModel) -> float:
    """Return PAPAYA's p-score: the bytes saved for each second that the method costs.

    Both are for one sample. `method` raises the best throughput exactly if its p-score
    is above `p_point`, provided that both methods have the same constants: the same
    bytes and seconds without a sample.

    Args:
        plain: The model without the method.
        method: The model with the method.

    Returns:
        Bytes for each second; infinite if memory is saved without cost; nan if a sample
        takes more memory and less time, to which the rule does not apply.

    Raises:
        ValueError: A series is not a line.
    """
    _check_lines(plain, method)
    saved = plain.memory.slope - method.memory.slope
    paid = method.seconds.slope - plain.seconds.slope
    if paid > 0.0:
        return saved / paid
    if saved < 0.0:
        return -math.inf if paid == 0.0 else math.nan
    return 0.0 if saved == paid == 0.0 else math.inf


def p_point(plain: MethodModel, memory_bytes: float) -> float:
    """Return PAPAYA's p-point: the free bytes for each second of a step's fixed time.

    It is infinite if a step has no fixed time: then larger batches gain nothing.

    Args:
        plain: The model without a method.
        memory_bytes: The memory.

    Raises:
        ValueError: A series is not a line.
    """
    _check_lines(plain)
    fixed = plain.seconds.intercept
    return (memory_bytes - plain.memory.intercept) / fixed if fixed > 0.0 else math.inf


def _check_lines(*models: MethodModel) -> None:
    for model in models:
        if KNEE in (model.memory.form, model.seconds.form):
            msg = (
                f"{model.name} has a knee, and the p-score is defined for lines: fit "
                "it with form='line', or use compare, which takes both"
            )
            raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a method raises the best throughput in a given memory."""

    plain_batch: float
    """The largest batch that fits without the method, in samples; 0 if none does."""
    method_batch: float
    """The largest batch that fits with the method."""
    plain_best: Best
    """The best throughput without the method."""
    method_best: Best
    """The best throughput with the method."""
    refused: str
    """Why there is no verdict; empty if there is one."""

    @property
    def ratio(self) -> float:
        """The method's best throughput divided by the plain one.

        It is infinite if only the method fits, and nan if neither does.
        """
        mine = self.method_best.samples_per_second
        theirs = self.plain_best.samples_per_second
        if theirs > 0.0:
            return mine / theirs
        return math.inf if mine > 0.0 else math.nan

    @property
    def pays(self) -> bool | None:
        """Whether the method's best throughput is higher; None without a verdict."""
        return None if self.refused else self.ratio > 1.0


def compare(plain: MethodModel, method: MethodModel, memory_bytes: float) -> Verdict:
    """Return whether a method raises the best throughput in a given memory.

    Source: Liu et al., "An Evaluation of Memory Optimization Methods for Training
    Neural Networks" (PAPAYA). Unlike `p_score` it does not assume that both methods
    have the same constants.

    Args:
        plain: The model without the method.
        method: The model with the method.
        memory_bytes: The memory, the same for both.
    """
    bests = [model.best_throughput(memory_bytes) for model in (plain, method)]
    beyond = max(_beyond(plain, bests[0]), _beyond(method, bests[1]))
    reasons = [model.refused for model in (plain, method) if model.refused]
    if beyond > REACH:
        reasons.append(
            f"the best batches ({bests[0].batch:g} plain, {bests[1].batch:g} with "
            f"{method.name}) are {beyond:.1f} times the largest measured one, more "
            f"than {REACH:g}: measure larger batches"
        )
    if bests[0].batch == bests[1].batch == 0.0:
        reasons.append(f"not a single sample fits into {memory_bytes:.0f} bytes")
    return Verdict(
        plain_batch=plain.largest_batch(memory_bytes),
        method_batch=method.largest_batch(memory_bytes),
        plain_best=bests[0],
        method_best=bests[1],
        refused="; ".join(reasons),
    )


def _beyond(model: MethodModel, best: Best) -> float:
    """Return by which factor a batch is outside of the measured ones; 1 inside."""
    if best.batch == 0.0:
        return 1.0
    least = max(model.memory.lowest, model.seconds.lowest)
    most = min(model.memory.highest, model.seconds.highest)
    above = 1.0 if math.isinf(most) else best.batch / most
    return max(1.0, above, least / best.batch)
