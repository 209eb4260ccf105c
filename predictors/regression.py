"""Fits of bytes and FLOPs to sizes, and where a fit is trusted.

What a layer saves, and its FLOPs, are sums of a few products of its sizes, such as
``a*B*T + b*B*T**2``. So the default estimator adds monomials up to degree 3 one by one,
each time the one that explains most of the rest, until it explains the samples up to
rounding. A fit is exact if it needs one shape more than it has terms. A coefficient may
be negative: a loss leaves out the first token. A transient peak is the maximum of
several such sums, which no polynomial explains: at small sizes FSDP2's whole gradients
decide, at large ones activations. There the fit has the number of terms that predicts
left-out samples best, and is raised by its largest error. If only one size varies, and
the samples lie on a convex curve, as such a maximum does, the chord of two neighbours
is never too low between them: of near ones it is the prediction, of others the most.
Beyond the samples the last chord is the least.

The estimator behaves like those of scikit-learn, without their base classes: importing
them takes 150 MiB, and SciPy's non-negative least squares 50 MiB, which the training
process would keep.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement
from statistics import median
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
Sizes: TypeAlias = tuple[int, ...]

EXACT = 1e-9
"""The largest error of an exact fit, as a share of the largest value."""
EXACT_REACH, REACH = 4.0, 1.5
"""How many times the largest measured size an exact fit, and another fit, may predict.
The longest batch may come early, so an exact fit may reach far."""
_DEGREE, _POWER = 3, 2
"""The highest degree of a monomial, and the highest power of one size in it."""
_DEVIATIONS = 3.0
"""A sample counts as explained within this many standard deviations."""
_OF_NOISE, _OF_SCALE = 20.0, 0.02
"""An error is tolerated within this multiple of the noise, or this share of a step."""
_NEGLIGIBLE_ERROR = 1e-4
"""A quantity other than a peak whose error is below this share of a step may be
predicted at any size."""
_MANY_SHAPES, _PEAK_TOLERANCES = 8, 5.0
"""A peak fitted to this many shapes is trusted up to this multiple of the tolerance,
because the prediction is raised by the error."""
_BENT = 1e-3
"""How far a sample may lie above its neighbours' chord, as a share of the largest."""
_NEAR = 1.25
"""How much larger a near neighbour is, at most: of a square, its chord is then at most
1.3% too high."""
_FOLDS = 5
_SHARE = 0.95
"""The share of errors that count: a process's memory jumps for other reasons too."""


class Estimator(Protocol):
    """A regressor in the manner of scikit-learn. `attach(predictor=...)` takes one."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> Any:
        """Learn from (n_samples, n_features) sizes and (n_samples,) values."""

    def predict(self, X: ArrayLike) -> Any:
        """Return the (n_samples,) values at (n_samples, n_features) sizes."""


def check_estimator(predictor: object) -> None:
    """Make sure that a predictor is an estimator or None.

    Args:
        predictor: The argument of a user.

    Raises:
        ValueError: It has no methods ``fit`` and ``predict``, or it is a class.
    """
    is_one = hasattr(predictor, "fit") and hasattr(predictor, "predict")
    if predictor is not None and (isinstance(predictor, type) or not is_one):
        msg = (
            f"predictor {predictor!r} is not an estimator: give an object with the "
            "methods fit and predict, such as sklearn.tree.DecisionTreeRegressor(), or "
            "None"
        )
        raise ValueError(msg)


class LeastSquares:
    """Least squares on the few monomials that explain the samples: the default.

    Args:
        noise: The standard deviation of a value, in the unit of y; 0 for exact values.

    Attributes:
        monomials_: For each term the powers of the columns.
        coef_: (n_terms,) The coefficients, in the unit of y.
        loo_errors_: (n_samples,) The error at each sample if it is left out; infinite
            if the other samples do not determine the fit.
    """

    monomials_: tuple[tuple[int, ...], ...]
    coef_: Floats
    loo_errors_: Floats

    def __init__(self, *, noise: float = 0.0) -> None:
        self.noise = noise

    def fit(self, X: ArrayLike, y: ArrayLike) -> LeastSquares:
        """Choose the monomials, fit their coefficients, and return the estimator.

        Args:
            X: (n_samples, n_features) Sizes.
            y: (n_samples,) Values, such as bytes.

        Raises:
            ValueError: The shapes do not match, there is no sample, or a number is NaN
                or infinite.
        """
        sizes, values = np.asarray(X, np.float64), np.asarray(y, np.float64)
        monomials = _monomials(sizes.shape[1])
        design = _design(sizes, monomials)
        lengths = np.linalg.norm(design, axis=0)
        lengths[lengths == 0.0] = 1.0
        design /= lengths
        unit = float(np.abs(values).max()) or 1.0
        target = values / unit
        columns = _chosen(design, target, max(EXACT, _DEVIATIONS * self.noise / unit))
        solution, errors = _least_squares(design[:, columns], target)
        self.monomials_ = tuple(monomials[column] for column in columns)
        self.coef_ = unit * solution / lengths[columns]
        self.loo_errors_ = unit * errors
        self._terms = tuple(zip(self.monomials_, self.coef_.tolist(), strict=True))
        return self

    def predict(self, X: ArrayLike) -> Floats:
        """Return the (n_samples,) values at the given sizes, in the unit of y.

        Args:
            X: (n_samples, n_features) Sizes.

        Raises:
            AttributeError: ``fit`` was not called.
        """
        design = _design(np.asarray(X, np.float64), self.monomials_)
        values: Floats = design @ self.coef_
        return values

    def predict_one(self, sizes: Sequence[float]) -> float:
        """Return the value at one shape, faster than `predict`.

        Args:
            sizes: (n_features,) Sizes.
        """
        value = 0.0
        for powers, coefficient in self._terms:
            for size, power in zip(sizes, powers, strict=True):
                coefficient *= size**power
            value += coefficient
        return value


@lru_cache(maxsize=32)
def _monomials(n_features: int) -> tuple[tuple[int, ...], ...]:
    """Return the powers of the columns, the lowest degree first."""
    found = [
        tuple(map(columns.count, range(n_features)))
        for n in range(_DEGREE + 1)
        for columns in combinations_with_replacement(range(n_features), n)
    ]
    small = [each for each in found if max(each, default=0) <= _POWER]
    return tuple(
        sorted(small, key=lambda each: (sum(each), max(each, default=0), each))
    )


def _design(sizes: Floats, monomials: tuple[tuple[int, ...], ...]) -> Floats:
    """Return the (n_samples, n_monomials) values of the monomials."""
    powers = np.array(monomials, dtype=np.int_).reshape(-1, sizes.shape[1])
    values: Floats = (sizes[:, None, :] ** powers).prod(axis=2)
    return values


def _chosen(design: Floats, target: Floats, tolerance: float) -> list[int]:
    """Return the columns to fit: the fewest that explain the samples.

    If no columns do, or if one term explains a single sample, the number of columns is
    the one that predicts left-out samples best.

    Args:
        design: (n_samples, n_columns) Columns of length 1.
        target: (n_samples,) The values to explain.
        tolerance: The largest error of an explained sample.
    """
    chosen = _forward(design, target, tolerance, len(target))
    if _largest_rest(design[:, chosen], target) <= tolerance:
        for column in tuple(chosen):
            others = [each for each in chosen if each != column]
            if _largest_rest(design[:, others], target) <= tolerance:
                chosen = others
        if np.isfinite(_least_squares(design[:, chosen], target)[1]).all():
            return chosen
    few = [chosen[:n] for n in range(1, max(1, len(target) // 2) + 1)]
    return min(few, key=lambda own: _least_squares(design[:, own], target)[1].max())


def _forward(design: Floats, target: Floats, tolerance: float, most: int) -> list[int]:
    """Choose columns one by one, each time the one that explains most of the rest."""
    chosen: list[int] = []
    rest, free = target, design
    while len(chosen) < most and np.abs(rest).max() > tolerance:
        lengths = np.linalg.norm(free, axis=0)
        lengths[lengths < 1e-7] = math.inf  # columns that depend on the chosen ones
        gains = np.abs(rest @ free) / lengths
        if gains.max() <= 1e-12:
            break
        chosen.append(int(gains.argmax()))
        basis, _ = np.linalg.qr(design[:, chosen])
        rest = target - basis @ (basis.T @ target)
        free = design - basis @ (basis.T @ design)
    return chosen


def _least_squares(design: Floats, target: Floats) -> tuple[Floats, Floats]:
    """Return the coefficients, and for each sample the error if it is left out."""
    basis, triangle = np.linalg.qr(design)
    solution = np.linalg.solve(triangle, basis.T @ target)
    # The second pass removes the rounding of the first.
    rest = target - design @ solution
    solution = solution + np.linalg.solve(triangle, basis.T @ rest)
    free = 1.0 - (basis**2).sum(axis=1)
    is_settled = free > 1e-7
    errors = np.abs(target - design @ solution) / np.where(is_settled, free, 1.0)
    return solution, np.where(is_settled, errors, np.inf)


def _largest_rest(design: Floats, target: Floats) -> float:
    basis, _ = np.linalg.qr(design)
    return float(np.abs(target - basis @ (basis.T @ target)).max())


# --------------------------------------------------------------- where it is trusted


class Fit:
    """A fitted estimator of one quantity, and the sizes at which it is trusted.

    It uses only sizes that vary independently: constant ones, and ones that always
    equal another, are left out. For each shape it fits the median: equal layers measure
    the same shape many times a step, and a median ignores a single disturbed reading.

    Args:
        estimator: The estimator; a copy of it is fitted.
        readings: The values in bytes or FLOPs, by shape; at least one.
        noise: By how much two readings of the same quantity differ.
        is_peak: Whether the quantity is a transient peak: then predictions are raised
            by the largest error (of 19 readings in 20).

    Raises:
        Exception: Any error of the estimator.

    Attributes:
        n_shapes: The number of distinct shapes.
        is_exact: Whether it explains every shape and has fewer terms than shapes.
        error: The error at left-out shapes; infinite if the others do not determine it.
    """

    def __init__(
        self,
        estimator: Estimator,
        readings: Mapping[Sizes, Sequence[float]],
        noise: float,
        *,
        is_peak: bool,
    ) -> None:
        shapes = tuple(readings)
        self._first, self._roles = shapes[0], _roles(shapes)
        self._columns = [c for c, role in enumerate(self._roles) if role == c]
        self._noise, self._is_peak = noise, is_peak
        self.n_shapes = len(shapes)
        values = np.array([median(own) for own in readings.values()], dtype=np.float64)
        rows = np.array([self._row(shape) for shape in shapes])
        self._estimator = copy.deepcopy(estimator)
        self._estimator.fit(rows, values)
        fitted = np.asarray(self._estimator.predict(rows), dtype=np.float64)
        rest, largest = np.abs(values - fitted), float(np.abs(values).max())
        left_out = _left_out(self._estimator, rows, values)
        n_terms = len(getattr(self._estimator, "coef_", ())) or 1
        self._n_spare = self.n_shapes - n_terms
        rounding = 1e3 * EXACT * largest
        is_explained = rest.max() <= EXACT * largest and left_out.max() <= rounding
        self.is_exact = bool(is_explained and self._n_spare > 0)
        is_settled = self._n_spare > len(self._columns)
        self.error = self._error_between = 0.0 if self.is_exact else math.inf
        self._high: list[float] = rows.max(axis=0).tolist()
        if is_settled and not self.is_exact:
            self.error = _nearly_largest(left_out)
            between = left_out[(rows < self._high).all(axis=1)]
            self._error_between = _nearly_largest(between if len(between) else left_out)
        self._raise, self._chords = 0.0, None
        has_one = isinstance(self._estimator, LeastSquares) and len(self._columns) == 1
        if is_peak and not self.is_exact and not noise and has_one:
            self._chords = _chords(rows[:, 0], values)
        if is_peak and not self.is_exact:
            pairs = zip(fitted, readings.values(), strict=True)
            over = [value - level for level, own in pairs for value in own]
            self._raise = max(0.0, _nearly_largest(np.array(over)))

    def predict(self, sizes: Sizes, scale: float = 0.0) -> float:
        """Return the value at one shape.

        Args:
            sizes: The shape.
            scale: The growth of a step, as for `is_trusted`. The prediction of a peak
                is raised by the error at left-out shapes if that is above the
                tolerance.
        """
        row, least, most = self._row(sizes), -math.inf, math.inf
        if self._chords is not None:
            chord, is_near = _on_chords(*self._chords, row[0])
            if is_near:
                return chord
            if self._chords[0][0] <= row[0] <= self._chords[0][-1]:
                most = chord
            else:
                least = chord
        if isinstance(self._estimator, LeastSquares):
            value = self._estimator.predict_one(row)
        else:
            value = float(self._estimator.predict(np.array([row]))[0])
        is_between = all(map(operator.le, row, self._high))
        error = self._error_between if is_between else self.error
        is_off = not is_between or error > self._tolerance(scale)
        more = error if self._is_peak and is_off and math.isfinite(error) else 0.0
        return min(max(value + max(self._raise, more), least), most)

    @property
    def is_settled(self) -> bool:
        """Whether an exact fit has two shapes more than terms, or at least four."""
        return self.is_exact and (self._n_spare > 1 or self.n_shapes > 3)

    def is_trusted(self, scale: float) -> bool:
        """Whether it may predict shapes that were not measured.

        It may if it predicts left-out shapes within the tolerance.

        Args:
            scale: The growth of a step, of which the tolerance is a share.
        """
        is_many = self._is_peak and self.n_shapes >= _MANY_SHAPES
        times = _PEAK_TOLERANCES if is_many else 1.0
        return self.n_shapes > 1 and self.error <= times * self._tolerance(scale)

    def outside(self, sizes: Sizes, high: Sizes, scale: float = 0.0) -> str:
        """Return why a shape is too far from the measured ones; "" if it is not.

        Args:
            sizes: The shape.
            high: The largest measured sizes.
            scale: The growth of a step, as for `is_trusted`.
        """
        reach = EXACT_REACH if self.is_settled else REACH
        if not self._is_peak and self.error < _NEGLIGIBLE_ERROR * scale:
            reach = math.inf
        for column, role in enumerate(self._roles):
            size = sizes[column]
            if role < 0 and size > self._first[column]:
                return f"{size}, where only {self._first[column]} was measured"
            if role >= 0 and role != column and size != sizes[role]:
                return f"{size} and {sizes[role]} differ; such sizes were always equal"
            if role == column and size > high[column] * reach:
                return f"{size} is beyond {high[column]}, the largest size measured"
        return ""

    def _tolerance(self, scale: float) -> float:
        return max(_OF_NOISE * self._noise, _OF_SCALE * scale)

    def _row(self, sizes: Sizes) -> list[float]:
        return [float(sizes[column]) for column in self._columns] or [1.0]


def _roles(shapes: Sequence[Sizes]) -> list[int]:
    """Return for each column -1 (constant), itself, or the column that it equals."""
    first: dict[tuple[int, ...], int] = {}
    return [
        -1 if len(set(values)) == 1 else first.setdefault(values, column)
        for column, values in enumerate(zip(*shapes, strict=True))
    ]


def _chords(sizes: Floats, values: Floats) -> tuple[Floats, Floats] | None:
    """Return samples in the order of their sizes; None if their curve is not convex.

    Args:
        sizes: (n_shapes,) Distinct sizes.
        values: (n_shapes,) The peaks.
    """
    order = np.argsort(sizes)
    x, y = sizes[order], values[order]
    if len(x) < 3:
        return None
    before = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    chord = y[:-2] + before * (y[2:] - y[:-2])
    is_convex = (y[1:-1] - chord).max() <= _BENT * np.abs(y).max()
    return (x, y) if is_convex else None


def _on_chords(x: Floats, y: Floats, size: float) -> tuple[float, bool]:
    """Return the chord's value at a size, and whether that is between near samples.

    Beyond them the last chord goes on, below which no convex curve lies.
    """
    at = int(np.clip(np.searchsorted(x, size), 1, len(x) - 1))
    slope = (y[at] - y[at - 1]) / (x[at] - x[at - 1])
    value = float(y[at - 1] + slope * (size - x[at - 1]))
    is_near = x[at - 1] <= size <= x[at] <= _NEAR * x[at - 1]
    return value, bool(is_near)


def _left_out(estimator: Estimator, rows: Floats, values: Floats) -> Floats:
    """Return the (n_shapes,) errors at left-out shapes, a fifth of them at a time.

    Errors that the estimator knows are used. With few shapes they are infinite.
    """
    known: Floats | None = getattr(estimator, "loo_errors_", None)
    if known is not None:
        return known
    errors = np.full(len(values), np.inf)
    for fold in range(_FOLDS if len(values) >= _FOLDS else 0):
        out = np.arange(len(values)) % _FOLDS == fold
        other = copy.deepcopy(estimator)
        other.fit(rows[~out], values[~out])
        errors[out] = np.abs(other.predict(rows[out]) - values[out])
    return errors


def _nearly_largest(values: Floats) -> float:
    """Return the 95th percentile, which is the largest of up to 20 values."""
    ordered = np.sort(values)  # a third of the time of np.quantile
    at = math.ceil(_SHARE * (len(values) - 1))
    return float(ordered[-1 if math.isnan(ordered[-1]) else at])
