"""The answer for lengths that will come, in place of one shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mimose.bench.advise.measured import Measured, Measurements
from mimose.bench.advise.methods import METHODS, PLAIN
from mimose.bench.advise.models import (
    Curve,
    Planned,
    Rates,
    Steady,
    held,
    plans_of,
    with_rates,
)
from mimose.bench.advise.ties import noise_of

LEAST_LENGTHS = 3
"""A curve of the second degree needs as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthsOfMethod:
    """One method on the batches that will come."""

    name: str
    is_exact: bool
    n_fit: int
    """Batches that fit."""
    seconds: float
    """Of all batches; infinite where not all fit."""
    timed_to: int
    """The longest that was timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthsAnswer:
    """What to train batches of many lengths with."""

    n_batches: int
    batch: int
    """Samples in each."""
    shortest: int
    median: int
    longest: int
    methods: tuple[LengthsOfMethod, ...]
    unknown: tuple[str, ...]
    """Exact methods that ran, but of which too few lengths were timed."""
    best: str
    """The fastest exact method with which all fit; empty where there is none."""
    runner_up: str
    is_tie: bool
    too_few: bool
    """Whether that is for too few timings, and not for their noise."""
    """Whether the noise could have made the one faster than the other."""
    most_tokens: int | None
    """Padded tokens a batch that plain training holds at any of these lengths, if
    batches may be put together by tokens; None where nobody knows."""


def answer_lengths(
    measurements: Measurements,
    lengths: Sequence[int],
    plain: Steady | None,
    spreads: Mapping[str, float],
    memory_bytes: int,
) -> LengthsAnswer | None:
    """Answer for batches of the sample's size and these lengths.

    Args:
        measurements: With methods timed by length.
        lengths: Padded tokens, one for each batch.
        plain: Plain training by batch: what does not grow with it.
        spreads: By name, the standard error of a method's medians as a share.
        memory_bytes: What there is.

    Returns:
        The answer; None where no method was timed at enough lengths.
    """
    by_name = {each.method: each for each in measurements.methods}
    base = by_name.get(PLAIN)
    seconds = None if base is None else _seconds(base)
    told, unknown = [], []
    for each in measurements.methods:
        step = _step(each, seconds, measurements.budget_bytes, memory_bytes)
        if step is None:
            if each.is_exact and not each.why_not:
                unknown.append(each.method)
        else:
            took = [step(length) for length in lengths]
            told.append(
                LengthsOfMethod(
                    name=each.method,
                    is_exact=each.is_exact,
                    n_fit=sum(map(math.isfinite, took)),
                    seconds=sum(took),
                    timed_to=max(e.length or 0 for e in each.timed),
                )
            )
    if not told or not lengths:
        return None
    able = sorted(
        (each for each in told if each.is_exact and math.isfinite(each.seconds)),
        key=lambda each: each.seconds,
    )
    noise = noise_of(spreads, able[0].name, able[1].name) if len(able) > 1 else 0.0
    return LengthsAnswer(
        n_batches=len(lengths),
        batch=measurements.batch,
        shortest=min(lengths),
        median=int(np.median(lengths)),
        longest=max(lengths),
        methods=tuple(told),
        unknown=tuple(unknown),
        best=able[0].name if able else "",
        runner_up=able[1].name if len(able) > 1 else "",
        is_tie=len(able) > 1 and noise >= able[1].seconds / able[0].seconds - 1.0,
        too_few=math.isinf(noise),
        most_tokens=_most_tokens(base, plain, lengths, measurements, memory_bytes),
    )


def _step(
    measured: Measured, plain: Curve | None, budget_bytes: int, memory_bytes: int
) -> Callable[[int], float] | None:
    """Return a step's seconds by length, infinite where it does not fit."""
    if METHODS[measured.method].plans:
        if plain is None:
            return None
        return _planned_step(measured, plain, budget_bytes, memory_bytes)
    memory, seconds = _memory(measured), _seconds(measured)
    if memory is None or seconds is None:
        return None

    def step(length: int) -> float:
        fits = memory.predict(length) <= memory_bytes
        return seconds.predict(length) if fits else math.inf

    return step


def _planned_step(
    measured: Measured, plain: Curve, budget_bytes: int, memory_bytes: int
) -> Callable[[int], float] | None:
    rows = plans_of(measured, budget_bytes, by_length=True)
    timed = [each for each in measured.timed if each.length is not None]
    if len(rows) < LEAST_LENGTHS or not timed:
        return None
    highest = float(max(each.size for each in rows))
    bare = Planned(measured.method, plain, Rates(), rows, highest)
    found = with_rates(bare, timed, budget_bytes)

    def step(length: int) -> float:
        return found.step_seconds(length, memory_bytes)

    return step


def _memory(measured: Measured) -> Curve | None:
    weighed = [each for each in measured.weighed if each.length is not None]
    if len(weighed) < LEAST_LENGTHS:
        return None
    return Curve.fitted([each.size for each in weighed], held(weighed))


def _seconds(measured: Measured) -> Curve | None:
    timed = [each for each in measured.timed if each.length is not None]
    if len(timed) < LEAST_LENGTHS:
        return None
    return Curve.fitted([each.size for each in timed], [e.seconds for e in timed])


def _most_tokens(
    plain: Measured | None,
    steady: Steady | None,
    lengths: Sequence[int],
    measurements: Measurements,
    memory_bytes: int,
) -> int | None:
    """Return how many tokens of any length a batch of plain training holds.

    What a step holds above what it holds without samples is in proportion to them, so
    the sample's batch tells of all.
    """
    memory = None if plain is None else _memory(plain)
    if memory is None or steady is None or steady.fitted.memory.refused:
        return None
    fixed = steady.fitted.memory.intercept
    tokens = []
    for length in set(lengths):
        a_sample = (memory.predict(length) - fixed) / measurements.batch
        if a_sample <= 0.0:
            return None
        tokens.append(math.floor((memory_bytes - fixed) / a_sample) * length)
    return max(0, min(tokens))
