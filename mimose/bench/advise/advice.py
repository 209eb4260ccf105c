"""The answer: what each method does at a memory, and which one to choose."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mimose.bench.advise.choice import Choice, choose
from mimose.bench.advise.flips import Flip, flips
from mimose.bench.advise.lengths import LengthsAnswer, answer_lengths
from mimose.bench.advise.measured import Measured, Measurements
from mimose.bench.advise.methods import METHODS, PLAIN
from mimose.bench.advise.models import (
    Model,
    Planned,
    Steady,
    best_run,
    longest,
    planned,
    steady,
)
from mimose.predictors import (
    LEAST_ROUNDS,
    Readings,
    noise_ceiling,
    p_point,
    p_score,
    ratio_interval,
)
from mimose.predictors.lines import LINE

_NOTHING = 0.01
"""A difference of throughput that nobody cares for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodAdvice:
    """What one method does."""

    name: str
    what: str
    is_exact: bool
    why_not: str
    """Why nothing is known of it; empty where something is."""
    largest_batch: int | None = None
    """That fits; 0 where not one sample does, None where memory does not grow."""
    highest: float = 0.0
    """The largest batch measured."""
    longest: int | None = None
    """Tokens at which the sample's batch fits; None where nobody knows."""
    sample_seconds: float = math.inf
    """Of a step with the sample's batch; infinite where it does not fit."""
    best_batch: float = 0.0
    samples_per_second: float = 0.0
    """With that batch: the most there is."""
    ratio: float = math.nan
    """To plain training's best throughput; infinite where only this fits."""
    interval: tuple[float, float] | None = None
    """Of the ratio."""
    verdict: str = ""
    """``"raises"`` or ``"lowers"`` the best throughput; empty where nobody can say."""
    no_verdict: str = ""
    """Why not."""
    ceiling: float = math.nan
    """R² of throughput that the noise leaves to a prediction."""
    memory_r2: float = math.nan
    seconds_r2: float = math.nan
    p_score: float = math.nan
    """Bytes a sample saves for each second it costs more; nan where not both methods
    are lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What to do at a memory."""

    measurements: Measurements
    budget_bytes: int
    methods: tuple[MethodAdvice, ...]
    models: Mapping[str, Model]
    at_sample: Choice | None
    """Where the batch is given; None where nothing fits."""
    free: Choice | None
    """Where the batch may be chosen."""
    flips: tuple[Flip, ...]
    lengths: LengthsAnswer | None
    """For the lengths that will come; None where nobody knows them."""
    p_point: float
    """Free bytes for each second of plain training's fixed time."""

    def __str__(self) -> str:
        """Return the answer in words, as wide as the terminal."""
        from mimose.bench.advise.words import text
        from mimose.report.columns import terminal_width

        return text(self, terminal_width())

    def of(self, name: str) -> MethodAdvice:
        """Return what is said of a method."""
        return next(each for each in self.methods if each.name == name)


def advise_on(measurements: Measurements, budget_bytes: int | None = None) -> Advice:
    """Answer from what was measured.

    Args:
        measurements: Of all methods.
        budget_bytes: The memory; None for that of the measurements.
    """
    budget = measurements.budget_bytes if budget_bytes is None else budget_bytes
    models = _models(measurements)
    spreads = {each.method: spread(each) for each in measurements.methods}
    exact = [model for name, model in models.items() if METHODS[name].is_exact]
    plain = models.get(PLAIN)
    point = math.nan
    if isinstance(plain, Steady) and _are_lines(plain):
        point = p_point(plain.fitted, budget)
    return Advice(
        measurements=measurements,
        budget_bytes=budget,
        methods=tuple(
            _advice(m, measurements, models, budget) for m in measurements.methods
        ),
        models=models,
        at_sample=choose(exact, spreads, budget, measurements.batch),
        free=choose(exact, spreads, budget, None),
        flips=flips(exact, budget),
        lengths=answer_lengths(
            measurements,
            measurements.lengths,
            plain if isinstance(plain, Steady) else None,
            spreads,
            budget,
        ),
        p_point=point,
    )


def spread(measured: Measured) -> float:
    """Return the standard error of a method's medians, as a share of them.

    By the interquartile range over rounds, the median over all sizes. Infinite where
    a size has fewer readings than bound what they vary about.
    """
    if any(len(each.rounds) < LEAST_ROUNDS for each in measured.timed):
        return math.inf
    found = []
    for each in measured.timed:
        low, high = np.quantile(each.rounds, (0.25, 0.75))
        error = 1.2533 * (high - low) / 1.349 / math.sqrt(len(each.rounds))
        found.append(error / each.seconds)
    return statistics.median(found) if found else math.inf


def _models(measurements: Measurements) -> dict[str, Model]:
    """Return a model of each method that has one, plain training's first."""
    found: dict[str, Model] = {}
    plain: Steady | None = None
    for each in measurements.methods:
        model: Model | None
        if METHODS[each.method].plans:
            if plain is None:
                continue
            model = planned(each, plain, measurements.budget_bytes)
        else:
            model = steady(each, None if plain is None else plain.fitted)
            if each.method == PLAIN and isinstance(model, Steady):
                plain = model
        if model is not None:
            found[each.method] = model
    return found


def _advice(
    measured: Measured,
    measurements: Measurements,
    models: Mapping[str, Model],
    budget: int,
) -> MethodAdvice:
    method = METHODS[measured.method]
    told = MethodAdvice(
        name=method.name,
        what=method.what,
        is_exact=method.is_exact,
        why_not=measured.why_not,
    )
    model, plain = models.get(method.name), models.get(PLAIN)
    if model is None or plain is None:
        few = "too few of its steps were timed"
        why_not = measured.why_not or measured.stopped or few
        return replace(told, why_not=why_not)
    largest = model.largest_batch(budget)
    best, of_plain = best_run(model, budget), best_run(plain, budget)
    ratio = math.nan
    if of_plain.samples_per_second:
        ratio = best.samples_per_second / of_plain.samples_per_second
    elif best.samples_per_second:
        ratio = math.inf
    told = replace(
        told,
        largest_batch=None if math.isinf(largest) else int(largest),
        highest=model.highest,
        longest=_longest(measured, budget),
        sample_seconds=model.step_seconds(measurements.batch, budget),
        best_batch=best.batch,
        samples_per_second=best.samples_per_second,
        ratio=ratio,
        ceiling=_ceiling(measured),
        p_score=_p_score(plain, model),
        **_fits(model),
    )
    return replace(told, **_verdict(told, measurements, measured, models, budget))


def _longest(measured: Measured, budget: int) -> int | None:
    found = longest(measured, budget)
    return None if found is None else int(found)


def _fits(model: Model) -> dict[str, Any]:
    if not isinstance(model, Steady):
        return {}
    fitted = model.fitted
    return {"memory_r2": fitted.memory.r2, "seconds_r2": fitted.seconds.r2}


def _p_score(plain: Model, model: Model) -> float:
    if not (isinstance(plain, Steady) and isinstance(model, Steady)):
        return math.nan
    if plain is model or not (_are_lines(plain) and _are_lines(model)):
        return math.nan
    return p_score(plain.fitted, model.fitted)


def _are_lines(model: Steady) -> bool:
    return model.fitted.memory.form == model.fitted.seconds.form == LINE


def _ceiling(measured: Measured) -> float:
    rounds = _rounds(measured)
    if rounds is None or min(rounds[1].shape) < 2:
        return math.nan
    return noise_ceiling(rounds[1], rounds[0])


def _rounds(measured: Measured) -> tuple[np.ndarray, np.ndarray] | None:
    """Return batches (n_points,) and seconds (n_rounds, n_points) of whole rounds."""
    timed = [each for each in measured.timed if each.length is None]
    if not timed:
        return None
    n_rounds = min(len(each.rounds) for each in timed)
    seconds = np.array([each.rounds[:n_rounds] for each in timed]).T
    return np.array([float(each.batch) for each in timed]), seconds


def _verdict(
    told: MethodAdvice,
    measurements: Measurements,
    measured: Measured,
    models: Mapping[str, Model],
    budget: int,
) -> dict[str, Any]:
    """Say whether a method raises or lowers the best throughput, or why nobody can."""
    if told.name == PLAIN:
        return {}
    plain = next(m for m in measurements.methods if m.method == PLAIN)
    model, of_plain = models[told.name], models[PLAIN]
    reason = model.refused or of_plain.refused
    if not told.samples_per_second:
        return {"no_verdict": "not one sample fits"}
    if math.isinf(told.ratio):
        return {"verdict": "raises"}
    n_rounds = min(
        (len(each.rounds) for one in (plain, measured) for each in one.timed),
        default=0,
    )
    if not reason and n_rounds < LEAST_ROUNDS:
        rounds = "1 round is" if n_rounds == 1 else f"{n_rounds} rounds are"
        reason = f"{rounds} too few: give it more minutes"
    if reason:
        return {"no_verdict": reason}
    low, high = _interval(plain, measured, model, of_plain, budget)
    reason = ""
    if low <= 1.0 <= high:
        reason = f"inside the noise: {low:.2f} to {high:.2f} times plain's"
    elif abs(told.ratio - 1.0) < _NOTHING:
        reason = f"within {_NOTHING:.0%} of plain training's"
    if reason:
        return {"interval": (low, high), "no_verdict": reason}
    verdict = "raises" if told.ratio > 1.0 else "lowers"
    return {"interval": (low, high), "verdict": verdict}


def _interval(
    plain: Measured, measured: Measured, model: Model, of_plain: Model, budget: int
) -> tuple[float, float]:
    if isinstance(model, Planned) or not isinstance(of_plain, Steady):
        ratio = best_run(model, budget).samples_per_second
        ratio /= best_run(of_plain, budget).samples_per_second
        off = 2.0 * math.hypot(spread(plain), spread(measured))
        return ratio * (1.0 - off), ratio * (1.0 + off)
    assert isinstance(model, Steady)
    return ratio_interval(
        _readings(plain, of_plain), _readings(measured, model), budget
    )


def _readings(measured: Measured, model: Steady) -> Readings:
    found = _rounds(measured)
    assert found is not None
    batches, seconds = found
    held = np.array([model.fitted.peak_bytes(batch) for batch in batches])
    return Readings(batches, np.tile(held, (len(seconds), 1)), seconds)
