"""What each method does at any memory and batch, from what was measured of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mimose.bench.advise.measured import Foretold, Measured, Timed, Weighed
from mimose.bench.advise.methods import METHODS
from mimose.predictors import Best, MethodModel, Residuals, fit_rates, fit_series
from mimose.predictors.noise import MEMORY_TOLERANCE
from mimose.predictors.throughput import REACH

_LEAST_POINTS = 2
_LINE_POINTS = 3
_LEAST_ADDED = 0.05
"""Of a step: less that plans add cannot be told from noise."""
_ROUNDING = 1e-9
_ABOVE = 1.0 + 1e-6
"""A budget that no plan keeps is below the least one by a trifle, at least."""
_FURTHEST = 4.0
"""From the longest length measured."""


class _Predicts(Protocol):
    def predict(self, x: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity by length: a polynomial of the second degree, of relative errors."""

    coefficients: tuple[float, ...]
    """From the constant on."""

    @classmethod
    def fitted(cls, lengths: Sequence[float], values: Sequence[float]) -> Curve:
        """Fit (n_points,) lengths and values.

        A line where there are less than four, or a parabola would come down again.
        """
        degree = 2 if len(set(lengths)) > _LINE_POINTS else 1
        x, y = np.asarray(lengths, float), np.asarray(values, float)
        found = np.polynomial.polynomial.polyfit(x, y, degree, w=1.0 / y)
        if degree > 1 and found[-1] < 0.0:  # nothing falls with the length
            found = np.polynomial.polynomial.polyfit(x, y, 1, w=1.0 / y)
        return cls(tuple(found.tolist()))

    def predict(self, x: float) -> float:
        """Return the value at a length."""
        return float(np.polynomial.polynomial.polyval(x, self.coefficients))


@dataclass(frozen=True, slots=True)
class Between:
    """A quantity that follows no line: as measured, and in between."""

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def predict(self, x: float) -> float:
        """Return the value between two sizes; beyond the last, in proportion to it."""
        last, highest = self.sizes[-1], self.values[-1]
        if x > last:
            return highest * x / last
        return float(np.interp(x, self.sizes, self.values))


class Model(Protocol):
    """A method's largest batch, and its throughput, at a memory."""

    @property
    def name(self) -> str:
        """The method's."""
        ...

    @property
    def refused(self) -> str:
        """Why nothing may be said of batches that were not timed; else empty."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether it can be compared at batches that ran, if not foretold."""
        ...

    @property
    def highest(self) -> float:
        """The largest batch measured."""
        ...

    @property
    def is_fitted(self) -> bool:
        """Whether a fit goes through its seconds."""
        ...

    @property
    def farthest(self) -> float:
        """The largest batch of which seconds may be told."""
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

    def doubt(self, batch: float) -> float:
        """Return how far off these may be beside the noise, as a share."""
        ...


@dataclass(frozen=True, slots=True)
class Steady:
    """A method that does the same whatever memory there is."""

    fitted: MethodModel
    timed: Between
    """Seconds as they were measured."""
    residuals: Residuals
    """What these are over the fit."""
    parts: int = 1
    """Into which each batch is cut: only their multiples are batches."""

    @property
    def is_usable(self) -> bool:
        """Whether it can be compared at batches that ran, if not foretold."""
        return not self.fitted.memory.refused

    @property
    def name(self) -> str:
        """The method's."""
        return self.fitted.name

    @property
    def refused(self) -> str:
        """Why nothing may be said of batches that were not timed; else empty."""
        return self.fitted.refused

    @property
    def highest(self) -> float:
        """The largest batch measured."""
        return self.fitted.memory.highest

    @property
    def is_fitted(self) -> bool:
        """Whether a fit goes through its seconds."""
        return not self.fitted.seconds.refused

    @property
    def farthest(self) -> float:
        """The largest batch of which seconds may be told.

        That is twice the largest that ran; the last that was timed where nothing but
        readings tells of seconds.
        """
        last = self.timed.sizes[-1]
        if not self.is_fitted:
            return last
        return math.floor(REACH * min(self.highest, last))

    def largest_batch(self, memory_bytes: float, *, whole: bool = True) -> float:
        """Return the largest batch that fits; 0 where none does."""
        found = self.fitted.largest_batch(memory_bytes, whole=whole)
        if found < self.parts:
            return 0.0
        if not whole or math.isinf(found):
            return found
        return found // self.parts * self.parts

    def best(self, memory_bytes: float, *, whole: bool = True) -> Best:
        """Return the batch of the most samples a second, of those that fit.

        Of those that were timed, the largest of which seconds may be told, and where
        the fit turns.
        """
        largest = min(self.largest_batch(memory_bytes, whole=whole), self.farthest)
        if whole:
            largest = largest // self.parts * self.parts
        if largest < 1.0:
            return Best(0.0, 0.0)
        batches = {largest, *(each for each in self.timed.sizes if each <= largest)}
        if self.is_fitted:
            turn = self.fitted.best_throughput(memory_bytes, whole=whole).batch
            turn = turn // self.parts * self.parts if whole else turn
            batches |= {turn} if self.parts <= turn <= largest else set()
        rates = {each: each / self.predict(each) for each in sorted(batches)}
        fastest = max(rates, key=lambda each: rates[each])
        return Best(fastest, rates[fastest])

    def step_seconds(self, batch: float, memory_bytes: float) -> float:
        """Return the seconds of a step; infinite where it does not fit.

        Or has fewer samples than parts.
        """
        if not self.parts <= batch <= self.largest_batch(memory_bytes):
            return math.inf
        return self.predict(batch)

    def doubt(self, batch: float) -> float:
        """Return 0: a fit goes through what was timed."""
        del batch
        return 0.0

    def predict(self, x: float) -> float:
        """Return the seconds of a step, whether it fits or not.

        By the fit, moved through what was measured; where the fit was refused, as they
        were measured.
        """
        if not self.is_fitted:
            return self.timed.predict(x)
        return self.residuals.at(x) * self.fitted.step_seconds(x)


class Rates(NamedTuple):
    """What steps under plans take, over what was foretold of them."""

    a_step: float = 0.0
    """Seconds of every step that a session takes for itself, whatever the size."""
    plain: float = 1.0
    """Over the seconds of plain training."""
    added: float = 1.0
    """Over the seconds that the plan was to add."""


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
    rates: Rates
    foretold: tuple[Foretold, ...]
    """At two sizes or more, in order."""
    highest: float
    timed: tuple[float, ...] = ()
    """Sizes, in order."""
    residuals: Residuals = field(default_factory=Residuals)
    """What steps took over what these three say, at the memory they were timed in."""
    refused: str = ""

    @property
    def is_usable(self) -> bool:
        """Whether it can be compared at batches that ran, if not foretold."""
        return True

    @property
    def is_fitted(self) -> bool:
        """Whether a fit goes through plain training's seconds, and so through these."""
        return not self.refused

    @property
    def farthest(self) -> float:
        """The largest batch of which seconds may be told.

        That is twice the largest that ran; the last that was timed where nobody knows
        how plain training goes on.
        """
        last = min(self.highest, self.timed[-1])
        return last if self.refused else math.floor(REACH * last)

    def doubt(self, batch: float) -> float:
        """Return how far off seconds may be beside the noise, as a share.

        Where a batch was not timed, as far as plans were off at those that were.
        """
        if batch in self.timed:
            return 0.0
        return float(np.mean([abs(ratio - 1.0) for ratio in self.residuals.ratios]))

    def largest_batch(self, memory_bytes: float, *, whole: bool = True) -> float:
        """Return the largest batch that fits; 0 where none does."""
        batches = [each.size for each in self.foretold]
        least = [each.least_bytes for each in self.foretold]
        if memory_bytes < _at(batches, least, 1.0):
            return 0.0
        found = _at(least, batches, memory_bytes)
        return float(math.floor(found + _ROUNDING)) if whole else found

    def best(self, memory_bytes: float, *, whole: bool = True) -> Best:
        """Return the batch of the most samples a second, of those that fit.

        Of those that were timed, and the largest of which seconds may be told: between
        them a session may have found other plans than were foretold.
        """
        largest = min(self.largest_batch(memory_bytes, whole=whole), self.farthest)
        if largest < 1.0:
            return Best(0.0, 0.0)
        batches = sorted({largest, *(each for each in self.timed if each <= largest)})
        rates = [batch / self._seconds(batch, memory_bytes) for batch in batches]
        most = max(rates)
        return Best(batches[rates.index(most)], most)

    def step_seconds(self, batch: float, memory_bytes: float) -> float:
        """Return the seconds of a step; infinite where it does not fit."""
        if batch > self.largest_batch(memory_bytes):
            return math.inf
        return self._seconds(batch, memory_bytes)

    def _seconds(self, batch: float, memory_bytes: float) -> float:
        plain, added = self.bare_seconds(batch, memory_bytes)
        rates = self.rates
        said = rates.a_step + rates.plain * plain + rates.added * added
        return self.residuals.at(batch) * said

    def bare_seconds(self, batch: float, memory_bytes: float) -> tuple[float, float]:
        """Return plain training's seconds, and those that the plan is to add."""
        batches = [each.size for each in self.foretold]
        least = _at(batches, [each.least_bytes for each in self.foretold], batch)
        keep = _at(batches, [each.keep_bytes for each in self.foretold], batch)
        share = (memory_bytes - least) / max(keep - least, 1.0)
        added = [_along(each.seconds, share) for each in self.foretold]
        return self.plain.predict(batch), max(0.0, _at(batches, added, batch))


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
    timed = sorted(timed, key=lambda each: each.batch)
    between = Between(
        tuple(float(each.batch) for each in timed),
        tuple(each.seconds for each in timed),
    )
    residuals = Residuals.of(
        between.sizes, [seconds.predict(each) for each in between.sizes], between.values
    )
    parts = METHODS[measured.method].parts
    fitted = MethodModel(measured.method, memory, seconds)
    return Steady(fitted, between, residuals, parts)


def planned(measured: Measured, plain: Steady, memory_bytes: float) -> Planned | None:
    """Join a session's plans with what its steps took; None with too few of either.

    Args:
        measured: The method's, timed within the budget.
        plain: Plain training's.
        memory_bytes: That budget.
    """
    timed = [each for each in measured.timed if each.length is None]
    rows = plans_of(measured, memory_bytes)
    if len(rows) < _LEAST_POINTS or not timed:
        return None
    held_by_plain = plain.fitted.memory.predict
    bare = Planned(
        measured.method,
        plain,
        Rates(),
        tuple(
            _raised(each, max(1.0, held_by_plain(each.size) / each.keep_bytes))
            for each in rows
        ),
        highest=float(max(each.batch for each in measured.weighed)),
        timed=tuple(sorted(float(each.batch) for each in timed)),
        refused=plain.fitted.seconds.refused,
    )
    return with_rates(bare, timed, memory_bytes)


def plans_of(
    measured: Measured, budget_bytes: float, *, by_length: bool = False
) -> tuple[Foretold, ...]:
    """Return the plans that were foretold, with what the allocator takes beyond them.

    What an allocator takes for tensors is in no plan that is foretold. It shows where
    steps have passed the budget, and where a session that was to be timed made no plan,
    though one was foretold.

    Args:
        measured: The method.
        budget_bytes: In which it was measured.
        by_length: Whether of lengths, rather than of batches.
    """
    rows = [e for e in measured.foretold if (e.length is not None) == by_length]
    passed = [each.reserved_bytes / budget_bytes for each in measured.weighed]
    unplanned = {(each.batch, each.length) for each in measured.unplanned}
    short = [
        budget_bytes / each.least_bytes * _ABOVE
        for each in rows
        if (each.batch, each.length) in unplanned
    ]
    factor = max((1.0, *passed, *short))
    return tuple(_raised(each, factor) for each in rows)


def _raised(foretold: Foretold, factor: float) -> Foretold:
    """Return plans that need so many times what their tensors do."""
    return replace(
        foretold,
        least_bytes=factor * foretold.least_bytes,
        keep_bytes=factor * foretold.keep_bytes,
    )


def with_rates(bare: Planned, timed: Sequence[Timed], memory_bytes: float) -> Planned:
    """Return a planned method whose seconds are those of steps that were timed.

    From three sizes on a step has a time of its own, and from four on, where plans add
    anything at them, what these add has a rate of its own; with fewer there is one
    factor for all.
    """
    bare_seconds = [bare.bare_seconds(each.size, memory_bytes) for each in timed]
    plain, added = np.array(bare_seconds).T
    measured = np.array([each.seconds for each in timed])
    rates = _rates(plain, added, measured)
    said = rates.a_step + rates.plain * plain + rates.added * added
    residuals = Residuals.of([each.size for each in timed], said, measured)
    return replace(bare, rates=rates, residuals=residuals)


def _rates(
    plain: NDArray[np.float64],
    added: NDArray[np.float64],
    measured: NDArray[np.float64],
) -> Rates:
    both = plain + added
    if len(measured) < _LINE_POINTS:
        factor = float(np.median(measured / both))
        return Rates(0.0, factor, factor)
    ones = np.ones(len(measured))
    if len(measured) == _LINE_POINTS or max(added / both) < _LEAST_ADDED:
        a_step, factor = fit_rates(np.array([ones, both]).T, measured).tolist()
        return Rates(a_step, factor, factor)
    return Rates(*fit_rates(np.array([ones, plain, added]).T, measured).tolist())


def longest(
    measured: Measured, memory_bytes: float, budget_bytes: float
) -> float | None:
    """Return the most tokens at which the sample's batch fits.

    None where too few lengths were measured; at most four times the longest measured.

    Args:
        measured: The method.
        memory_bytes: What there is.
        budget_bytes: In which it was measured.
    """
    if measured.foretold:
        rows = plans_of(measured, budget_bytes, by_length=True)
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
