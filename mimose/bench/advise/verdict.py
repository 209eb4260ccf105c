"""Whether a method raises or lowers the best throughput, or why nobody can say."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mimose.bench.advise.measured import Measured
from mimose.bench.advise.models import Model, Steady
from mimose.bench.advise.ties import n_readings, noise_of, spread, well_timed
from mimose.predictors import LEAST_ROUNDS, Readings, noise_ceiling, ratio_interval
from mimose.report.page.looks import counted

_NOTHING = 0.01
"""A difference of throughput that nobody cares for."""


class Verdict(NamedTuple):
    """On one method against plain training."""

    verdict: str = ""
    """``"raises"`` or ``"lowers"``; empty where nobody can say."""
    no_verdict: str = ""
    """Why not."""
    interval: tuple[float, float] | None = None
    """Of the ratio of the best throughputs."""


def verdict_of(
    measured: Measured, model: Model, plain: Measured, of_plain: Model, budget: int
) -> Verdict:
    """Judge a method by its best throughput and plain training's.

    Args:
        measured: The method's readings.
        model: What was fitted to them.
        plain: Plain training's.
        of_plain: What was fitted to these.
        budget: The memory.
    """
    rate = model.best(budget).samples_per_second
    bare = of_plain.best(budget).samples_per_second
    if not rate:
        return Verdict(no_verdict="not one sample fits")
    if not bare:
        return Verdict("raises")
    unusable = (each.refused for each in (model, of_plain) if not each.is_usable)
    reason = next(unusable, "") or _too_few(plain, measured)
    if reason:
        return Verdict(no_verdict=reason)
    low, high = interval = _interval(plain, measured, model, of_plain, budget)
    if low <= 1.0 <= high:
        reason = f"inside the noise: {low:.2f} to {high:.2f} times plain's"
    elif abs(rate / bare - 1.0) < _NOTHING:
        reason = f"within {_NOTHING:.0%} of plain training's"
    if reason:
        return Verdict(no_verdict=reason, interval=interval)
    return Verdict("raises" if rate > bare else "lowers", interval=interval)


def ceiling(measured: Measured) -> float:
    """Return the R² of throughput that the noise leaves to a prediction."""
    rounds = _rounds(measured)
    if rounds is None or min(rounds[1].shape) < 2:
        return math.nan
    return noise_ceiling(rounds[1], rounds[0])


def _too_few(plain: Measured, measured: Measured) -> str:
    n_rounds = min(n_readings(plain), n_readings(measured))
    if n_rounds >= LEAST_ROUNDS:
        return ""
    are = "is" if n_rounds == 1 else "are"
    return f"{counted(n_rounds, 'round')} {are} too few: give it more minutes"


def _interval(
    plain: Measured, measured: Measured, model: Model, of_plain: Model, budget: int
) -> tuple[float, float]:
    """Bound the ratio of both at the batches that the answer names."""
    best, bare = model.best(budget), of_plain.best(budget)
    rounds = _rounds(plain), _rounds(measured)
    if (
        isinstance(model, Steady)
        and isinstance(of_plain, Steady)
        and model.is_fitted
        and of_plain.is_fitted
        and all(each is not None and len(each[0]) > 1 for each in rounds)
    ):
        return ratio_interval(
            _readings(plain, of_plain),
            _readings(measured, model),
            budget,
            batches=(bare.batch, best.batch),
        )
    ratio = best.samples_per_second / bare.samples_per_second
    spreads = {
        "plain": spread(plain, is_fitted=of_plain.is_fitted),
        "method": spread(measured, is_fitted=model.is_fitted),
    }
    off = math.hypot(noise_of(spreads, "plain", "method"), model.doubt(best.batch))
    return ratio * (1.0 - off), ratio * (1.0 + off)


def _rounds(measured: Measured) -> tuple[np.ndarray, np.ndarray] | None:
    """Return batches (n_points,) and seconds (n_rounds, n_points) of whole rounds.

    Of sizes with enough readings, if most have enough.
    """
    timed = [each for each in measured.timed if each.length is None]
    timed = [each for each in well_timed(measured) if each.length is None] or timed
    if not timed:
        return None
    n_rounds = min(len(each.rounds) for each in timed)
    seconds = np.array([each.rounds[:n_rounds] for each in timed]).T
    return np.array([float(each.batch) for each in timed]), seconds


def _readings(measured: Measured, model: Steady) -> Readings:
    found = _rounds(measured)
    assert found is not None
    batches, seconds = found
    held = np.array([model.fitted.peak_bytes(batch) for batch in batches])
    return Readings(batches, np.tile(held, (len(seconds), 1)), seconds)
