"""The best throughput within a memory, and which method has it."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from benchmarks.proofs.papaya import pairs
from mimose.predictors import MethodModel, Series, compare, p_point, p_score

PLAIN = MethodModel("plain", Series.line(100.0, 1000.0), Series.line(1.0, 10.0))
SAVING = MethodModel("saving", Series.line(20.0, 1000.0), Series.line(1.2, 10.0))


def drawn(rng):
    """Return a model with or without knees, some with a line of seconds below 0."""
    bends = rng.uniform(1.0, 20.0, 2) * rng.integers(0, 2, 2)
    slope = rng.uniform(0.1, 2.0)
    # At the knee seconds are positive, whatever they would be at 0.
    fixed = rng.uniform(-0.9 * slope * max(1.0, bends[1]), 20.0)
    form = ["line" if bend == 0.0 else "knee" for bend in bends]
    return MethodModel(
        "drawn",
        Series(form=form[0], slope=rng.uniform(5, 50), intercept=100.0, knee=bends[0]),
        Series(form=form[1], slope=slope, intercept=fixed, knee=bends[1]),
    )


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
        assert "raises" == verdict.batch
        best = mine.fitted.best_throughput(mine.memory_bytes)
        errors.append(abs(best.samples_per_second / mine.most_throughput - 1.0))
    assert 20 == len(errors)
    assert 0.012 > statistics.median(errors)


def test_the_largest_batch_just_fits():
    """One more does not."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        model, memory = drawn(rng), rng.uniform(50.0, 2000.0)
        batch = model.largest_batch(memory)
        assert memory < model.peak_bytes(batch + 1.0)
        if batch:
            assert memory * (1.0 + 1e-8) >= model.peak_bytes(batch)


def test_no_batch_is_faster_than_the_best():
    """Of all that fit, whole or not."""
    rng = np.random.default_rng(1)
    at_turn = 0
    for _ in range(200):
        model, memory = drawn(rng), rng.uniform(200.0, 2000.0)
        best = model.best_throughput(memory)
        batches = np.arange(1.0, model.largest_batch(memory) + 1.0)
        rates = [batch / model.step_seconds(batch) for batch in batches]
        assert max(rates, default=0.0) == pytest.approx(best.samples_per_second)
        at_turn += 0.0 < best.batch < model.largest_batch(memory)
        free = model.best_throughput(memory, whole=False)
        assert free.samples_per_second >= best.samples_per_second * (1.0 - 1e-9)
    assert at_turn > 10


def fitted(slope, intercept, **changes):
    """Return a line that was measured at batches of 4 to 16."""
    told = {"lowest": 4.0, "highest": 16.0, **changes}
    return Series(form="line", slope=slope, intercept=intercept, **told)


def test_a_verdict_says_both_sides():
    """Batches, throughputs and their ratio."""
    verdict = compare(PLAIN, SAVING, 2000.0)
    assert (10.0, 50.0, "raises") == (
        verdict.plain_batch,
        verdict.method_batch,
        verdict.batch,
    )
    assert (10.0, 0.5) == verdict.plain_best
    assert 50.0 / 70.0 / 0.5 == pytest.approx(verdict.ratio)
    assert (True, True, "") == (verdict.pays, verdict.exists, verdict.refused)
    assert "lowers" == compare(SAVING, PLAIN, 2000.0).batch
    assert "same" == compare(PLAIN, PLAIN, 2000.0).batch


def test_the_rule_is_exact_where_what_is_fixed_is_shared():
    """The p-score says what the two best throughputs say."""
    rng = np.random.default_rng(2)
    said = []
    for _ in range(300):
        base, fixed = rng.uniform(0.0, 1e3), rng.uniform(0.1, 50.0)
        a, g = rng.uniform(1.0, 100.0), rng.uniform(0.1, 5.0)
        plain = MethodModel("plain", Series.line(a, base), Series.line(g, fixed))
        mine = MethodModel(
            "mine",
            Series.line(a * rng.uniform(0.05, 0.95), base),
            Series.line(g * rng.uniform(1.01, 3.0), fixed),
        )
        memory = base + a * rng.uniform(2.0, 50.0)
        verdict = compare(plain, mine, memory, whole=False)
        said.append(p_score(plain, mine) > p_point(plain, memory))
        assert said[-1] == verdict.pays
    assert 50 < sum(said) < 250


def test_no_verdict_from_what_was_refused():
    """And it says of which series."""
    bad = MethodModel("bad", fitted(1.0, 9.0, refused="it falls"), fitted(1.0, 1.0))
    verdict = compare(PLAIN, bad, 20.0)
    assert "bad's memory: it falls" in verdict.refused
    assert (None, False) == (verdict.pays, verdict.exists)


@pytest.mark.parametrize(
    ("memory", "times"), [(17.0, 1.0), (33.0, 2.0), (34.0, 33 / 16), (2.0, 4.0)]
)
def test_no_verdict_far_from_what_was_measured(memory, times):
    """Up to twice the largest batch, or half the smallest."""
    small = MethodModel("small", fitted(1.0, 1.0), fitted(1.0, 1.0))
    verdict = compare(small, small, memory)
    assert times == pytest.approx(verdict.extrapolation)
    assert (times > 2.0) == ("beyond what was measured" in verdict.refused)
    assert not compare(small, small, memory, reach=4.0).refused


def test_no_verdict_within_the_noise():
    """Where the interval has one inside."""
    assert "noise" in compare(PLAIN, SAVING, 2000.0, interval=(0.9, 1.6)).refused
    assert compare(PLAIN, SAVING, 2000.0, interval=(1.1, 1.6)).pays


def test_what_makes_it_fit_pays():
    """Against nothing; and where neither fits there is no verdict."""
    verdict = compare(PLAIN, SAVING, 1050.0)
    assert (0.0, math.inf, True) == (verdict.plain_batch, verdict.ratio, verdict.pays)
    neither = compare(PLAIN, SAVING, 1010.0)
    assert math.isnan(neither.ratio)
    assert "not one sample fits" in neither.refused
