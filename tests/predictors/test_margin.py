"""The safety margin."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mimose.predictors import Margin

GB = 1e9


def feed(margin, residuals):
    """Observe growths of 1 GB that came out off by the given fractions."""
    for residual in residuals:
        margin.observe(GB, GB * (1.0 + residual))
    return margin


def test_starts_wide():
    """Before any observation the margin is the initial one and nothing was missed."""
    margin = Margin()

    assert 0.06 == margin.fraction
    assert 1.0 == margin.coverage
    assert 0 == margin.n


def test_shrinks():
    """Forty good predictions bring it near the floor, hundreds onto it."""
    fractions = []
    for seed in range(30):
        residuals = np.random.default_rng(seed).normal(0, 0.003, 40)
        fractions.append(feed(Margin(), residuals).fraction)
    late = feed(Margin(), np.random.default_rng(0).normal(0, 0.003, 2000))

    assert np.median(fractions) <= 0.0115
    assert np.percentile(fractions, 95) <= 0.013
    assert 0.01 == late.fraction


def test_never_below_the_floor():
    """Predictions that are far too high do not take it below the floor."""
    assert 0.02 == feed(Margin(floor=0.02), [-0.3] * 500).fraction


def test_miss_is_answered_at_once():
    """After a miss the margin covers it with a quarter to spare."""
    margin = feed(Margin(), [0.0] * 100)

    feed(margin, [0.04])

    assert 1 == margin.misses
    assert 0.05 == pytest.approx(margin.fraction)
    assert 100 / 101 == pytest.approx(margin.coverage)


def test_answer_fades():
    """The answer to a single miss is gone a hundred observations later."""
    margin = feed(Margin(), [0.0] * 100 + [0.04])

    fractions = [feed(margin, [0.0]).fraction for _ in range(100)]

    assert fractions == sorted(fractions, reverse=True)
    assert 0.02 < fractions[49] < 0.03
    assert 0.01 == fractions[-1]


def test_repeated_misses_last():
    """When misses repeat, the answer fades more slowly."""
    margin = feed(Margin(), [0.0] * 100 + [0.04] + [0.0] * 99 + [0.04])

    feed(margin, [0.0] * 100)

    assert 0.025 == pytest.approx(margin.fraction)


@pytest.mark.parametrize("kind", ["normal", "heavy", "uniform"])
def test_coverage(kind):
    """In the long run few observations are above the margin, whatever they follow."""
    random = np.random.default_rng(5)
    residuals = {
        "normal": random.normal(0, 0.01, 4000),
        "heavy": 0.003 * random.standard_t(3, 4000),
        "uniform": random.uniform(0, 0.05, 4000),
    }[kind]

    assert feed(Margin(), residuals).coverage >= 0.99


def test_follows_a_change():
    """A lasting bias is learned, and forgotten when it is over."""
    margin = feed(Margin(window=50), [0.0] * 50 + [0.03] * 200)

    assert margin.misses <= 2
    assert 0.03 <= margin.fraction <= 0.0376
    assert 0.01 == feed(margin, [0.0] * 200).fraction


def test_bytes():
    """The margin in bytes adds the noise of a reading to the share."""
    margin = Margin(noise_bytes=5.0)

    assert 65.0 == pytest.approx(margin.bytes(1000.0))
    assert 5.0 == margin.bytes(-3.0)


def test_within_bytes_is_no_miss():
    """An observation within the bytes kept free is none, one byte more is."""
    margin = Margin(noise_bytes=1e6)
    free = margin.bytes(GB)

    margin.observe(GB, GB + free - 1.0)
    assert 0 == margin.misses

    margin = Margin(noise_bytes=1e6)
    margin.observe(GB, GB + free + 1.0)
    assert 1 == margin.misses


@pytest.mark.parametrize(
    ("predicted", "observed"),
    [(GB, math.nan), (math.inf, GB), (math.nan, GB), (0.0, GB), (GB, math.inf)],
)
def test_says_nothing(predicted, observed):
    """Numbers that are not finite and growths of nothing are passed over."""
    margin = Margin()
    margin.observe(predicted, observed)

    assert 0 == margin.n


def test_absurd_reading():
    """One absurd reading is a miss with a bounded answer."""
    margin = Margin()
    margin.observe(1.0, GB)

    assert 5.0 == margin.fraction


def test_state():
    """A margin restored from JSON goes on as the first would have."""
    random = np.random.default_rng(0)
    margin = feed(Margin(window=64), random.normal(0, 0.01, 300))

    copy = Margin(window=64)
    copy.load_state_dict(json.loads(json.dumps(margin.state_dict())))

    more = random.normal(0, 0.01, 50)
    assert margin.fraction == pytest.approx(copy.fraction)
    assert feed(margin, more).fraction == pytest.approx(feed(copy, more).fraction)
    assert (margin.n, margin.misses) == (copy.n, copy.misses)


@pytest.mark.parametrize(
    "params",
    [
        {"floor": 0.1},
        {"floor": -0.1},
        {"quantile": 1.0},
        {"window": 0},
        {"noise_bytes": -1.0},
    ],
)
def test_bad_parameters(params):
    """Parameters out of range are refused."""
    with pytest.raises(ValueError, match="got"):
        Margin(**params)


def test_repr():
    """The representation shows where it stands."""
    assert "Margin(fraction=0.0600, n=0, misses=0)" == repr(Margin())
