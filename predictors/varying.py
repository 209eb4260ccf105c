"""A fit on the sizes that vary by themselves."""

from __future__ import annotations

import copy
import math
from functools import cached_property, lru_cache
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ._samples import Samples, quantile
from ._shapes import ShapeRegressor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from .base import Predictor

    Sizes = tuple[int, ...]
    Features = Callable[[Sizes], Sizes]
    Readings = Mapping[Sizes, Sequence[float]]

_HALVED = 48
"""A smaller size is hardly an image's height or width."""


class VaryingFit:
    """A regressor on the columns that vary by themselves.

    Sizes that never varied, or always equalled another, are left out. Of each shape
    the median is fitted: equal layers measure the same shape many times a step, and
    the median shrugs off the one reading in which something else happened.

    Args:
        regressor: Not fitted yet.
        readings: By shape.
        noise: What the regressor takes for noise.
        is_raised: Whether it is raised over 19 in 20 of the single readings: of equal
            layers that reach about the same level, the highest makes the peak.
        features: Turns sizes into what is fitted on; None for the sizes themselves.

    Attributes:
        noise: As given.
        n_shapes: Distinct shapes fitted.
        n_searched: How many they were when all was searched for its terms.
        residual_searched: Its `residual` then.
        n_columns: Columns that vary by themselves.
        is_exact: Whether it explains every reading.
        residual: Its largest distance from a reading.
    """

    def __init__(
        self,
        regressor: Predictor,
        readings: Readings,
        noise: float,
        *,
        is_raised: bool,
        features: Features | None = None,
    ) -> None:
        shapes = _shapes_of(tuple(readings), features)
        self.noise = noise
        self.n_searched = len(readings)
        values = [median(own) for own in readings.values()]
        regressor.fit(shapes.inputs, np.array(values, dtype=float))
        self._take(regressor, shapes, readings, is_raised)
        self.residual_searched = self.residual

    def again(self, readings: Readings, *, is_raised: bool) -> VaryingFit | None:
        """Return the fit of further readings by the same terms; None if they fail.

        Args:
            readings: By shape, those of this fit among them.
            is_raised: As before.
        """
        if not isinstance(self._regressor, ShapeRegressor):
            return None
        shapes = _shapes_of(tuple(readings), self._shapes.features)
        values = [median(own) for own in readings.values()]
        if shapes.fitted != self._shapes.fitted or not math.isfinite(sum(values)):
            return None
        regressor = self._regressor.refitted(shapes.samples(values))
        if regressor is None:
            return None
        fit = VaryingFit.__new__(VaryingFit)
        fit.noise, fit.n_searched = self.noise, self.n_searched
        fit.residual_searched = self.residual_searched
        fit._take(regressor, shapes, readings, is_raised)
        return fit

    def _take(
        self, regressor: Predictor, shapes: _Shapes, readings: Readings, is_raised: bool
    ) -> None:
        """Take over a regressor that was fitted to the readings."""
        self._regressor, self._shapes = regressor, shapes
        self._low, self._high = shapes.low, shapes.high
        self.n_shapes = len(readings)
        self.n_columns = len(shapes.columns)
        self.is_exact = bool(regressor.exact_)
        self.residual = float(getattr(regressor, "residual_", 0.0))
        self._lift = 0.0
        if is_raised:
            predicted = [self.predict(shape) for shape in readings]
            pairs = zip(predicted, readings.values(), strict=True)
            rest = [value - level for level, own in pairs for value in own]
            self._lift = max(0.0, quantile(rest, 0.95))

    @cached_property
    def says_trusted(self) -> bool:
        """Whether the regressor itself says that it may be trusted."""
        return bool(getattr(self._regressor, "trusted_", False))

    @cached_property
    def loo_error(self) -> float:
        """Error at a shape left out; infinite where the readings do not settle it."""
        n_terms = len(getattr(self._regressor, "monomials_", ())) or 1
        is_settled = self.n_shapes > n_terms + self.n_columns
        return self._regressor.loo_error_ if is_settled else math.inf

    def predict(self, sizes: Sizes) -> float:
        """Predict at one shape."""
        reduced = self._shapes.reduced(sizes)
        return float(self._regressor.predict_one(reduced)) + self._lift

    def predict_from_above(self, sizes: Sizes) -> float:
        """Predict; below the least sizes measured, no less than in proportion to them.

        An excess is a maximum, and below what was seen another of its parts may be
        the largest. What it is there is at most what it was at the least sizes, and
        falls with each of them. A fit that explains every one of exact readings is
        believed as it is.
        """
        raised = tuple(map(max, sizes, self._low))
        value = self.predict(sizes)
        if raised == sizes or (self.is_exact and self.noise == 0.0):
            return value
        below = [c for c in self._shapes.columns if sizes[c] < raised[c]]
        share = math.prod(sizes[c] / raised[c] for c in below)
        return max(value, self.predict(raised) * share)

    def same_structure(self, sizes: Sizes) -> bool:
        """Whether constant columns are constant still, and equal ones equal."""
        first = self._shapes.first
        for column, role in enumerate(self._shapes.roles):
            expected = first[column] if role < 0 else sizes[role]
            if sizes[column] != expected:
                return False
        return True

    def outside(self, sizes: Sizes, reach: float) -> str:
        """Return how sizes differ from those measured; "" if they are among them.

        Args:
            sizes: Of the shape that is asked for.
            reach: How many times the largest measured still is within.
        """
        first = self._shapes.first
        for column, role in enumerate(self._shapes.roles):
            size = sizes[column]
            if role < 0 and size > first[column]:
                return f"{size} where only {first[column]} was measured"
            if role >= 0 and role != column and size != sizes[role]:
                return f"{size} and {sizes[role]} differ, which were always equal"
            if role == column and size > self._high[column] * reach:
                return f"{size} is beyond {self._high[column]}, the most measured"
        return ""

    def searched_like(self, other: VaryingFit) -> VaryingFit:
        """Return the fit for which no more was searched than for another."""
        made = copy.copy(self)
        made.n_searched = other.n_searched
        return made

    def widened(self, *shapes: Sizes) -> VaryingFit:
        """Return the fit that has seen further shapes, which it predicts well."""
        low = tuple(map(min, self._low, *shapes))
        high = tuple(map(max, self._high, *shapes))
        if (low, high) == (self._low, self._high):
            return self
        wider = copy.copy(self)
        wider._low, wider._high = low, high
        return wider


class _Shapes(NamedTuple):
    """What follows from the shapes alone: many quantities are measured at the same."""

    roles: list[int]
    """Of the columns of the sizes: see `_roles`."""
    columns: list[int]
    """Of the sizes, those that vary by themselves."""
    fitted: list[int]
    """The same of the features."""
    features: Features | None
    first: Sizes
    low: Sizes
    high: Sizes
    inputs: NDArray[np.float64]
    """(n_shapes, n_columns) what is fitted on. Nobody writes to it."""
    ends: tuple[tuple[float, ...], tuple[float, ...]]
    """The smallest and the largest of each of its columns."""

    def reduced(self, sizes: Sizes) -> list[float]:
        """Return what is fitted on of one shape."""
        if self.features is not None:
            sizes = self.features(sizes)
        return [float(sizes[c]) for c in self.fitted] or [1.0]

    def samples(self, values: Sequence[float]) -> Samples:
        """Return finite values at these shapes, which are distinct, as samples."""
        low, high = self.ends
        return Samples(
            sizes=self.inputs,
            values=np.array(values, dtype=float),
            spread=0.0,
            low=low,
            high=high,
        )


@lru_cache(maxsize=32)
def _shapes_of(shapes: tuple[Sizes, ...], features: Features | None) -> _Shapes:
    roles = _roles(shapes)
    columns = [c for c, role in enumerate(roles) if role == c]
    fitted, given = columns, shapes
    if features is not None:
        given = tuple(map(features, shapes))
        fitted = [c for c, role in enumerate(_roles(given)) if role == c]
    rows = [[float(each[c]) for c in fitted] or [1.0] for each in given]
    return _Shapes(
        roles,
        columns,
        fitted,
        features,
        first=shapes[0],
        low=tuple(map(min, *shapes, shapes[0])),
        high=tuple(map(max, *shapes, shapes[0])),
        inputs=np.array(rows),
        ends=(tuple(map(min, *rows, rows[0])), tuple(map(max, *rows, rows[0]))),
    )


def _halved(times: int) -> Features:
    """Return what puts, behind sizes, those of images halved so often, and once more.

    Args:
        times: How often; each time rounded up.
    """

    def features(sizes: Sizes) -> Sizes:
        here = [-(-size // 2**times) if size >= _HALVED else 0 for size in sizes]
        return (*sizes, *here, *[-(-size // 2) for size in here])

    return features


HALVINGS = tuple(map(_halved, (1, 3, 4)))
"""Strides of 2, 4, 8, 16 and 32, two at a time: with all there are too many terms."""


def _roles(shapes: Sequence[Sizes]) -> list[int]:
    """Return for each column -1 (constant), itself, or the column it repeats."""
    columns = list(zip(*shapes, strict=True))
    first: dict[tuple[int, ...], int] = {}
    roles = []
    for index, values in enumerate(columns):
        is_constant = all(value == values[0] for value in values)
        roles.append(-1 if is_constant else first.setdefault(values, index))
    return roles
