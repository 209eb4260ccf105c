"""Lines of bytes and seconds, and which method has the best throughput in a memory."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.proofs.papaya import SERIES
from mimose.predictors import fit_series

X = np.array([1.0, 2.0, 4.0, 8.0, 16.0])


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
    assert (0.0, "") == (found.knee, found.refused)
    assert (3.0, 5.0) == pytest.approx((found.slope, found.intercept))
    assert (1.0, 16.0) == (found.lowest, found.highest)
    assert 0.0 == pytest.approx(found.loo_error)


@pytest.mark.parametrize("place", [3.0, 4.0, 7.5])
def test_a_knee_is_found(place):
    """Wherever it lies between the points."""
    x = np.array([1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0])
    found = fit_series(x, 2.0 * np.maximum(x, place) + 1.0)
    assert (2.0, 1.0, place) == pytest.approx(
        (found.slope, found.intercept, found.knee)
    )


def test_what_no_line_explains_is_refused():
    """Two points, DTR's memory, which saturates, and what falls with the batch."""
    assert "2 batch sizes" in fit_series([1, 2], [10.0, 20.0]).refused
    found = fit_series(*published("WRN-50-2", "DTR", is_memory=True))
    assert "no line fits" in found.refused
    assert "falls" in fit_series(X, 100.0 - 5.0 * X).refused
    flat = fit_series(X, 100.0 - 0.05 * X)
    assert ("", 0.0) == (flat.refused, flat.slope)
