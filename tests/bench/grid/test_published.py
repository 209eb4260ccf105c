"""The Mimose paper's figures."""

import pytest

from mimose.bench.grid.published import PUBLISHED


@pytest.mark.parametrize("task", PUBLISHED)
def test_budgets_as_shares(task):
    """All lie between recomputing everything and unlimited memory."""
    for strategy in PUBLISHED[task].points:
        shares = [share for share, _ in PUBLISHED[task].shares(strategy)]
        assert shares == sorted(shares)
        assert 0 < shares[0] < shares[-1] < 1.01


def test_one_of_them():
    """5 GB of 3.36 to 9.95 is a quarter of the way."""
    assert PUBLISHED["mc-roberta"].shares("mimose")[1] == (
        pytest.approx(0.249, abs=0.001),
        1.065,
    )
