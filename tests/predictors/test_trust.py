"""Fits that start from the last one: the same where readings are exact, and cheap."""

from __future__ import annotations

import numpy as np
import pytest

from mimose.predictors import (
    EnvelopeRegressor,
    PolynomialRegressor,
    Trust,
    best_fit,
    polynomial,
)


@pytest.fixture
def n_searches(monkeypatch):
    """Count the searches for terms."""
    made = []
    search = polynomial.smallest_set

    def counted(*args, **kwargs):
        made.append(args)
        return search(*args, **kwargs)

    monkeypatch.setattr(polynomial, "smallest_set", counted)
    return lambda: len(made)


@pytest.fixture
def shapes():
    """Return 40 distinct shapes of a batch and a length."""
    random = np.random.default_rng(0)
    drawn = {tuple(map(int, random.integers(8, 400, 2))) for _ in range(60)}
    return sorted(drawn, key=lambda shape: shape[0] * 7919 % 401)[:40]


def _fit(value, shapes, noise=0.0, like=None, *, is_excess=False):
    make = EnvelopeRegressor if is_excess else PolynomialRegressor
    readings = {shape: (float(value(*shape)),) for shape in shapes}
    trust = Trust(noise, 1e9, is_excess, len(shapes))
    return best_fit(
        lambda noise: make(noise=noise), readings, trust, shapes[:1], like
    ).fit


def _attention(batch, length):
    return 4096.0 * batch * length + 48.0 * batch * length**2 + 512.0


def _larger_of_two(batch, length):
    return max(2e4 * batch * length, 2e4 * length**2 + 3e3 * batch)


@pytest.mark.parametrize(
    ("value", "is_excess"),
    [(_attention, False), (_attention, True), (_larger_of_two, True)],
)
def test_exact_readings_find_what_a_search_would(value, is_excess, shapes, n_searches):
    """With any number of shapes more the terms stay, and nothing is searched for."""
    like = _fit(value, shapes[:20], is_excess=is_excess)
    before = n_searches()

    again = _fit(value, shapes, like=like, is_excess=is_excess)

    assert before == n_searches()
    anew = _fit(value, shapes, is_excess=is_excess)
    assert like.is_exact and again.is_exact and anew.is_exact
    assert (anew.n_shapes, anew.loo_error < 1.0) == (again.n_shapes, True)
    for shape in [*shapes, (500, 700), (3, 5)]:
        assert anew.predict(shape) == pytest.approx(again.predict(shape), rel=1e-12)


def test_exact_terms_that_fail_are_searched_for_again(shapes, n_searches):
    """Another shape that they do not tell to the byte makes another search."""

    def further(batch, length):
        return _attention(batch, length) + (17.0 * length if length > 200 else 0.0)

    small = [shape for shape in shapes if shape[1] <= 200]
    like = _fit(further, small)
    before = n_searches()

    again = _fit(further, [*small, *shapes], like=like)

    assert like.is_exact and not again.is_exact
    assert before < n_searches()
