"""Lines and knees of bytes and seconds by batch size."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.proofs.papaya import SERIES
from mimose.predictors import Series, fit_series

X = np.array([1.0, 2.0, 4.0, 8.0, 16.0])


def knee(slope=2.0, place=4.0, intercept=1.0):
    """Return a knee that is known."""
    return Series(form="knee", slope=slope, intercept=intercept, knee=place)


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
    assert (1.0, 16.0, 5) == (found.lowest, found.highest, found.n_points)
    assert (1.0, 0.0, 0.0) == pytest.approx((found.r2, found.mape, found.loo_error))


@pytest.mark.parametrize("place", [3.0, 4.0, 7.5])
def test_a_knee_is_found(place):
    """Wherever it lies between the points."""
    x = np.array([1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0])
    found = fit_series(x, 2.0 * np.maximum(x, place) + 1.0)
    assert "knee" == found.form
    assert (2.0, 1.0, place) == pytest.approx(
        (found.slope, found.intercept, found.knee)
    )


def test_straight_series_seldom_get_a_knee():
    """Noise of 10% bends one series in twenty at most."""
    rng = np.random.default_rng(0)
    forms = [
        fit_series(X, (5.0 + X) * (1.0 + 0.1 * rng.standard_normal(5))).form
        for _ in range(100)
    ]
    assert forms.count("knee") <= 5


@pytest.mark.parametrize("name", ["BERT-L", "GPT3-S"])
def test_plain_seconds_are_flat_at_first(name):
    """A device that is not full takes as long for fewer samples."""
    x, y = published(name, "plain", is_memory=False)
    found, line = fit_series(x, y), fit_series(x, y, form="line")
    assert "knee" == found.form
    assert 2.0 * found.loo_error < line.loo_error


def test_fewer_than_four_points_make_a_line():
    """And two leave nothing to check it with."""
    three = fit_series([1, 2, 8], [10.0, 10.0, 40.0])
    assert "line" == three.form
    two = fit_series([1, 2], [10.0, 20.0])
    assert "2 batch sizes" in two.refused
    assert math.isnan(two.loo_error)
    assert "2 batch sizes" in fit_series([1, 1, 2, 2], [10.0, 10.0, 20.0, 20.0]).refused


def test_what_no_line_explains_is_refused():
    """DTR's memory saturates, and then falls."""
    found = fit_series(*published("WRN-50-2", "DTR", is_memory=True))
    assert "no line explains it" in found.refused
    assert 0.7 > found.r2


def test_what_falls_is_refused():
    """Memory that falls with the batch is not flat, unless by next to nothing."""
    assert "falls" in fit_series(X, 100.0 - 5.0 * X).refused
    flat = fit_series(X, 100.0 - 0.05 * X)
    assert ("", 0.0) == (flat.refused, flat.slope)


def test_the_inverse_is_the_largest_that_fits():
    """Above a floor; nothing below it, and everything where the series is flat."""
    series = knee()
    assert 9.0 == series.floor == series.predict(1.0) == series.predict(4.0)
    assert (0.0, 4.0, 10.0) == tuple(map(series.inverse, (8.9, 9.0, 21.0)))
    flat = Series.line(0.0, 5.0)
    assert (0.0, math.inf) == (flat.inverse(4.9), flat.inverse(5.0))
    assert 0.0 == Series.line(2.0, 5.0).inverse(4.0)


@pytest.mark.parametrize(
    ("x", "y", "options", "said"),
    [
        ([1, 2, 3], [1.0, 2.0], {}, r"shape \(3,\) and y \(2,\)"),
        ([1, 1], [1.0, 2.0], {}, "two different batch sizes"),
        ([1, 2], [1.0, 0.0], {}, "y is .* positive"),
        ([0, 2], [1.0, 1.0], {}, "x is .* positive"),
        ([1, 2], [1.0, math.nan], {}, "positive, finite"),
        ([1, 2], [1.0, 2.0], {"form": "curve"}, "'curve'"),
        ([1, 2, 3], [1.0, 2.0, 3.0], {"form": "knee"}, "needs 4 batch sizes, not 3"),
    ],
)
def test_what_cannot_be_fitted_says_why(x, y, options, said):
    """With the numbers."""
    with pytest.raises(ValueError, match=said):
        fit_series(x, y, **options)
