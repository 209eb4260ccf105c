"""What each method does at any memory and batch, from what was measured of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mimose.bench.advise.measured import Foretold, Measured, Timed, Weighed
from mimose.predictors import Best, MethodModel, fit_series
from mimose.predictors.noise import MEMORY_TOLERANCE

_LEAST_POINTS = 2
_LINE_POINTS = 3
_ROUNDING = 1e-9
_FURTHEST = 4.0
"""From the longest length measured."""
_STEPS = 64
"""Batches looked at for the best of a method that plans."""


class _Predicts(Protocol):
    def predict(self, x: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity by length: a polynomial of the second degree, of relative errors."""

    coefficients: tuple[float, ...]
    """From the constant on."""

    @classmethod
    def fitted(cls, lengths: Sequence[float], values: Sequence[float]) -> Curve:
        """Fit (n_points,) lengths and values; a line where there are less than four."""
        degree = 2 if len(set(lengths)) > _LINE_POINTS else 1
        x, y = np.asarray(lengths, float), np.asarray(values, float)
        found = np.polynomial.polynomial.polyfit(x, y, degree, w=1.0 / y)
        return cls(tuple(found.tolist()))

    def predict(self, x: float) -> float:
        """Return the value at a length."""
        return float(np.polynomial.polynomial.polyval(x, self.coefficients))


class Model(Protocol):
    """A method's largest batch, and its throughput, at a memory."""

    @property
    def name(self) -> str:
        """The method's."""
        ...

    @property
    def refused(self) -> str:
        """Why nothing may be said; empty where something may."""
        ...

    @property
    def highest(self) -> float:
        """The largest batch measured."""
        ...

    def largest_batch(self, memory_bytes: float, *, whole: bool = True) -> float:
        """Return the largest batch that fits; 0 where none does."""
        ...

    def best(self, memory_bytes: float, *, whole: bool = True) -> Best:
        """Return the batch of the most samples a second, of those that fit."""
        ...

    def step_seconds(self, batch: float, memory_bytes: float) -> float:
        """Return the seconds of a step; infinite where it does not fit."""
        ...


@dataclass(frozen=True, slots=True)
class Steady:
    """A method that does the same whatever memory there is."""

    fitted: MethodModel

    @property
    def name(self) -> str:
        """The method's."""
        return self.fitted.name

    @property
    def refused(self) -> str:
        """Why nothing may be said; empty where something may."""
        return self.fitted.refused

    @property
    def highest(self) -> float:
        """The largest batch measured."""
        return self.fitted.memory.highest

    def largest_batch(self, memory_bytes: float, *, whole: bool = True) -> float:
        """Return the largest batch that fits; 0 where none does."""
        return self.fitted.largest_batch(memory_bytes, whole=whole)

    def best(self, memory_bytes: float, *, whole: bool = True) -> Best:
        """Return the batch of the most samples a second, of those that fit."""
        return self.fitted.best_throughput(memory_bytes, whole=whole)

    def step_seconds(self, batch: float, memory_bytes: float) -> float:
        """Return the seconds of a step; infinite where it does not fit."""
        if batch > self.largest_batch(memory_bytes):
            return math.inf
        return self.fitted.step_seconds(batch)


@dataclass(frozen=True, slots=True)
class Planned:
    """A method that plans: plain training's time, and what a plan adds to it.

    Sizes are batches, or lengths. Between those that were planned for, the least
    memory, the memory at which everything is kept, and the costs between them, are
    interpolated; beyond them the last two are followed on.
    """

    name: str
    plain: _Predicts
    """Seconds of plain training by size."""
    factor: float
    """A session's own share: of steps measured, over plain seconds and the plan's."""
    foretold: tuple[Foretold, ...]
    """At two sizes or more, in order."""
    highest: float
    refused: str = ""

    def largest_batch(self, memory_bytes: float, *, whole: bool = True) -> float:
        """Return the largest batch that fits; 0 where none does."""
        batches = [each.size for each in self.foretold]
        least = [each.least_bytes for each in self.foretold]
        if memory_bytes < _at(batches, least, 1.0):
            return 0.0
        found = _at(least, batches, memory_bytes)
        return float(math.floor(found + _ROUNDING)) if whole else found

    def best(self, memory_bytes: float, *, whole: bool = True) -> Best:
        """Return the batch of the most samples a second, of those that fit."""
        largest = self.largest_batch(memory_bytes, whole=whole)
        if largest < 1.0:
            return Best(0.0, 0.0)
        batches = [float(each) for each in np.geomspace(1.0, largest, _STEPS)]
        if whole:
            batches = sorted({float(round(each)) for each in batches})
        rates = [batch / self._seconds(batch, memory_bytes) for batch in batches]
        most = max(rates)
        return Best(batches[rates.index(most)], most)

    def step_seconds(self, batch: float, memory_bytes: float) -> float:
        """Return the seconds of a step; infinite where it does not fit."""
        if batch > self.largest_batch(memory_bytes):
            return math.inf
        return self._seconds(batch, memory_bytes)

    def _seconds(self, batch: float, memory_bytes: float) -> float:
        return self.factor * self.bare_seconds(batch, memory_bytes)

    def bare_seconds(self, batch: float, memory_bytes: float) -> float:
        """Return plain training's seconds and the plan's."""
        batches = [each.size for each in self.foretold]
        least = _at(batches, [each.least_bytes for each in self.foretold], batch)
        keep = _at(batches, [each.keep_bytes for each in self.foretold], batch)
        share = (memory_bytes - least) / max(keep - least, 1.0)
        added = [_along(each.seconds, share) for each in self.foretold]
        return self.plain.predict(batch) + max(0.0, _at(batches, added, batch))


def steady(measured: Measured, plain: MethodModel | None) -> Steady | None:
    """Fit a method's memory and seconds; None where there are too few readings."""
    weighed = _of_batches(measured)
    timed = [each for each in measured.timed if each.length is None]
    if min(len(weighed), len(timed)) < _LEAST_POINTS:
        return None
    memory = fit_series(
        [each.batch for each in weighed], held(weighed), tolerance=MEMORY_TOLERANCE
    )
    fixed = None
    if plain is not None and plain.seconds.intercept > 0.0:
        fixed = plain.seconds.intercept
    seconds = fit_series(
        [each.batch for each in timed],
        [each.seconds for each in timed],
        intercept=fixed,
    )
    return Steady(MethodModel(measured.method, memory, seconds))


def planned(
    measured: Measured, plain: MethodModel, memory_bytes: float
) -> Planned | None:
    """Join a session's plans with what its steps took; None with too few of either.

    Args:
        measured: The method's, timed within the budget.
        plain: Plain training's.
        memory_bytes: That budget.
    """
    timed = [each for each in measured.timed if each.length is None]
    rows = tuple(each for each in measured.foretold if each.length is None)
    if len(rows) < _LEAST_POINTS or not timed:
        return None
    bare = Planned(
        measured.method,
        plain.seconds,
        1.0,
        rows,
        float(max(each.batch for each in measured.weighed)),
        plain.refused,
    )
    return with_factor(bare, timed, memory_bytes)


def with_factor(bare: Planned, timed: Sequence[Timed], memory_bytes: float) -> Planned:
    """Return a planned method whose seconds are those of steps that were timed."""
    ratios = [
        each.seconds / bare.bare_seconds(each.size, memory_bytes) for each in timed
    ]
    return Planned(
        bare.name,
        bare.plain,
        float(np.median(ratios)),
        bare.foretold,
        bare.highest,
        bare.refused,
    )


def longest(measured: Measured, memory_bytes: float) -> float | None:
    """Return the most tokens at which the sample's batch fits.

    None where too few lengths were measured; at most four times the longest measured.
    """
    if measured.foretold:
        rows = [each for each in measured.foretold if each.length is not None]
        if len(rows) <= _LEAST_POINTS:
            return None
        sizes, least = [e.size for e in rows], [e.least_bytes for e in rows]
        found = min(_FURTHEST * sizes[-1], _at(least, sizes, memory_bytes))
        return float(max(0, math.floor(found)))
    weighed = [each for each in measured.weighed if each.length is not None]
    if len(weighed) <= _LEAST_POINTS:
        return None
    memory = Curve.fitted([each.size for each in weighed], held(weighed))
    lengths = range(int(_FURTHEST * weighed[-1].size), 0, -1)
    fits = (each for each in lengths if memory.predict(each) <= memory_bytes)
    return float(next(fits, 0))


def _of_batches(measured: Measured) -> list[Weighed]:
    return [each for each in measured.weighed if each.length is None]


def held(weighed: Sequence[Weighed]) -> list[float]:
    """Return peaks, with what the allocator takes beyond them at the largest."""
    last = max(weighed, key=lambda each: each.peak_bytes)
    beyond = max(1.0, last.reserved_bytes / last.peak_bytes)
    return [beyond * each.peak_bytes for each in weighed]


def _at(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """Return y at a place, on the lines through neighbouring points and beyond."""
    index = int(np.searchsorted(x, at))
    index = min(max(index, 1), len(x) - 1)
    low, high = x[index - 1], x[index]
    slope = (y[index] - y[index - 1]) / (high - low) if high > low else 0.0
    return y[index - 1] + slope * (at - low)


def _along(seconds: Sequence[float], share: float) -> float:
    """Return what a plan adds at a share of the way to keeping everything."""
    places = np.linspace(0.0, 1.0, len(seconds))
    return float(np.interp(min(1.0, max(0.0, share)), places, seconds))
