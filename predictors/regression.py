"""Fits: how bytes and FLOPs follow from sizes, and where a fit may be believed.

What a layer saves, and its FLOPs, are sums of a few products of its sizes, such as
``a*B*T + b*B*T**2``. So the default estimator takes monomials up to degree 3 one by
one, each time the one that explains most of what is left, until the samples are
explained to rounding: as many shapes as there are terms, and one to spare, settle a
fit exactly. A coefficient may be negative: a loss leaves out the first token. A peak is
the highest of several such sums, which no polynomial explains: there the fit has as
many terms as tell samples that were left out best, and is raised by the largest error.

It is an estimator as scikit-learn's are, without its base classes: to import these
takes 150 MiB, and SciPy's non-negative least squares 50, which a training process
would keep for good.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import median
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .throughput import r2_score

Floats: TypeAlias = NDArray[np.float64]
Sizes: TypeAlias = tuple[int, ...]

EXACT = 1e-9
"""Share of the largest value by which an exact fit may be off."""
EXACT_REACH, REACH = 4.0, 1.5
"""How many times the largest size measured an exact fit may be asked at, and others.
The longest batch may come early; what was not explained may turn out as anything."""
_DEGREE, _POWER = 3, 2
"""Of a monomial, and of one size in it."""
_DEVIATIONS = 3.0
"""How many times the noise a sample that is explained may be off."""
_OF_NOISE, _OF_SCALE = 20.0, 0.02
"""An error within so many times the noise, or this share of a step, is tolerated."""
_PLAIN = 1e-4
"""Share of a step: what is no peak, and explained so far, is asked at any size."""
_MANY_SHAPES, _BEARABLE = 8, 5.0
"""A peak of so many shapes, raised by its error, is believed up to so many times."""
_FOLDS = 5
_SHARE = 0.95
"""Errors count but for one in 20: a process's memory jumps for other reasons."""


class Estimator(Protocol):
    """What scikit-learn's regressors are."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> Any:
        """Learn from (n_samples, n_features) sizes and (n_samples,) values."""

    def predict(self, X: ArrayLike) -> Any:
        """Return the (n_samples,) values at such sizes."""


def check_estimator(predictor: object) -> None:
    """Refuse what is no estimator.

    Args:
        predictor: What a user gave; None is fine.

    Raises:
        ValueError: It has no ``fit`` and ``predict``, or is a class.
    """
    is_one = hasattr(predictor, "fit") and hasattr(predictor, "predict")
    if predictor is not None and (isinstance(predictor, type) or not is_one):
        msg = (
            f"predictor {predictor!r} is no estimator: give an object with fit and "
            "predict, such as sklearn.tree.DecisionTreeRegressor(), or None"
        )
        raise ValueError(msg)


class LeastSquares:
    """Least squares on the few monomials that explain the samples.

    Args:
        noise: Standard deviation of a value, in units of y; 0 for exact ones.

    Attributes:
        monomials_: The powers of the columns, one tuple a term.
        coef_: (n_terms,) coefficients, in units of y.
        loo_errors_: (n_samples,) errors at each sample when it is left out; infinite
            where the others do not settle the fit.
    """

    monomials_: tuple[tuple[int, ...], ...]
    coef_: Floats
    loo_errors_: Floats

    def __init__(self, *, noise: float = 0.0) -> None:
        self.noise = noise

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the constructor's arguments, as scikit-learn's ``clone`` asks for."""
        del deep
        return {"noise": self.noise}

    def set_params(self, *, noise: float) -> LeastSquares:
        """Set the constructor's arguments, and return the estimator."""
        self.noise = noise
        return self

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn's tools ask a regressor for."""
        from sklearn.utils import RegressorTags, Tags, TargetTags

        tags = Tags(estimator_type="regressor", target_tags=TargetTags(required=True))
        tags.regressor_tags = RegressorTags()
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike) -> LeastSquares:
        """Choose the monomials and fit their coefficients.

        Args:
            X: (n_samples, n_features) sizes.
            y: (n_samples,) values, such as bytes.

        Raises:
            ValueError: There is no sample, or a number is NaN or infinite.
        """
        sizes, values = np.asarray(X, np.float64), np.asarray(y, np.float64)
        if sizes.ndim != 2 or values.shape != (len(sizes),) or not len(sizes):
            msg = f"X is {sizes.shape} and y {values.shape}: give (n, k) and (n,)"
            raise ValueError(msg)
        if not (np.isfinite(sizes).all() and np.isfinite(values).all()):
            msg = "a size or a value is NaN or infinite"
            raise ValueError(msg)
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
        """Return the (n_samples,) values at the given sizes.

        Args:
            X: (n_samples, n_features) sizes.

        Raises:
            AttributeError: ``fit`` was not called.
        """
        design = _design(np.asarray(X, np.float64), self.monomials_)
        values: Floats = design @ self.coef_
        return values

    def score(self, X: ArrayLike, y: ArrayLike) -> float:
        """Return the coefficient of determination of predictions."""
        return r2_score(np.asarray(y, np.float64), self.predict(X))

    def predict_one(self, sizes: Sequence[float]) -> float:
        """Return the value at one shape, for a step that waits for its plan."""
        value = 0.0
        for powers, coefficient in self._terms:
            for size, power in zip(sizes, powers, strict=True):
                coefficient *= size**power
            value += coefficient
        return value


@lru_cache(maxsize=32)
def _monomials(n_features: int) -> tuple[tuple[int, ...], ...]:
    """Return the powers of the columns, of low degree first."""
    powers = itertools.product(range(_POWER + 1), repeat=n_features)
    found = [each for each in powers if sum(each) <= _DEGREE]
    return tuple(sorted(found, key=lambda each: (sum(each), max(each, default=0))))


def _design(sizes: Floats, monomials: tuple[tuple[int, ...], ...]) -> Floats:
    """Return the (n_samples, n_monomials) values of the monomials."""
    powers = np.array(monomials, dtype=np.int_).reshape(-1, sizes.shape[1])
    values: Floats = (sizes[:, None, :] ** powers).prod(axis=2)
    return values


def _chosen(design: Floats, target: Floats, tolerance: float) -> list[int]:
    """Return the columns to fit, as few as explain the samples.

    Where none do, or where some sample is explained by a term alone, as many as
    tell samples that were left out best.

    Args:
        design: (n_samples, n_columns) of length 1.
        target: (n_samples,) to be explained.
        tolerance: By which samples that are explained may be off.
    """
    chosen = _forward(design, target, tolerance, max(1, len(target) - 1))
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
    """Take columns one by one, each the one that explains most of what is left."""
    chosen: list[int] = []
    rest, free = target, design
    while len(chosen) < most and np.abs(rest).max() > tolerance:
        lengths = np.linalg.norm(free, axis=0)
        lengths[lengths < 1e-7] = math.inf  # what follows from those that were taken
        gains = np.abs(rest @ free) / lengths
        if gains.max() <= 1e-12:
            break
        chosen.append(int(gains.argmax()))
        basis, _ = np.linalg.qr(design[:, chosen])
        rest = target - basis @ (basis.T @ target)
        free = design - basis @ (basis.T @ design)
    return chosen


def _least_squares(design: Floats, target: Floats) -> tuple[Floats, Floats]:
    """Return the coefficients, and by sample the error where it is left out."""
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


# --------------------------------------------------------------- what it may be asked


class Fit:
    """An estimator on the sizes that vary by themselves, and where it is believed.

    Sizes that never varied, or always equalled another, are left out. Of each shape the
    median is fitted: equal layers measure the same shape many times a step, and the
    median shrugs off the one reading in which something else happened.

    Args:
        estimator: Not fitted; a copy of it is.
        readings: At least one.
        noise: How far two readings of the same thing differ.
        is_peak: Whether it is raised by the largest error, but for one reading in 20.

    Raises:
        Exception: Whatever the estimator raises.

    Attributes:
        n_shapes: Distinct shapes fitted.
        is_exact: Whether it explains every shape, and one to spare.
        error: At shapes left out; infinite where the others do not settle it.
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
        self._raise = 0.0
        if is_peak and not self.is_exact:
            pairs = zip(fitted, readings.values(), strict=True)
            over = [value - level for level, own in pairs for value in own]
            self._raise = max(0.0, _nearly_largest(np.array(over)))

    def predict(self, sizes: Sizes, scale: float = 0.0) -> float:
        """Return the value at one shape.

        Args:
            sizes: The shape.
            scale: How large a step is, as for `is_trusted`: a peak is raised by the
                error at shapes left out where it is more than what is tolerated.
        """
        row = self._row(sizes)
        if isinstance(self._estimator, LeastSquares):
            value = self._estimator.predict_one(row)
        else:
            value = float(self._estimator.predict(np.array([row]))[0])
        is_between = all(map(operator.le, row, self._high))
        error = self._error_between if is_between else self.error
        is_off = not is_between or error > self._tolerance(scale)
        more = error if self._is_peak and is_off and math.isfinite(error) else 0.0
        return value + max(self._raise, more)

    @property
    def is_settled(self) -> bool:
        """Whether an exact fit has two shapes to spare, or four in all."""
        return self.is_exact and (self._n_spare > 1 or self.n_shapes > 3)

    def is_trusted(self, scale: float) -> bool:
        """Whether it may speak of shapes that were not measured.

        That is where shapes that were left out are predicted to what is tolerated.

        Args:
            scale: How large a step is: an error is small against it.
        """
        is_many = self._is_peak and self.n_shapes >= _MANY_SHAPES
        times = _BEARABLE if is_many else 1.0
        return self.n_shapes > 1 and self.error <= times * self._tolerance(scale)

    def outside(self, sizes: Sizes, high: Sizes, scale: float = 0.0) -> str:
        """Return how sizes differ from those measured; "" if they are among them.

        Args:
            sizes: Of the shape that is asked for.
            high: The largest measured.
            scale: How large a step is, as for `is_trusted`.
        """
        reach = EXACT_REACH if self.is_settled else REACH
        if not self._is_peak and self.error < _PLAIN * scale:
            reach = math.inf
        for column, role in enumerate(self._roles):
            size = sizes[column]
            if role < 0 and size > self._first[column]:
                return f"{size} where only {self._first[column]} was measured"
            if role >= 0 and role != column and size != sizes[role]:
                return f"{size} and {sizes[role]} differ, which were always equal"
            if role == column and size > high[column] * reach:
                return f"{size} is beyond {high[column]}, the most measured"
        return ""

    def _tolerance(self, scale: float) -> float:
        return max(_OF_NOISE * self._noise, _OF_SCALE * scale)

    def _row(self, sizes: Sizes) -> list[float]:
        return [float(sizes[column]) for column in self._columns] or [1.0]


def _roles(shapes: Sequence[Sizes]) -> list[int]:
    """Return for each column -1 (constant), itself, or the column it repeats."""
    first: dict[tuple[int, ...], int] = {}
    return [
        -1 if len(set(values)) == 1 else first.setdefault(values, column)
        for column, values in enumerate(zip(*shapes, strict=True))
    ]


def _left_out(estimator: Estimator, rows: Floats, values: Floats) -> Floats:
    """Return the (n_shapes,) errors at shapes left out, a fifth at a time.

    An estimator that knows them is asked; of few shapes they are infinite.
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
    """Return the value that 19 in 20 do not exceed; the largest of up to 20."""
    return float(np.quantile(values, _SHARE, method="higher"))
