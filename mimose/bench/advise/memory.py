"""Which batches fit, of methods whose seconds nobody knows as well."""

from __future__ import annotations

import math
from typing import NamedTuple

from mimose.bench.advise.measured import Measured
from mimose.bench.advise.methods import METHODS
from mimose.bench.advise.models import Curve, Planned, Rates, held, plans_of
from mimose.predictors import Series, fit_series
from mimose.predictors.noise import MEMORY_TOLERANCE

_LEAST_POINTS = 2


class Fitting(NamedTuple):
    """What is known of a method's batches at a memory."""

    largest: float
    """Infinite where memory does not grow, nan where nobody knows."""
    has_sample: bool | None
    """Whether the sample's batch fits; None where nobody knows."""


def fitting(
    measured: Measured, batch: int, memory_bytes: int, budget_bytes: int
) -> Fitting:
    """Tell which batches fit, by the fit of bytes; without one by the steps that ran.

    Args:
        measured: The method.
        batch: The sample's.
        memory_bytes: What there is.
        budget_bytes: In which it was measured.
    """
    largest = _largest(measured, memory_bytes, budget_bytes)
    if not math.isnan(largest):
        return Fitting(largest, largest >= batch)
    return Fitting(math.nan, _has_run(measured, batch, memory_bytes))


def memory_series(measured: Measured) -> Series | None:
    """Fit a method's bytes by batch; None with too few steps."""
    weighed = [each for each in measured.weighed if each.length is None]
    if len(weighed) < _LEAST_POINTS:
        return None
    batches = [each.batch for each in weighed]
    return fit_series(batches, held(weighed), tolerance=MEMORY_TOLERANCE)


def _largest(measured: Measured, memory_bytes: int, budget_bytes: int) -> float:
    if METHODS[measured.method].plans:
        return _largest_planned(measured, memory_bytes, budget_bytes)
    series = memory_series(measured)
    if series is None or series.refused:
        return math.nan
    found = series.inverse(memory_bytes)
    if math.isinf(found):
        return found
    parts = METHODS[measured.method].parts
    return float(math.floor(found + 1e-9) // parts * parts)


def _largest_planned(measured: Measured, memory_bytes: int, budget_bytes: int) -> float:
    rows = plans_of(measured, budget_bytes)
    if len(rows) < _LEAST_POINTS:
        return math.nan
    untimed = Planned(measured.method, Curve((1.0,)), Rates(), rows, 0.0)
    return untimed.largest_batch(memory_bytes)


def _has_run(measured: Measured, batch: int, memory_bytes: int) -> bool | None:
    """Tell by the steps that ran whether a batch fits; None if they do not say."""
    ran = [each for each in measured.weighed if each.length is None]
    if any(e.batch >= batch and e.reserved_bytes <= memory_bytes for e in ran):
        return True
    if any(e.batch <= batch and e.reserved_bytes > memory_bytes for e in ran):
        return False
    return None
