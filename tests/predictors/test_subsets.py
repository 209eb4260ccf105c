"""Parts of the search for the smallest set."""

from __future__ import annotations

import numpy as np
import pytest

from mimose.predictors import _subsets


@pytest.mark.parametrize("count", [1, 5, 12, 40])
def test_the_lowest_are_those_that_a_sort_puts_first(count):
    """Among equal losses too, so that no plan depends on how they are found."""
    losses = np.random.default_rng(count).integers(0, 9, 40).astype(float)

    found = _subsets._lowest(losses, count)

    assert np.argsort(losses, kind="stable")[:count].tolist() == found[:count].tolist()


def test_columns_are_made_orthogonal_in_parts_as_at_once(monkeypatch):
    """Pauses in between change nothing."""
    random = np.random.default_rng(0)
    left, vectors = random.random((3, 7, 5)), random.random((11, 5))
    parents = random.integers(0, 3, 11)
    at_once = _subsets._made_orthogonal(left, parents, vectors)

    monkeypatch.setattr(_subsets, "_AT_ONCE", 2 * 7 * 5)

    assert np.array_equal(at_once, _subsets._made_orthogonal(left, parents, vectors))
    along = np.einsum("smn,sn->sm", left[parents], vectors)
    expected = left[parents] - along[:, :, None] * vectors[:, None, :]
    assert expected == pytest.approx(at_once)
