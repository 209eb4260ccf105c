"""Lines of bytes and seconds, and which method has the best throughput in a memory."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from benchmarks.proofs.papaya import SERIES, pairs
from mimose.predictors import (
    MethodModel,
    Series,
    compare,
    fit_series,
    p_point,
    p_score,
)

X = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
PLAIN = MethodModel("plain", Series.line(100.0, 1000.0), Series.line(1.0, 10.0))
SAVING = MethodModel("saving", Series.line(20.0, 1000.0), Series.line(1.2, 10.0))


def published(model, method, *, is_memory):
    """Return a published series."""
    return next(
        (each.batches, each.values)
        for each in SERIES
        if (each.model, each.method, each.is_memory) == (model, method, is_memory)
    )


def test_a_line_is_found():
    """Exactly, with what was measured beside it."""
    found = fit_series(X, 3.0 * X + 5.0)
    assert ("line", "") == (found.form, found.refused)
    assert (3.0, 5.0) == pytest.approx((found.slope, found.intercept))
    assert (1.0, 16.0) == (found.lowest, found.highest)
    assert (1.0, 0.0) == pytest.approx((found.r2, found.loo_error))


@pytest.mark.parametrize("place", [3.0, 4.0, 7.5])
def test_a_knee_is_found(place):
    """Wherever it lies between the points."""
    x = np.array([1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0])
    found = fit_series(x, 2.0 * np.maximum(x, place) + 1.0)
    assert "knee" == found.form
    assert (2.0, 1.0, place) == pytest.approx(
        (found.slope, found.intercept, found.knee)
    )


def test_what_no_line_explains_is_refused():
    """Two points, DTR's memory, which saturates, and what falls with the batch."""
    assert "2 batch sizes" in fit_series([1, 2], [10.0, 20.0]).refused
    found = fit_series(*published("WRN-50-2", "DTR", is_memory=True))
    assert "no line fits" in found.refused
    assert "falls" in fit_series(X, 100.0 - 5.0 * X).refused
    flat = fit_series(X, 100.0 - 0.05 * X)
    assert ("", 0.0) == (flat.refused, flat.slope)


def test_every_published_verdict():
    """By the two whole models, and by the p-score.

    Throughputs to little more than a hundredth, in the median of 20 methods.
    """
    errors = []
    for plain, mine in pairs():
        is_faster = mine.most_throughput > plain.most_throughput
        verdict = compare(plain.fitted, mine.fitted, plain.memory_bytes)
        score = p_score(plain.fitted, mine.fitted)
        assert is_faster is verdict.pays
        assert is_faster == (score > p_point(plain.fitted, plain.memory_bytes))
        assert verdict.method_batch > verdict.plain_batch
        best = mine.fitted.best_throughput(mine.memory_bytes)
        errors.append(abs(best.samples_per_second / mine.most_throughput - 1.0))
    assert 20 == len(errors)
    assert 0.012 > statistics.median(errors)


def test_no_batch_is_faster_than_the_best():
    """Of all that fit, with knees, and lines of seconds below 0."""
    rng = np.random.default_rng(1)
    at_turn = 0
    for _ in range(100):
        knee = rng.uniform(1.0, 20.0) * rng.integers(0, 2)
        slope = rng.uniform(0.1, 2.0)
        # At the knee seconds are positive, whatever they would be at 0.
        fixed = rng.uniform(-0.9 * slope * max(1.0, knee), 20.0)
        seconds = Series(form="knee", slope=slope, intercept=fixed, knee=knee)
        model = MethodModel("drawn", Series.line(rng.uniform(5, 50), 100.0), seconds)
        memory = rng.uniform(200.0, 2000.0)
        best, largest = model.best_throughput(memory), model.largest_batch(memory)
        assert model.memory.predict(largest) <= memory * (1.0 + 1e-9)
        batches = np.arange(1.0, largest + 1e-6)
        rates = batches / seconds.predict(batches)
        assert rates.max(initial=0.0) <= best.samples_per_second * (1.0 + 1e-9)
        at_turn += 0.0 < best.batch < largest
    assert at_turn > 5


def test_a_verdict_says_both_sides():
    """Batches, throughputs and their ratio; and what makes it fit pays."""
    verdict = compare(PLAIN, SAVING, 2000.0)
    assert (10.0, 50.0) == (verdict.plain_batch, verdict.method_batch)
    assert (10.0, 0.5) == verdict.plain_best
    assert 50.0 / 70.0 / 0.5 == pytest.approx(verdict.ratio)
    assert (True, "") == (verdict.pays, verdict.refused)
    alone = compare(PLAIN, SAVING, 1050.0)
    assert (0.0, math.inf, True) == (alone.plain_batch, alone.ratio, alone.pays)
    neither = compare(PLAIN, SAVING, 1010.0)
    assert math.isnan(neither.ratio)
    assert "not a single sample fits" in neither.refused
