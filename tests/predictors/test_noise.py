"""What repeated readings support."""

from __future__ import annotations

import numpy as np
import pytest

from mimose.predictors import (
    Readings,
    compare,
    fit_model,
    noise_ceiling,
    ratio_interval,
)

X = np.array([2.0, 4.0, 8.0, 16.0])


def readings(slope, *, noise=0.02, rounds=8, seed=0, memory=10.0, fixed=20.0):
    """Return rounds of a method with lines, whose times are noisy."""
    noisy = 1.0 + noise * np.random.default_rng(seed).standard_normal((rounds, len(X)))
    return Readings(
        X,
        np.tile(memory * X + 100.0, (rounds, 1)),
        (slope * X + fixed) * noisy,
    )


def test_a_model_of_medians():
    """One reading that is ten times too long does nothing."""
    noisy = readings(1.0, noise=0.0)
    noisy.seconds[3, 2] *= 10.0
    model = fit_model("plain", noisy)
    assert (1.0, 20.0) == pytest.approx((model.seconds.slope, model.seconds.intercept))
    assert (10.0, 100.0) == pytest.approx((model.memory.slope, model.memory.intercept))


def test_without_noise_everything_can_be_predicted():
    """And with ever more, ever less."""
    ceilings = [
        noise_ceiling(readings(1.0, noise=n).seconds, X) for n in (0.0, 0.02, 0.3)
    ]
    assert 1.0 == ceilings[0] > ceilings[1] > ceilings[2]
    assert 0.99 < ceilings[1]


def test_the_interval_is_around_the_ratio():
    """And shrinks with the noise; the seed settles it."""
    widths = []
    for noise in (0.002, 0.02):
        plain, mine = (
            readings(s, noise=noise, seed=i) for i, s in enumerate((1.0, 1.5))
        )
        low, high = ratio_interval(plain, mine, 300.0, draws=100)
        fitted = fit_model("plain", plain)
        ratio = compare(fitted, fit_model("mine", mine, plain=fitted), 300.0).ratio
        assert low <= ratio <= high
        widths.append(high - low)
        assert (low, high) == ratio_interval(plain, mine, 300.0, draws=100)
    assert 3.0 * widths[0] < widths[1]


def test_what_does_not_belong_together_is_refused():
    """With the shapes, and what to give."""
    with pytest.raises(ValueError, match=r"seconds \(2, 3\)"):
        Readings(X, np.ones((2, 4)), np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"rounds \(1, 4\)"):
        noise_ceiling(np.ones((1, 4)), X)
    with pytest.raises(ValueError, match=r"4 rounds of plain .* 8 of the"):
        ratio_interval(readings(1.0, rounds=4), readings(1.0), 300.0)
