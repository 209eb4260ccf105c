"""The answer: what each method does at a memory, and which one to choose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mimose.bench.advise.choice import Choice, choose
from mimose.bench.advise.flips import Flip, flips
from mimose.bench.advise.lengths import LengthsAnswer, answer_lengths
from mimose.bench.advise.measured import Measured, Measurements, Weighed
from mimose.bench.advise.memory import fitting
from mimose.bench.advise.methods import METHODS, PLAIN
from mimose.bench.advise.models import (
    Model,
    Steady,
    longest,
    planned,
    steady,
)
from mimose.bench.advise.ties import spreads_of
from mimose.bench.advise.verdict import ceiling, verdict_of
from mimose.predictors import p_point, p_score
from mimose.predictors.lines import LINE

_LEAST_SIZES = 2
"""Of batches that ran, for anything to be said of others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodAdvice:
    """What one method does."""

    name: str
    what: str
    is_exact: bool
    why_not: str
    """Why nothing is known of it; empty where something is."""
    no_time: str = ""
    """Why only its memory is known; empty where its seconds are, too."""
    fits_sample: bool | None = None
    """Whether the sample's batch fits; None where nobody knows."""
    largest_batch: int | None = None
    """That fits; 0 where not one sample does, None where memory does not grow."""
    highest: float = 0.0
    """The largest batch that ran."""
    timed_to: float = 0.0
    """The largest batch that was timed."""
    longest: int | None = None
    """Tokens at which the sample's batch fits; None where nobody knows."""
    sample_seconds: float = math.inf
    """Of a step with the sample's batch; infinite where it does not fit, nan where
    nobody knows: it is far beyond the batches that ran."""
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
    spreads = spreads_of(measurements, models)
    names = {each.method for each in measurements.methods if each.is_exact}
    exact = [model for name, model in models.items() if name in names]
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
        flips=flips(exact, spreads, budget),
        lengths=answer_lengths(
            measurements,
            measurements.lengths,
            plain if isinstance(plain, Steady) else None,
            spreads,
            budget,
        ),
        p_point=point,
    )


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
    """Say what is known: of memory, and where its seconds are known of these too."""
    method = METHODS[measured.method]
    fits = fitting(measured, measurements.batch, budget, measurements.budget_bytes)
    told = MethodAdvice(
        name=method.name,
        what=method.what,
        is_exact=measured.is_exact,
        why_not=measured.why_not,
        fits_sample=fits.has_sample,
        highest=max((float(e.batch) for e in _of_batches(measured)), default=0.0),
    )
    model = models.get(method.name)
    if measured.why_not:
        return told
    if model is None:
        why = _why_untimed(measured, measurements, models)
        if math.isnan(fits.largest):
            return replace(told, why_not=why)
        return replace(
            told,
            no_time=why,
            no_verdict=why,
            largest_batch=_whole(fits.largest),
            longest=_longest(measured, measurements, budget),
        )
    best = model.best(budget)
    told = replace(
        told,
        largest_batch=_whole(model.largest_batch(budget)),
        highest=model.highest,
        timed_to=max(float(e.batch) for e in measured.timed if e.length is None),
        longest=_longest(measured, measurements, budget),
        sample_seconds=_sample_seconds(model, measurements.batch, budget),
        best_batch=best.batch,
        samples_per_second=best.samples_per_second,
        ceiling=ceiling(measured),
        **_fits(model),
    )
    return replace(told, **_against_plain(measured, measurements, models, budget))


def _against_plain(
    measured: Measured,
    measurements: Measurements,
    models: Mapping[str, Model],
    budget: int,
) -> dict[str, Any]:
    """Compare a method whose seconds are known with plain training."""
    model, plain = models[measured.method], models.get(PLAIN)
    if plain is None:
        return {"no_verdict": "plain training's time is not known"}
    rate = model.best(budget).samples_per_second
    bare = plain.best(budget).samples_per_second
    ratio = rate / bare if bare else math.inf if rate else math.nan
    found: dict[str, Any] = {"ratio": ratio, "p_score": _p_score(plain, model)}
    if measured.method != PLAIN:
        base = next(m for m in measurements.methods if m.method == PLAIN)
        found |= verdict_of(measured, model, base, plain, budget)._asdict()
    return found


def _why_untimed(
    measured: Measured, measurements: Measurements, models: Mapping[str, Model]
) -> str:
    """Say why a method has no model of its seconds.

    One with fewer readings than there were rounds was taken out of its turns, and
    `stopped` says by what. Else that is only why no larger batch was tried.
    """
    took = max((len(each.rounds) for each in measured.timed), default=0)
    is_short = len(_of_batches(measured)) < _LEAST_SIZES
    if measured.stopped and (is_short or took < measurements.n_rounds):
        return measured.stopped
    if METHODS[measured.method].plans and took and PLAIN not in models:
        return "plain training's time is not known, and its own follows from that"
    if METHODS[measured.method].plans and took:
        return "its session planned for too few sizes in the time it had"
    return "too few of its steps were timed"


def _whole(batch: float) -> int | None:
    return None if math.isinf(batch) else int(batch)


def _of_batches(measured: Measured) -> list[Weighed]:
    return [each for each in measured.weighed if each.length is None]


def _sample_seconds(model: Model, batch: int, budget: int) -> float:
    seconds = model.step_seconds(batch, budget)
    is_told = math.isinf(seconds) or batch <= model.farthest
    return seconds if is_told else math.nan


def _longest(measured: Measured, measurements: Measurements, budget: int) -> int | None:
    found = longest(measured, budget, measurements.budget_bytes)
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
