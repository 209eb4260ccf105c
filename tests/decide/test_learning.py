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
