"""PAPAYA's lines: a method's bytes and seconds by batch, and what follows from them.

A line, or a floor and then a line, is fitted to a few batches that ran (see
`mimose.predictors`); where a batch was timed, what was read there counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from mimose.bench.advise.measure import Measured, Step
from mimose.bench.advise.methods import METHODS
from mimose.predictors import Best, MethodModel, Residuals, Series, fit_series
from mimose.predictors.noise import MEMORY_TOLERANCE
from mimose.predictors.throughput import REACH

_LEAST_POINTS = 2
_ABOVE = 1.0 + 1e-6
"""A budget that no plan keeps is below the least one by a trifle, at least."""
_ROUNDING = 1e-9


def memory_of(measured: Measured, budget_bytes: float) -> Series | None:
    """Fit a method's bytes by batch; None with too few steps.

    Where a session that was to be timed made no plan, it needs more than it said.

    Args:
        measured: The method.
        budget_bytes: In which it was timed.
    """
    steps = measured.at()
    if len(steps) < _LEAST_POINTS:
        return None
    short = [each.peak_bytes for each in steps if each.rounds is None]
    factor = max([1.0, *(_ABOVE * budget_bytes / each for each in short)])
    held = [factor * each for each in _held(steps)]
    batches = [each.batch for each in steps]
    return fit_series(batches, held, tolerance=MEMORY_TOLERANCE)


def _held(steps: Sequence[Step]) -> list[float]:
    """Return peaks, with what the allocator takes beyond them at the largest."""
    last = max(steps, key=lambda each: each.peak_bytes)
    beyond = max(1.0, last.reserved_bytes / last.peak_bytes)
    return [beyond * each.peak_bytes for each in steps]


@dataclass(frozen=True, slots=True)
class Model:
    """A method's largest batch, and its throughput, at a memory."""

    fitted: MethodModel
    sizes: tuple[float, ...]
    """Batches that were timed, in order."""
    took: tuple[float, ...]
    """The median seconds there."""
    parts: int
    """Into which each batch is cut: only their multiples are batches."""
    is_fitted: bool
    """Whether seconds follow the fit. Else they are told between readings alone: no
    line explains them, or plans of the one memory made them."""

    @property
    def is_usable(self) -> bool:
        """Whether it can be compared: its bytes follow a line."""
        return not self.fitted.memory.refused

    @property
    def farthest(self) -> float:
        """The largest batch of which seconds may be told."""
        if not self.is_fitted:
            return self.sizes[-1]
        return math.floor(REACH * min(self.fitted.memory.highest, self.sizes[-1]))

    def largest_batch(self, memory_bytes: float) -> float:
        """Return the largest batch that fits; 0 where none does."""
        return largest_batch(self.fitted.memory, memory_bytes, self.parts)

    def best(self, memory_bytes: float) -> Best:
        """Return the batch of the most samples a second, of those that fit.

        Of those that were timed, the largest of which seconds may be told, and where
        the fit turns.
        """
        largest = min(self.largest_batch(memory_bytes), self.farthest)
        largest = largest // self.parts * self.parts
        if largest < 1.0:
            return Best(0.0, 0.0)
        batches = {largest, *(each for each in self.sizes if each <= largest)}
        if self.is_fitted:
            turn = self.fitted.best_throughput(memory_bytes).batch
            turn = turn // self.parts * self.parts
            batches |= {turn} if self.parts <= turn <= largest else set()
        found = [Best(each, each / self.seconds(each)) for each in sorted(batches)]
        return max(found, key=lambda each: each.samples_per_second)

    def step_seconds(self, batch: float, memory_bytes: float) -> float:
        """Return the seconds of a step.

        Infinite where it does not fit, nan where nobody knows.
        """
        if not self.parts <= batch <= self.largest_batch(memory_bytes):
            return math.inf
        return self.seconds(batch) if batch <= self.farthest else math.nan

    def seconds(self, batch: float) -> float:
        """Return the seconds of a step, whether it fits or not.

        By the fit, moved through what was read; without one between the readings.
        """
        if not self.is_fitted:
            return float(np.interp(batch, self.sizes, self.took))
        fitted = [self.fitted.step_seconds(each) for each in self.sizes]
        residuals = Residuals.of(self.sizes, fitted, self.took)
        return residuals.at(batch) * self.fitted.step_seconds(batch)


def largest_batch(memory: Series, memory_bytes: float, parts: int) -> float:
    """Return the largest batch of whole parts that fits; infinite where all do."""
    found = memory.inverse(memory_bytes) * (1.0 + _ROUNDING)
    return found if math.isinf(found) else found // parts * parts


def model_of(
    measured: Measured, plain: Model | None, budget_bytes: float
) -> Model | None:
    """Fit a method's memory and seconds; None where there are too few readings.

    Args:
        measured: The method.
        plain: Plain training's: a line of seconds that is negative at 0 takes its fixed
            time.
        budget_bytes: In which it was timed.
    """
    memory, timed = memory_of(measured, budget_bytes), measured.at(timed=True)
    if memory is None or len(timed) < _LEAST_POINTS:
        return None
    method = METHODS[measured.method]
    fixed = None if plain is None else plain.fitted.seconds.intercept
    sizes = tuple(float(each.batch) for each in timed)
    took = tuple(median(each.rounds or ()) for each in timed)
    seconds = fit_series(sizes, took, intercept=fixed if fixed and fixed > 0 else None)
    fitted = MethodModel(measured.method, memory, seconds)
    is_fitted = not (seconds.refused or method.plans)
    return Model(fitted, sizes, took, method.parts, is_fitted)


def seconds_of_lengths(
    measured: Measured, lengths: Sequence[int], memory_bytes: float
) -> Mapping[int, float]:
    """Return the seconds of a step by length, with the sample's batch.

    Infinite where it does not fit, nan where nobody knows; empty where too few lengths
    were timed. Between those that ran bytes and seconds are interpolated; a longer one
    was left out, for it would not have fit, or for the reason in ``stopped``.
    """
    steps = measured.at(lengths=True)
    timed = measured.at(lengths=True, timed=True)
    if len(timed) < _LEAST_POINTS:
        return {}
    sizes, held = [each.size for each in steps], _held(steps)
    places = [each.size for each in timed]
    took = [median(each.rounds or ()) for each in timed]
    found = {}
    for length in sorted(set(lengths)):
        fits = np.interp(length, sizes, held) <= memory_bytes
        if length > sizes[-1]:
            found[length] = math.nan if measured.stopped else math.inf
        elif not fits:
            found[length] = math.inf
        elif length > places[-1]:
            found[length] = math.nan
        else:
            found[length] = float(np.interp(length, places, took))
    return found
