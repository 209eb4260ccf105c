"""When steps under a plan are measured."""

import pytest

from mimose.decide.learning import Learning

NOISE = 2.0
SCALE = 1000.0


@pytest.fixture
def learning():
    """Readings that differ by two bytes."""
    return Learning(NOISE)


def _observe(learning, n, predicted, observed):
    for _ in range(n):
        learning.observe(predicted, observed, SCALE)


def test_it_ends_by_itself(learning):
    """After forty steps, however predictions come out."""
    assert learning.is_on(39)
    assert not learning.is_on(40)


def test_it_ends_where_predictions_are_near(learning):
    """Four telling ones in a row."""
    _observe(learning, 3, 500.0, 506.9)
    _observe(learning, 1, 500.0, 508.0)  # 1% and the noise are 7.1
    _observe(learning, 3, 500.0, 500.0)
    _observe(learning, 9, 249.0, 249.0)  # less than a quarter tells nothing
    assert learning.is_on(10)
    _observe(learning, 1, 500.0, 493.1)
    assert not learning.is_on(10)


@pytest.mark.parametrize("observed", [460.0, 540.0])
def test_it_begins_again_where_one_was_far_off(learning, observed):
    """In either direction, for eight steps."""
    _observe(learning, 4, 500.0, 500.0)
    assert not learning.begin_again_if_off(500.0, 510.0, 50)
    assert learning.begin_again_if_off(500.0, observed, 50)
    assert learning.is_on(57)
    assert not learning.is_on(58)


def test_with_exact_readings_half_a_percent_is_far_off():
    """There is a cause to find, where a noisy meter would shrug."""
    learning = Learning(0.0)
    _observe(learning, 4, 500.0, 500.0)
    assert not learning.begin_again_if_off(500.0, 502.4, 50)
    assert learning.begin_again_if_off(500.0, 503.0, 50)


def test_how_soon_it_begins_again_doubles(learning):
    """So that there is an end of it where it does not help."""
    times = []
    for n in range(200):
        _observe(learning, 1, 500.0, 600.0)
        if learning.begin_again_if_off(500.0, 600.0, n):
            times.append(n + 1)
    assert times == [1, 10, 28, 64, 136]
