"""What is kept free: by what predictions missed, and by what the allocator needs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mimose.predictors import FragmentationAllowance, LearnedLimit, SafetyMargin

GB = 1e9
ROOM = 100.0


def feed(margin, misses):
    """Observe growths of 1 GB that came out off by the given fractions."""
    for missed in misses:
        margin.observe(GB, GB * (1.0 + missed))
    return margin


def test_it_starts_wide_and_shrinks():
    """Forty good predictions bring it near the floor, hundreds onto it."""
    assert 0.06 == SafetyMargin().share
    random = np.random.default_rng(0)
    assert 0.015 > feed(SafetyMargin(), random.normal(0, 0.003, 40)).share
    assert 0.01 == feed(SafetyMargin(), random.normal(0, 0.002, 2000)).share


def test_a_miss_is_answered_at_once_and_for_99_steps():
    """By as much as was missed; an absurd reading counts as half."""
    margin = feed(SafetyMargin(), [0.0] * 100 + [0.04])
    assert 0.04 == pytest.approx(margin.share, abs=1e-4)
    assert 0.04 == pytest.approx(feed(margin, [0.0] * 98).share, abs=1e-4)
    assert 0.01 == feed(margin, [0.0]).share
    assert 0.5 == pytest.approx(feed(margin, [40.0]).share)


@pytest.mark.parametrize("predicted", [0.0, -5.0, float("inf"), float("nan")])
def test_what_was_no_prediction_teaches_nothing(predicted):
    """Neither a miss nor the end of the first doubt follows from it."""
    margin = SafetyMargin()
    margin.observe(predicted, 1000.0)
    assert SafetyMargin().share == margin.share
    assert 0.0 == margin.largest(0.0)


@pytest.mark.parametrize("kind", ["normal", "heavy", "uniform"])
def test_coverage(kind):
    """In the long run few observations are above the margin, whatever they follow."""
    random = np.random.default_rng(5)
    misses = {
        "normal": random.normal(0, 0.01, 4000),
        "heavy": 0.003 * random.standard_t(3, 4000),
        "uniform": random.uniform(0, 0.05, 4000),
    }[kind]
    margin, n_above = SafetyMargin(), 0
    for missed in misses.tolist():
        n_above += GB * (1.0 + missed) > margin.allowed(GB)
        feed(margin, [missed])
    assert n_above <= 0.012 * len(misses)


@pytest.mark.parametrize("misses", [[], [0.02] * 20, [0.0] * 99 + [0.2]])
@pytest.mark.parametrize("headroom", [-1e6, 5e7, GB])
def test_largest_is_what_comes_to_be_allowed(misses, headroom):
    """What may grow by all of the headroom, and nothing below the noise."""
    margin = feed(SafetyMargin(noise_bytes=1e6), misses)
    largest = margin.largest(headroom)
    if headroom > 0.0:
        assert headroom == pytest.approx(margin.allowed(largest))
    else:
        assert 0.0 == largest


def test_more_is_kept_beyond_what_was_measured():
    """In proportion, until a fit is trusted no farther."""
    margin = feed(SafetyMargin(), [0.0] * 200)
    assert [GB / 1.01, GB / 1.06, GB / 1.11, GB / 1.11] == [
        pytest.approx(margin.largest(GB, ratio)) for ratio in (0.0, 0.5, 1.0, 3.0)
    ]


def test_a_margin_goes_on_from_its_state():
    """As the first would have, after JSON."""
    random = np.random.default_rng(0)
    margin, other = feed(SafetyMargin(), random.normal(0, 0.01, 30)), SafetyMargin()
    other.load_state_dict(json.loads(json.dumps(margin.state_dict())))
    assert margin.share == pytest.approx(other.share)


def _taught(gaps, requested=80.0, **options):
    """Return an allowance after steps that leave so many bytes in gaps."""
    allowance = FragmentationAllowance(**options)
    for gap in gaps:
        allowance.observe(requested, requested + gap, ROOM)
    return allowance


def test_an_allowance_is_the_largest_gap_of_the_last_large_steps():
    """The prior counts until enough is known; it stays within bounds."""
    assert _taught([]).value == 1.25
    assert _taught([], prior=1.08).value == 1.08
    assert _taught([0.0] * 7).value == 1.25
    assert _taught([0.0] * 8).value == 1.02
    assert _taught([32.0]).value == pytest.approx(1.4)
    assert _taught([24.0, *[8.0] * 15]).value == pytest.approx(1.3)
    assert _taught([24.0, *[8.0] * 16]).value == pytest.approx(1.1)
    assert _taught([40.0] * 20, requested=40.0).value == 1.25
    assert (_taught([0.0] * 20).value, _taught([300.0]).value) == (1.02, 1.5)
    other = FragmentationAllowance()
    other.load_state_dict(json.loads(json.dumps(_taught([8.0] * 12).state_dict())))
    assert other.value == pytest.approx(1.1)


@pytest.mark.parametrize("n_failures", [1, 2])
def test_a_limit_falls_when_memory_runs_out_and_rises_slowly(n_failures):
    """After hundreds of quiet steps, twice as many a failure; to the budget at most."""
    limit = LearnedLimit()
    limit.step(1000.0)
    assert limit.bytes > 1000.0
    for _ in range(n_failures):
        limit.ran_out(600.0)
    low = limit.bytes
    assert low < 600.0
    limit.step(500.0)  # a budget below it tells nothing
    for _ in range(256 * n_failures):
        limit.step(1000.0)
    assert low == limit.bytes
    limit.step(1000.0)
    assert low < limit.bytes < 1.01 * 600
    for _ in range(2000):
        limit.step(1000.0)
    assert 1000.0 <= limit.bytes < 1004.0


def test_a_limit_does_not_ratchet():
    """A failure now and then costs each time the same, however many came before."""
    limit = LearnedLimit()

    def n_low():
        limit.ran_out(600.0)
        steps = 0
        while limit.bytes < 1000.0:
            limit.step(1000.0)
            steps += 1
        for _ in range(600):
            limit.step(1000.0)
        return steps

    assert {256 + 106} == {n_low() for _ in range(30)}
    for _ in range(30):
        limit.ran_out(600.0)
    for _ in range(16_384 + 106):
        limit.step(1000.0)
    assert limit.bytes >= 1000.0
