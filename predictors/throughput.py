"""Whether a method that saves memory raises the throughput, by two lines each.

The rule of Liu et al., "An Evaluation of Memory Optimization Methods for Training
Neural Networks": memory sets the largest batch, the batch shares out the fixed time of
a step. Bytes are a line as far as activations grow with the batch, above weights,
gradients and optimizer state; a working buffer that does not depend on the batch is a
floor. Time is flat until the device is full, and then a line. `compare` puts both
methods' whole models side by side; `p_score` and `p_point` say the same in one
inequality where the methods share what does not grow.
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
"""Mean errors at points left out, as shares, above which seconds and bytes are refused:
bytes repeat, so what is off is the form."""
REACH = 2.0
"""How many times beyond the batches measured a verdict may be. PAPAYA's series, fitted
up to a half of their largest batch, tell bytes at that batch to 5% and seconds to 8%;
up to a third, to 10 and 14%. (Not those of DTR, whose law changes on the way.)"""
_KNEE_POINTS = 4
"""Fewer points do not tell a knee from a line; with one less there are none to check
a line with, either."""
_CLEARLY = 2.0 / 3.0
"""A knee is kept where it is off by this share of what a line is off by, at points left
out. Of straight series with 4 to 19 points and 0.2 to 10% noise, up to 4% then get
one."""
_ROUNDING = 1e-9
_ROUNDS = 5
"""Of weighing steps by how far off they were."""


# ------------------------------------------------------------------ series


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
    loo_error: float = math.nan
    """Mean absolute relative error at each point when fitted without it."""
    lowest: float = 0.0
    """The smallest x measured."""
    highest: float = math.inf
    """The largest x measured: beyond it is extrapolation."""
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
            return _at(self, x)
        return self.slope * max(x, self.knee) + self.intercept

    def inverse(self, y: float) -> float:
        """Return the largest x whose value is at most `y`.

        Infinite where the series is flat and not above `y`; 0 where its floor is above
        it, so that no x fits.
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
    fit: _Fitter = _best_knee if form == KNEE else _best_line
    if form is None and len(np.unique(x)) >= _KNEE_POINTS:
        of_line, of_knee = (_left_out(each, x, y) for each in (_best_line, _best_knee))
        fit = _best_knee if of_knee < _CLEARLY * of_line else _best_line
    found = fit(x, y)
    if intercept is not None and found.floor < 0.0:
        fit = partial(_best_line, intercept=intercept)
        found = fit(x, y)
    if form is None and found.knee <= x.min():  # a line as far as anybody has looked
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
    """Fit seconds as a sum of non-negative rates, each times some work.

    By least squares of relative errors. What is off by more than three times the median
    error counts for less: a step may have waited for something that is no work.

    Args:
        work: (n_steps, n_rates), such as a one, FLOPs and bytes; up to some six rates.
        seconds: (n_steps,), positive.
        guess: (n_rates,) whose product with the rates, a share of a step, is near 0.

    Returns:
        (n_rates,) rates.
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
    """Return the least squares of all columns whose coefficients have no minus.

    There are four. SciPy's would be imported for them by each session that is asked
    for its report.
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
    """Return the coefficient of determination of (n,) predictions.

    Returns:
        1 for a perfect prediction, 0 for one as good as the mean, negative below; where
        all measured are equal, 1 or minus infinity.
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
            msg = f"{name} is {given.tolist()}: every value has to be positive, finite"
            raise ValueError(msg)
    n_places = len(np.unique(places))
    if n_places < 2:
        msg = f"x is {places.tolist()}: a line needs two different batch sizes"
        raise ValueError(msg)
    if form not in (None, LINE, KNEE):
        msg = f"form is {form!r}: give {LINE!r}, {KNEE!r} or None"
        raise ValueError(msg)
    if form == KNEE and n_places < _KNEE_POINTS:
        msg = f"a knee needs {_KNEE_POINTS} batch sizes, not {n_places}"
        raise ValueError(msg)
    return places, values


def _at(series: Series, x: Floats) -> Floats:
    values: Floats = series.slope * np.maximum(x, series.knee) + series.intercept
    return values


def _best_line(x: Floats, y: Floats, intercept: float | None = None) -> Series:
    """Return the line of least relative squares that does not fall.

    Args:
        x: (n,) places.
        y: (n,) positive values.
        intercept: What it is at 0; None where that is free.
    """
    weights = 1.0 / (y * y)
    if intercept is not None:
        rise = float((weights * x) @ (y - intercept))
        return Series.line(max(0.0, rise / float((weights * x) @ x)), intercept)
    total = weights.sum()
    mean_x, mean_y = weights @ x / total, weights @ y / total
    away = x - mean_x
    spread = (weights * away) @ away
    # Of one place only the level is known.
    is_spread = spread > 1e-18 * (weights @ (x * x))
    rise = float((weights * away) @ (y - mean_y))
    slope = max(0.0, rise / float(spread)) if is_spread else 0.0
    return Series.line(slope, float(mean_y - slope * mean_x))


def _best_knee(x: Floats, y: Floats) -> Series:
    """Return the knee of least relative squares that does not fall.

    The least is found exactly: either the knee is at a measured place, where what is
    left to fit is a line, or it lies between two, where the floor and the line are
    fitted apart and have to meet there.
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
    """Return the mean relative error at batches left out; nan of fewer than three."""
    places = np.unique(x)
    if len(places) < _KNEE_POINTS - 1:
        return math.nan
    errors = np.empty(len(x))
    for place in places:
        out = x == place
        errors[out] = np.abs(_at(fit(x[~out], y[~out]), x[out]) / y[out] - 1.0)
    return float(errors.mean())


def _why_refused(series: Series, n_places: int, tolerance: float) -> str:
    """Return why a series is refused; empty where it is not."""
    if n_places < _KNEE_POINTS - 1:
        return (
            f"{n_places} batch sizes leave none to check a line with: measure "
            f"{_KNEE_POINTS} or more"
        )
    if series.loo_error <= tolerance:
        return ""
    what = "no line explains it" if series.slope > 0.0 else "it falls while x grows"
    return (
        f"{what}: points left out are missed by {series.loo_error:.0%} on average, "
        f"more than {tolerance:.0%} (R² {series.r2:.2f} over {n_places} batch "
        f"sizes, {series.lowest:g} to {series.highest:g})"
    )


# ------------------------------------------------------------------ methods


class Best(NamedTuple):
    """The most throughput that a memory allows."""

    batch: float
    """Samples a step; 0 where none fits, infinite where memory does not grow."""
    samples_per_second: float


@dataclass(frozen=True, slots=True)
class MethodModel:
    """What a step takes by its batch, under one method. Batches need not be whole."""

    name: str
    memory: Series
    """Bytes at the peak."""
    seconds: Series
    """Of a whole step."""

    @property
    def refused(self) -> str:
        """Why nothing may be said from it, in words; empty where something may."""
        parts = (("memory", self.memory), ("time", self.seconds))
        said = (f"{self.name}'s {what}: {s.refused}" for what, s in parts if s.refused)
        return "; ".join(said)

    def largest_batch(self, memory_bytes: float) -> float:
        """Return the largest batch that fits.

        Args:
            memory_bytes: What there is; leave room for fragmentation (the source takes
                0.8 of the device).

        Returns:
            Samples; 0 where less than one fits, infinite where memory does not grow.
        """
        batch = self.memory.inverse(memory_bytes)
        return batch if batch >= 1.0 - _ROUNDING else 0.0

    def best_throughput(self, memory_bytes: float) -> Best:
        """Return the batch with the most samples a second, of those that fit.

        That is the largest as long as a step has fixed time. Without (a line that is
        negative at 0, a knee beyond which a sample costs more than at it) it is the
        smallest beyond the knee, or the smallest measured: between those throughput
        only rises or only falls.
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
        """Return samples a second; 0 where the model's seconds are not positive."""
        if math.isinf(batch):
            slope = self.seconds.slope
            return 1.0 / slope if slope > 0.0 else math.inf
        seconds = self.seconds.predict(batch)
        return batch / seconds if seconds > 0.0 else 0.0


def p_score(plain: MethodModel, method: MethodModel) -> float:
    """Return the bytes a sample saves for each second a sample costs more.

    `method` raises the best throughput exactly if this is above `p_point`, as far as
    both take as much where there is no sample: the same bytes and the same seconds.

    Returns:
        Infinite where memory is saved at no cost; nan where a sample takes more memory
        and less time, for which the rule was not made.

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
    """Return the free bytes for each second of fixed time in a step.

    Infinite where a step has no fixed time: then nothing is won by larger batches.

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
                f"{model.name} has a knee, and the p-score is of lines: fit it with "
                "form='line', or use compare, which needs none"
            )
            raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a method does to the best throughput within a memory."""

    plain_batch: float
    """The largest batch that fits, in samples; 0 where none does."""
    method_batch: float
    plain_best: Best
    method_best: Best
    refused: str
    """Why there is no verdict, in words; empty where there is one."""

    @property
    def ratio(self) -> float:
        """The method's best throughput ÷ plain's.

        Infinite where only the method fits, nan where neither does.
        """
        mine = self.method_best.samples_per_second
        theirs = self.plain_best.samples_per_second
        if theirs > 0.0:
            return mine / theirs
        return math.inf if mine > 0.0 else math.nan

    @property
    def pays(self) -> bool | None:
        """Whether the method is faster at its best; None where there is no verdict."""
        return None if self.refused else self.ratio > 1.0


def compare(plain: MethodModel, method: MethodModel, memory_bytes: float) -> Verdict:
    """Say whether a method raises the best throughput within a memory.

    Args:
        plain: Without it.
        method: With it.
        memory_bytes: What there is for both.
    """
    bests = [model.best_throughput(memory_bytes) for model in (plain, method)]
    beyond = max(_beyond(plain, bests[0]), _beyond(method, bests[1]))
    reasons = [model.refused for model in (plain, method) if model.refused]
    if beyond > REACH:
        reasons.append(
            f"its batches ({bests[0].batch:g} plain, {bests[1].batch:g} with "
            f"{method.name}) lie {beyond:.1f} times beyond what was "
            f"measured, more than {REACH:g}: measure nearer to them"
        )
    if bests[0].batch == bests[1].batch == 0.0:
        reasons.append(f"not one sample fits into {memory_bytes:.0f} bytes")
    return Verdict(
        plain_batch=plain.largest_batch(memory_bytes),
        method_batch=method.largest_batch(memory_bytes),
        plain_best=bests[0],
        method_best=bests[1],
        refused="; ".join(reasons),
    )


def _beyond(model: MethodModel, best: Best) -> float:
    """Return how many times a batch is outside of what was measured; 1 inside."""
    if best.batch == 0.0:
        return 1.0
    least = max(model.memory.lowest, model.seconds.lowest)
    most = min(model.memory.highest, model.seconds.highest)
    above = 1.0 if math.isinf(most) else best.batch / most
    return max(1.0, above, least / best.batch)
