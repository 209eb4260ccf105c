"""What readings are over a fit."""

import math

import pytest

from mimose.predictors import Residuals


def test_the_ratio_is_that_of_the_readings_where_there_are_any():
    """The ratio is that of the readings, in whatever order they come."""
    found = Residuals.of([8, 2], [8.0, 2.0], [8.8, 1.8])
    assert found.at(2) == pytest.approx(0.9)
    assert found.at(8) == pytest.approx(1.1)


def test_between_two_sizes_it_is_followed_along_their_logarithm():
    """Half way between 2 and 8, on a logarithmic scale, is 4."""
    assert Residuals.of([2, 8], [1, 1], [0.9, 1.1]).at(4) == pytest.approx(1.0)


def test_beyond_the_sizes_it_stays():
    """Before the first and beyond the last size the ratio is as there."""
    found = Residuals.of([2, 8], [1, 1], [0.9, 1.1])
    assert found.at(1) == pytest.approx(0.9)
    assert found.at(1000) == pytest.approx(1.1)


def test_a_fit_that_is_not_positive_is_left_as_it_is():
    """A ratio to 0, or to less, is none."""
    assert Residuals.of([2, 8], [0.0, 1.0], [1.0, 1.0]).at(2) == 1.0
    assert not math.isnan(Residuals().at(5))
