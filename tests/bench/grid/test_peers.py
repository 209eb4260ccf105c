"""What other libraries offer."""

import pytest

pytest.importorskip("transformers")

from mimose.bench.grid.peers import _RATIOS, _tried


def _bisect(growth, headroom, growths):
    """Try what bisection asks for; return what was tried."""
    tried = []
    for ratio in _tried(growths, headroom):
        growths[str(ratio)] = growth(ratio)
        tried.append(ratio)
    return tried


@pytest.mark.parametrize("headroom", range(0, 110, 5))
def test_the_largest_ratio_that_fits_is_tried(headroom):
    """In a few trials; where none fits, the least was tried."""
    growths = {}
    tried = _bisect(lambda ratio: 10 + int(100 * ratio), headroom, growths)
    assert 3 <= len(tried) <= 4
    fits = [ratio for ratio in _RATIOS if 10 + int(100 * ratio) <= headroom]
    assert max(fits, default=0.0) in tried


def test_what_another_process_tried_is_not_tried_again():
    """One budget's trials help the next."""
    growths = {}
    first = _bisect(lambda ratio: int(100 * ratio), 40, growths)
    second = _bisect(lambda ratio: int(100 * ratio), 60, growths)
    assert set(first).isdisjoint(second)
    assert len(second) < len(first)
