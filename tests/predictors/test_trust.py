"""The range in which a fit may be asked."""

from __future__ import annotations

import pytest

from mimose.predictors import covers


@pytest.mark.parametrize(
    ("sizes", "stretch", "expected"),
    [
        ((16, 20), 1.0, True),
        ((16, 300), 1.0, True),
        ((16, 301), 1.0, False),
        ((16, 375), 1.25, True),
        ((16, 376), 1.25, False),
        ((8, 100), 1.0, True),
        ((17, 100), 1.25, False),
        ((1, 1), 1.0, True),
    ],
)
def test_covers(sizes, stretch, expected):
    """Up to the largest seen, stretched where it varied; there is no lower end."""
    assert expected is covers((16, 20), (16, 300), sizes, stretch)


def test_lengths_differ():
    """Sizes of another number of columns are refused."""
    with pytest.raises(ValueError, match="zip"):
        covers((1,), (2,), (1, 2))


def test_stretch_below_one():
    """A stretch that shrinks is refused."""
    with pytest.raises(ValueError, match=r"at least 1, got 0\.5"):
        covers((1,), (2,), (1,), 0.5)
