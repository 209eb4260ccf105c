"""An upper bound of growth, given its prediction."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mimose.predictors import GrowthBound

GB = 1e9


def feed(bound, residuals):
    """Observe growths of 1 GB that came out off by the given fractions."""
    for residual in residuals:
        bound.observe(GB, GB * (1.0 + residual))
    return bound


def test_starts_wide():
    """Before any observation the margin is the initial one and nothing was missed."""
    bound = GrowthBound()

    assert 0.06 == bound.margin()
    assert 1.0 == bound.coverage
    assert 0 == bound.n


def test_shrinks():
    """Forty good predictions bring it near the floor, hundreds onto it."""
    fractions = []
    for seed in range(30):
        residuals = np.random.default_rng(seed).normal(0, 0.003, 40)
        fractions.append(feed(GrowthBound(), residuals).margin())
    late = feed(GrowthBound(), np.random.default_rng(0).normal(0, 0.003, 2000))

    assert np.median(fractions) <= 0.0115
    assert np.percentile(fractions, 95) <= 0.013
    assert 0.01 == late.margin()


def test_miss_is_answered_at_once():
    """After a miss the margin covers it with a quarter to spare."""
    bound = feed(GrowthBound(), [0.0] * 100)

    feed(bound, [0.04])

    assert 1 == bound.misses
    assert 0.05 == pytest.approx(bound.margin())
    assert 100 / 101 == pytest.approx(bound.coverage)


def test_answer_fades():
    """The answer to a single miss is gone a hundred observations later."""
    bound = feed(GrowthBound(), [0.0] * 100 + [0.04])

    fractions = [feed(bound, [0.0]).margin() for _ in range(100)]

    assert fractions == sorted(fractions, reverse=True)
    assert 0.02 < fractions[49] < 0.03
    assert 0.01 == fractions[-1]


@pytest.mark.parametrize("kind", ["normal", "heavy", "uniform"])
def test_coverage(kind):
    """In the long run few observations are above the margin, whatever they follow."""
    random = np.random.default_rng(5)
    residuals = {
        "normal": random.normal(0, 0.01, 4000),
        "heavy": 0.003 * random.standard_t(3, 4000),
        "uniform": random.uniform(0, 0.05, 4000),
    }[kind]

    assert feed(GrowthBound(), residuals).coverage >= 0.99


def test_follows_a_change():
    """A lasting bias is learned, and forgotten when it is over."""
    bound = feed(GrowthBound(window=50), [0.0] * 50 + [0.03] * 200)

    assert bound.misses <= 2
    assert 1.03 * GB <= bound.allowed(GB) <= 1.04001 * GB
    assert 1.01 * GB == pytest.approx(feed(bound, [0.0] * 200).allowed(GB))


def test_within_what_is_allowed_is_no_miss():
    """An observation within the bytes kept free is none, one byte more is."""
    bound = GrowthBound(noise_bytes=1e6)
    allowed = bound.allowed(GB)

    bound.observe(GB, allowed - 1.0)
    assert 0 == bound.misses

    bound = GrowthBound(noise_bytes=1e6)
    bound.observe(GB, allowed + 1.0)
    assert 1 == bound.misses


@pytest.mark.parametrize("residuals", [[], [0.02] * 20, [0.0] * 99 + [0.2]])
@pytest.mark.parametrize("headroom", [-1e6, 5e7, GB])
def test_largest_is_what_comes_to_be_allowed(residuals, headroom):
    """What may grow by all of the headroom, and nothing below the noise."""
    bound = feed(GrowthBound(noise_bytes=1e6), residuals)

    largest = bound.largest(headroom)

    if headroom > 0.0:
        assert headroom == pytest.approx(bound.allowed(largest))
    else:
        assert 0.0 == largest


def test_more_is_kept_beyond_what_was_measured():
    """In proportion, until a fit is trusted no farther."""
    bound = feed(GrowthBound(), [0.0] * 200)

    assert [0.01, 0.06, 0.11, 0.11] == [
        pytest.approx(bound.margin(ratio)) for ratio in (0.0, 0.5, 1.0, 3.0)
    ]
    assert [GB / 1.01, GB / 1.06, GB / 1.11] == [
        pytest.approx(bound.largest(GB, ratio)) for ratio in (0.0, 0.5, 1.0)
    ]


def test_the_noise_of_a_reading_widens_no_margin():
    """It is allowed besides; what comes on top of it counts."""
    bound = feed(GrowthBound(floor=0.0, noise_bytes=1e6), [-0.01] * 200 + [0.001] * 20)

    assert 0.0 == pytest.approx(bound.margin())
    feed(bound, [0.021])
    assert 1.25 * 0.02 == pytest.approx(bound.correction + bound.margin())


def test_state():
    """A margin restored from JSON goes on as the first would have."""
    random = np.random.default_rng(0)
    bound = feed(GrowthBound(window=64), random.normal(0, 0.01, 300))

    copy = GrowthBound(window=64)
    copy.load_state_dict(json.loads(json.dumps(bound.state_dict())))

    more = random.normal(0, 0.01, 50)
    assert bound.margin() == pytest.approx(copy.margin())
    assert feed(bound, more).margin() == pytest.approx(feed(copy, more).margin())
    assert (bound.n, bound.misses) == (copy.n, copy.misses)


@pytest.mark.parametrize(
    "params",
    [
        {"floor": 0.1},
        {"floor": -0.1},
        {"quantile": 1.0},
        {"window": 0},
        {"noise_bytes": -1.0},
        {"most_correction": -0.1},
        {"beyond": -0.1},
    ],
)
def test_bad_parameters(params):
    """Parameters out of range are refused."""
    with pytest.raises(ValueError, match="got"):
        GrowthBound(**params)
