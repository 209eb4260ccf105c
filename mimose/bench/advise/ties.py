"""How noisy a method's timings are, and which differences that noise explains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import numpy as np

from mimose.bench.advise.measured import Measured, Measurements, Timed
from mimose.bench.advise.models import Model
from mimose.predictors import LEAST_ROUNDS

_DEVIATIONS = 2.0
"""Standard errors of a ratio that two methods have to be apart."""


def n_readings(measured: Measured) -> int:
    """Return how often a method's sizes were timed, the median; 0 without any."""
    counts = [len(each.rounds) for each in measured.timed]
    return statistics.median_low(counts) if counts else 0


def well_timed(measured: Measured) -> list[Timed]:
    """Return the sizes with readings enough to tell their noise.

    None where most sizes have too few: the others then say nothing of the method.
    """
    if n_readings(measured) < LEAST_ROUNDS:
        return []
    return [each for each in measured.timed if len(each.rounds) >= LEAST_ROUNDS]


def spread(measured: Measured, *, is_fitted: bool = True) -> float:
    """Return the standard error of a method's medians, as a share of them.

    By the interquartile range over rounds. Infinite where most sizes have fewer
    readings than bound what they vary about.

    Args:
        measured: The method.
        is_fitted: Whether a fit goes through all sizes: then it is the median over
            them, else the largest.
    """
    found: list[float] = []
    for each in well_timed(measured):
        low, high = np.quantile(each.rounds, (0.25, 0.75))
        error = 1.2533 * (high - low) / 1.349 / math.sqrt(len(each.rounds))
        found.append(float(error / each.seconds))
    if not found:
        return math.inf
    return statistics.median(found) if is_fitted else max(found)


def spreads_of(
    measurements: Measurements, models: Mapping[str, Model]
) -> dict[str, float]:
    """Return each method's `spread`, by name.

    Args:
        measurements: Of all methods.
        models: Of those that have one, by name.
    """
    return {
        each.method: spread(
            each, is_fitted=each.method not in models or models[each.method].is_fitted
        )
        for each in measurements.methods
    }


def noise_of(spreads: Mapping[str, float], one: str, other: str) -> float:
    """Return the share by which noise alone could set two methods apart.

    Args:
        spreads: By name, the standard error of a method's medians as a share; one that
            is not there has no noise.
        one: A method.
        other: Another one.
    """
    return _DEVIATIONS * math.hypot(spreads.get(one, 0.0), spreads.get(other, 0.0))
