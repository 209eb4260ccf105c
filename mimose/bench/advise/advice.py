"""PAPAYA's lines, and the answer that follows from them.

A line, or a constant and then a line, is fitted to the bytes and seconds of a few
batches (see `mimose.predictors`). For a batch that was timed, its reading counts. The
fits predict each method for a memory, and so which one to choose, and how sure that is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_low
from typing import Any, NamedTuple

import numpy as np

from mimose.bench.advise.measure import MORE, Measured, Measurements, Step, scatter
from mimose.bench.advise.methods import METHODS, PLAIN
from mimose.bench.device import is_cpu
from mimose.predictors import Series, fit_series
from mimose.predictors.throughput import MEMORY_TOLERANCE, REACH

LEAST_ROUNDS = 5
"""The least rounds for an interval. The chance that all readings are on one side of
their true median is 1 in ``2**(rounds - 1)``: 25% for three rounds, 6% for five."""
MAY_BE_FASTER = ("accumulate", "sdpa")
"""Methods that may be faster for a batch that fits; others only do additional work."""
_NOT_FOR_ALL = ("sdpa", "offload")
"""Methods that are not possible for every model."""
_REPEATS_TO = 2**20
"""Bytes by which readings of a process on a CPU may differ."""
_NOTHING = 0.01
"""A difference of throughput that does not matter."""
_DEVIATIONS = 2.0
"""Least difference of two methods, in standard errors of their ratio."""
_LEAST_POINTS = 2
_ABOVE = 1.0 + 1e-6
"""Least factor by which a method needs more than a budget that no plan keeps."""
_ROUNDING = 1e-9


def memory_of(measured: Measured, budget_bytes: float) -> Series | None:
    """Fit a method's bytes by batch; None with too few steps.

    If a session made no plan when it was timed, it needs more than was measured.

    Args:
        measured: The method.
        budget_bytes: The budget in which it was timed.
    """
    steps = measured.steps
    if len(steps) < _LEAST_POINTS:
        return None
    short = [each.peak_bytes for each in steps if each.rounds is None]
    factor = max([1.0, *(_ABOVE * budget_bytes / each for each in short)])
    held = [factor * each for each in _held(steps)]
    batches = [each.batch for each in steps]
    return fit_series(batches, held, tolerance=MEMORY_TOLERANCE)


def _held(steps: Sequence[Step]) -> list[float]:
    """Return peaks times the ratio of reserved memory to the peak at the largest."""
    last = max(steps, key=lambda each: each.peak_bytes)
    beyond = max(1.0, last.reserved_bytes / last.peak_bytes)
    return [beyond * each.peak_bytes for each in steps]


class Best(NamedTuple):
    """The best throughput in a given memory."""

    batch: float
    """Samples a step; 0 if none fits."""
    samples_per_second: float


@dataclass(frozen=True, slots=True)
class Model:
    """A method's largest batch, and its throughput, at a memory."""

    memory: Series
    """The peak of a step in bytes, by batch."""
    fit: Series
    """The seconds of a step, by batch."""
    sizes: tuple[float, ...]
    """Batches that were timed, in order."""
    took: tuple[float, ...]
    """The median seconds of each."""
    parts: int
    """The number of parts of a batch; batches are multiples of it."""
    is_fitted: bool
    """Whether seconds follow the fit. Otherwise they are interpolated between readings,
    because no line fits them, or because plans depend on the memory."""

    @property
    def is_usable(self) -> bool:
        """Whether it can be compared: its bytes follow a line."""
        return not self.memory.refused

    @property
    def farthest(self) -> float:
        """The largest batch whose seconds can be predicted."""
        if not self.is_fitted:
            return self.sizes[-1]
        return math.floor(REACH * min(self.memory.highest, self.sizes[-1]))

    def largest_batch(self, memory_bytes: float) -> float:
        """Return the largest batch that fits; 0 if none does."""
        return largest_batch(self.memory, memory_bytes, self.parts)

    def best(self, memory_bytes: float) -> Best:
        """Return the batch that fits with the most samples a second.

        Candidates are the batches that were timed, the largest whose seconds can be
        predicted, and the point where the fit turns.
        """
        largest = min(self.largest_batch(memory_bytes), self.farthest)
        largest = largest // self.parts * self.parts
        if largest < 1.0:
            return Best(0.0, 0.0)
        batches = {largest, *(each for each in self.sizes if each <= largest)}
        if self.is_fitted and self.fit.intercept < 0.0:
            turn = max(1.0, self.fit.knee, self.fit.lowest) // self.parts * self.parts
            batches |= {turn} if self.parts <= turn <= largest else set()
        found = [Best(each, each / self.seconds(each)) for each in sorted(batches)]
        return max(found, key=lambda each: each.samples_per_second)

    def step_seconds(self, batch: float, memory_bytes: float) -> float:
        """Return a step's seconds; infinite if it does not fit, nan if not known."""
        if not self.parts <= batch <= self.largest_batch(memory_bytes):
            return math.inf
        return self.seconds(batch) if batch <= self.farthest else math.nan

    def seconds(self, batch: float) -> float:
        """Return the seconds of a step, even if it does not fit.

        They follow the fit, scaled to pass through the readings, or are interpolated.
        """
        sizes, fit = np.array(self.sizes), self.fit
        if not self.is_fitted or (fit.predict(sizes) <= 0.0).any():
            return float(np.interp(batch, sizes, self.took))
        over = np.array(self.took) / fit.predict(sizes)
        scale = np.interp(math.log(batch), np.log(sizes), over)
        return float(scale * fit.predict(batch))


def largest_batch(memory: Series, memory_bytes: float, parts: int) -> float:
    """Return the largest batch of whole parts that fits; infinite if all do."""
    found = memory.inverse(memory_bytes) * (1.0 + _ROUNDING)
    return found if math.isinf(found) else found // parts * parts


def model_of(
    measured: Measured, plain: Model | None, budget_bytes: float
) -> Model | None:
    """Fit a method's memory and seconds; None with too few readings.

    Args:
        measured: The method.
        plain: Plain training's model. A line of seconds that is negative at 0 gets its
            fixed time.
        budget_bytes: The budget in which it was timed.
    """
    memory, timed = memory_of(measured, budget_bytes), measured.timed
    if memory is None or len(timed) < _LEAST_POINTS:
        return None
    method = METHODS[measured.method]
    fixed = None if plain is None else plain.fit.intercept
    sizes = tuple(float(each.batch) for each in timed)
    took = tuple(median(each.rounds or ()) for each in timed)
    seconds = fit_series(sizes, took, intercept=fixed if fixed and fixed > 0 else None)
    is_fitted = not (seconds.refused or method.plans)
    return Model(memory, seconds, sizes, took, method.parts, is_fitted)


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodAdvice:
    """The answer for one method."""

    name: str
    """The name of the method."""
    is_exact: bool
    """Whether gradients stay equal to the last bit."""
    why_not: str = ""
    """Why the method was not measured; empty if it was."""
    fits: bool | None = None
    """Whether the sample's batch fits; None if not known."""
    largest_batch: float = math.nan
    """The largest batch that fits, in samples; 0 if not even one sample does, infinite
    if memory does not grow."""
    highest: float = 0.0
    """The largest batch that ran."""
    sample_seconds: float = math.nan
    """The seconds of a step with the sample's batch; infinite if it does not fit."""
    best_batch: float = 0.0
    """The batch with the best throughput."""
    samples_per_second: float = 0.0
    """The throughput with that batch."""
    ratio: float = math.nan
    """The best throughput divided by plain training's; infinite if only this fits."""
    interval: tuple[float, float] | None = None
    """The range of the ratio."""
    verdict: str = ""
    """``"raises"`` or ``"lowers"`` the best throughput; empty if not known."""
    no_verdict: str = ""
    """Why there is no verdict; empty if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The best method, and the second best."""

    name: str
    """The best method."""
    batch: float
    """Its batch."""
    samples_per_second: float
    """Its throughput."""
    runner_up: str
    """The second best method; empty if no other fits."""
    runner_up_batch: float
    """Its batch."""
    runner_up_samples_per_second: float
    """Its throughput."""
    is_tie: bool
    """Whether the timings do not distinguish the two."""
    too_few: bool
    """Whether the reason of a tie is too few timings, not their noise."""

    @property
    def names(self) -> tuple[str, ...]:
        """The best method, and in a tie also the second."""
        return (self.name, self.runner_up) if self.is_tie else (self.name,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Whether to save memory, and how: the result of `mimose.advise`."""

    measurements: Measurements
    budget_bytes: int
    """The memory."""
    methods: tuple[MethodAdvice, ...]
    """The answer for each method."""
    models: Mapping[str, Model]
    at_sample: Choice | None
    """The best method for the batch of the sample; None if none fits."""
    free: Choice | None
    """The best method if the batch may be chosen; None if none fits."""
    answer: str
    """``"yes"``, ``"no"`` or ``"not known"``: whether to save memory."""
    use: tuple[str, ...]
    """If the answer is yes, the methods to choose from; else those that might be
    faster."""
    in_words: Callable[[Advice], str] = field(default=repr, repr=False, compare=False)
    """Writes the answer for `str`."""

    def __str__(self) -> str:
        """Return the answer in words, as wide as the terminal."""
        return self.in_words(self)

    def of(self, name: str) -> MethodAdvice:
        """Return the answer for a method.

        Raises:
            StopIteration: It was not measured.
        """
        return next(each for each in self.methods if each.name == name)


def advise_on(measurements: Measurements, budget_bytes: int | None = None) -> Advice:
    """Answer from what was measured.

    Args:
        measurements: The measurements of all methods.
        budget_bytes: The memory; None for that of the measurements.
    """
    measured_in = measurements.budget_bytes
    budget = measured_in if budget_bytes is None else budget_bytes
    models: dict[str, Model] = {}
    for each in measurements.methods:
        model = model_of(each, models.get(PLAIN), measured_in)
        if model is not None and (
            budget == measured_in or not METHODS[each.method].plans
        ):
            models[each.method] = model
    methods = tuple(
        _advice(each, measurements, models, budget) for each in measurements.methods
    )
    batch = measurements.batch
    given, free = [], []
    for method in methods:
        model = models.get(method.name)
        if not method.is_exact or model is None:
            continue
        # Plain training that fits always counts, even if no line fits its bytes.
        is_timed = method.name == PLAIN and method.fits and method.sample_seconds > 0
        if model.is_usable or is_timed:
            given.append(_Candidate(method.name, batch, batch / method.sample_seconds))
        if model.is_usable:
            free.append(
                _Candidate(method.name, method.best_batch, method.samples_per_second)
            )
    unfitted = [name for name, model in models.items() if not model.is_fitted]
    spreads = {
        each.method: spread(each.steps, is_fitted=each.method not in unfitted)
        for each in measurements.methods
    }
    at_sample, free_choice = choose(given, spreads), choose(free, spreads)
    answer, use = _answer(measurements, methods, at_sample, budget)
    return Advice(
        measurements=measurements,
        budget_bytes=budget,
        methods=methods,
        models=models,
        at_sample=at_sample,
        free=free_choice,
        answer=answer,
        use=use,
    )


def _answer(
    measurements: Measurements,
    methods: Sequence[MethodAdvice],
    choice: Choice | None,
    budget: int,
) -> tuple[str, tuple[str, ...]]:
    """Return yes, no or not known, and what to use or what might be faster."""
    plain = next(each for each in methods if each.name == PLAIN)
    untimed = [
        each
        for each in methods
        if each.is_exact
        and each.name != PLAIN
        and math.isnan(each.sample_seconds)
        and not (each.why_not and each.name in _NOT_FOR_ALL)
    ]
    names = choice.names if choice is not None else ()
    others = tuple(name for name in names if name != PLAIN)
    is_slower = bool(names) and PLAIN not in names
    is_timed = not math.isnan(plain.sample_seconds)
    may_fit = tuple(each.name for each in untimed if each.fits is not False)
    rivals = tuple(name for name in others + may_fit if name in MAY_BE_FASTER)
    fitting = names or tuple(each.name for each in untimed if each.fits)
    open_ = tuple(each.name for each in untimed if each.fits is None)
    decisions = (
        (plain.fits is None, "not known", ()),
        (is_close(measurements, budget), "not known", others),
        (plain.fits and is_slower and is_timed, "yes", others),
        (plain.fits and is_slower, "not known", others),
        (plain.fits and rivals, "not known", rivals),
        (plain.fits and names, "no", ()),
        (plain.fits, "not known", ()),
        (fitting, "yes", fitting),
        (open_, "not known", open_),
        (True, "no", ()),
    )
    return next((answer, use) for holds, answer, use in decisions if holds)


def plain_bytes(measurements: Measurements) -> float:
    """Return plain training's bytes for the sample's batch; nan if not known."""
    plain = next(each for each in measurements.methods if each.method == PLAIN)
    memory = memory_of(plain, measurements.budget_bytes)
    if memory is None or memory.refused:
        return math.nan
    return float(memory.predict(measurements.batch))


def is_close(measurements: Measurements, budget: int) -> bool:
    """Whether plain training needs almost exactly the budget."""
    off = abs(plain_bytes(measurements) - budget)
    return is_cpu(measurements.device) and off <= _REPEATS_TO


def _advice(
    measured: Measured,
    measurements: Measurements,
    models: Mapping[str, Model],
    budget: int,
) -> MethodAdvice:
    """Return the answer for one method: memory, and seconds if they are known."""
    batch = measurements.batch
    memory = memory_of(measured, measurements.budget_bytes)
    highest = memory.highest if memory is not None else 0.0
    answer = MethodAdvice(
        name=measured.method,
        is_exact=measured.is_exact,
        why_not=measured.why_not,
        highest=highest,
    )
    parts = METHODS[measured.method].parts
    if memory is not None and not memory.refused:
        largest = largest_batch(memory, budget, parts)
        known = batch <= REACH * highest or largest < batch
        fits = largest >= batch if known else None
        answer = replace(answer, largest_batch=largest, fits=fits)
    else:
        ran = measured.steps
        over = any(e.batch <= batch and e.reserved_bytes > budget for e in ran)
        within = any(e.batch >= batch and e.reserved_bytes <= budget for e in ran)
        answer = replace(answer, fits=True if within else False if over else None)
    model, plain = models.get(measured.method), models.get(PLAIN)
    if model is None or plain is None:
        why = measured.why_not or measured.stopped or f"too few timings: {MORE}"
        if METHODS[measured.method].plans and budget != measurements.budget_bytes:
            why = "its plans are another at this memory: measure it there"
        return replace(answer, no_verdict=why)
    best, bare = model.best(budget), plain.best(budget)
    rate, of_plain = best.samples_per_second, bare.samples_per_second
    answer = replace(
        answer,
        sample_seconds=model.step_seconds(batch, budget),
        best_batch=best.batch,
        samples_per_second=rate,
        ratio=rate / of_plain if of_plain else math.inf if rate else math.nan,
    )
    if measured.method == PLAIN:
        stopped = measured.stopped if answer.fits is None else ""
        return replace(answer, no_verdict=stopped)
    base = next(each for each in measurements.methods if each.method == PLAIN)
    return replace(answer, **_verdict(measured, model, base, plain, budget))


def _verdict(
    measured: Measured, model: Model, base: Measured, plain: Model, budget: int
) -> dict[str, Any]:
    """Compare a method's best throughput with plain training's."""
    best, bare = model.best(budget), plain.best(budget)
    if not best.batch:
        return {"no_verdict": "not one sample fits"}
    if not bare.batch:
        return {"verdict": "raises"}
    for of, fit in ((base, plain), (measured, model)):
        if not fit.is_usable:
            return {"no_verdict": f"the bytes of {of.method} follow no line"}
    n_rounds = min(n_readings(each.steps) for each in (measured, base))
    if n_rounds < LEAST_ROUNDS:
        return {"no_verdict": f"{n_rounds} rounds are too few: {MORE}"}
    ratio = best.samples_per_second / bare.samples_per_second
    errors = (
        spread(of.steps, is_fitted=fit.is_fitted)
        for of, fit in ((base, plain), (measured, model))
    )
    off = _DEVIATIONS * math.hypot(*errors)
    low, high = interval = (ratio * (1.0 - off), ratio * (1.0 + off))
    if low <= 1.0 <= high:
        why = f"inside the noise: {low:.2f} to {high:.2f} times plain's"
        return {"interval": interval, "no_verdict": why}
    if abs(ratio - 1.0) < _NOTHING:
        why = f"within {_NOTHING:.0%} of plain training's"
        return {"interval": interval, "no_verdict": why}
    return {"interval": interval, "verdict": "raises" if ratio > 1.0 else "lowers"}


def n_readings(steps: Sequence[Step]) -> int:
    """Return the median number of readings of a method's sizes; 0 without any."""
    counts = [len(each.rounds) for each in steps if each.rounds]
    return median_low(counts) if counts else 0


def spread(steps: Sequence[Step], *, is_fitted: bool = True) -> float:
    """Return the relative standard error of a method's medians.

    It follows from the interquartile range over rounds. It is infinite if most sizes
    have too few readings.

    Args:
        steps: The method's steps.
        is_fitted: Whether a fit goes through all sizes. Then it is the median over all
            sizes, otherwise the largest.
    """
    found: list[float] = []
    for each in steps:
        rounds = each.rounds or ()
        if min(n_readings(steps), len(rounds)) >= LEAST_ROUNDS:
            found.append(1.2533 * scatter(rounds) / 1.349 / math.sqrt(len(rounds)))
    if not found:
        return math.inf
    return median(found) if is_fitted else max(found)


class _Candidate(NamedTuple):
    name: str
    batch: float
    rate: float
    """Its samples a second."""


def choose(
    candidates: Sequence[_Candidate], spreads: Mapping[str, float]
) -> Choice | None:
    """Choose by throughput among the methods that fit.

    In a tie with the fastest, plain training wins, because it needs no change.

    Args:
        candidates: The methods; a rate of 0 or nan does not fit, or is not known.
        spreads: The relative standard error of each method's medians, by name.

    Returns:
        The choice; None if nothing fits.
    """
    able = sorted((e for e in candidates if e.rate > 0.0), key=lambda e: -e.rate)
    if not able:
        return None

    def noise(other: _Candidate) -> float:
        return _DEVIATIONS * math.hypot(*(spreads[e.name] for e in (able[0], other)))

    tied = [e for e in able if able[0].rate / e.rate - 1.0 <= noise(e)]
    plain = [each for each in tied if each.name == PLAIN]
    best, *others = [*plain, *(each for each in able if each not in plain)]
    other = others[0] if others else _Candidate("", 0.0, 0.0)
    return Choice(
        name=best.name,
        batch=best.batch,
        samples_per_second=best.rate,
        runner_up=other.name,
        runner_up_batch=other.batch,
        runner_up_samples_per_second=other.rate,
        is_tie=other in tied,
        too_few=bool(others) and math.isinf(spreads[best.name] + spreads[other.name]),
    )
