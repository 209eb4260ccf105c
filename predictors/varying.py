"""A fit on the sizes that vary by themselves."""

from __future__ import annotations

import copy
import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .base import Predictor

    Sizes = tuple[int, ...]

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
        n_columns: Columns that vary by themselves.
        is_exact: Whether it explains every reading.
        residual: Its largest distance from a reading.
    """

    def __init__(
        self,
        regressor: Predictor,
        readings: Mapping[Sizes, Sequence[float]],
        noise: float,
        *,
        is_raised: bool,
        features: Callable[[Sizes], Sizes] | None = None,
    ) -> None:
        shapes = list(readings)
        self._features = features
        self._roles = _roles(shapes)
        self._columns = [c for c, role in enumerate(self._roles) if role == c]
        self._fitted_columns = self._columns
        if features is not None:
            roles = _roles([features(shape) for shape in shapes])
            self._fitted_columns = [c for c, role in enumerate(roles) if role == c]
        self._first = shapes[0]
        self._low: Sizes = tuple(map(min, *shapes, shapes[0]))
        self._high: Sizes = tuple(map(max, *shapes, shapes[0]))
        self.noise = noise
        self.n_shapes = len(shapes)
        self.n_columns = len(self._columns)
        values = [float(np.median(readings[shape])) for shape in shapes]
        inputs = np.array([self._reduce(shape) for shape in shapes], dtype=float)
        self._regressor = regressor
        regressor.fit(inputs, np.array(values, dtype=float))
        self.is_exact = bool(regressor.exact_)
        self.residual = float(getattr(regressor, "residual_", 0.0))
        self._lift = 0.0
        if is_raised:
            rest = [v - self.predict(s) for s in shapes for v in readings[s]]
            self._lift = max(0.0, float(np.quantile(rest, 0.95, method="higher")))

    def _reduce(self, sizes: Sizes) -> list[float]:
        if self._features is not None:
            sizes = self._features(sizes)
        return [float(sizes[c]) for c in self._fitted_columns] or [1.0]

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
        return float(self._regressor.predict_one(self._reduce(sizes))) + self._lift

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
        below = [c for c in self._columns if sizes[c] < raised[c]]
        share = math.prod(sizes[c] / raised[c] for c in below)
        return max(value, self.predict(raised) * share)

    def same_structure(self, sizes: Sizes) -> bool:
        """Whether constant columns are constant still, and equal ones equal."""
        for column, role in enumerate(self._roles):
            expected = self._first[column] if role < 0 else sizes[role]
            if sizes[column] != expected:
                return False
        return True

    def outside(self, sizes: Sizes, reach: float) -> str:
        """Return how sizes differ from those measured; "" if they are among them.

        Args:
            sizes: Of the shape that is asked for.
            reach: How many times the largest measured still is within.
        """
        for column, role in enumerate(self._roles):
            size = sizes[column]
            if role < 0 and size > self._first[column]:
                return f"{size} where only {self._first[column]} was measured"
            if role >= 0 and role != column and size != sizes[role]:
                return f"{size} and {sizes[role]} differ, which were always equal"
            if role == column and size > self._high[column] * reach:
                return f"{size} is beyond {self._high[column]}, the most measured"
        return ""

    def widened(self, *shapes: Sizes) -> VaryingFit:
        """Return the fit that has seen further shapes, which it predicts well."""
        low = tuple(map(min, self._low, *shapes))
        high = tuple(map(max, self._high, *shapes))
        if (low, high) == (self._low, self._high):
            return self
        wider = copy.copy(self)
        wider._low, wider._high = low, high
        return wider


def _halved(times: int) -> Callable[[Sizes], Sizes]:
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


def _roles(shapes: list[Sizes]) -> list[int]:
    """Return for each column -1 (constant), itself, or the column it repeats."""
    columns = list(zip(*shapes, strict=True))
    first: dict[tuple[int, ...], int] = {}
    roles = []
    for index, values in enumerate(columns):
        is_constant = all(value == values[0] for value in values)
        roles.append(-1 if is_constant else first.setdefault(values, index))
    return roles
