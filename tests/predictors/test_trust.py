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
from mimose.predictors import trust as trust_of

NOISE = 1e3


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


def _strided(height, width):
    return 64.0 * -(-height // 2) * -(-width // 2) + 100.0


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


def test_halved_sizes_stay_halved(shapes, n_searches):
    """What a stride has halved is known as well, and needs no other search."""
    tall = [(height + 60, width + 60) for height, width in shapes]
    like = _fit(_strided, tall[:20], is_excess=True)
    before = n_searches()

    again = _fit(_strided, tall, like=like, is_excess=True)

    assert before == n_searches()
    assert _strided(501, 703) == pytest.approx(again.predict((501, 703)))


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


def _noisy(batch, length):
    return _attention(batch, length) + NOISE * ((batch * 31 + length * 17) % 5 - 2) / 2


def test_terms_of_noisy_readings_are_kept_for_a_quarter_more_shapes(shapes, n_searches):
    """Then a search may find better ones; until then it makes none."""
    like = _fit(_noisy, shapes[:20], NOISE)
    before = n_searches()

    nearly = _fit(_noisy, shapes[:25], NOISE, like)

    assert (before, 20, 25) == (n_searches(), nearly.n_searched, nearly.n_shapes)
    later = _fit(_noisy, shapes[:26], NOISE, nearly)
    assert (True, 26) == (before < n_searches(), later.n_searched)


def test_terms_that_explain_noisy_readings_no_more_are_searched_for_again(
    shapes, n_searches
):
    """One reading further off than noise is enough."""
    like = _fit(_noisy, shapes[:20], NOISE)
    before = n_searches()
    odd = shapes[20]

    def other(batch, length):
        far = 0.1 * _attention(batch, length) if (batch, length) == odd else 0.0
        return _noisy(batch, length) + far

    _fit(other, shapes[:21], NOISE, like)

    assert before < n_searches()


def test_what_nothing_explains_is_searched_wide_now_and_then(shapes, monkeypatch):
    """Sizes that strides have halved are thought of with a quarter more shapes."""

    def odd(batch, length):
        return 1e4 * batch * length + 1e5 * ((batch * 31 + length * 17) % 5)

    made = []
    wide = trust_of._exact_fit
    monkeypatch.setattr(trust_of, "_exact_fit", lambda *a: made.append(a) or wide(*a))

    like = _fit(odd, shapes[:20], is_excess=True)
    nearly = _fit(odd, shapes[:25], like=like, is_excess=True)
    assert (1, 20, 25) == (len(made), nearly.n_searched, nearly.n_shapes)
    later = _fit(odd, shapes[:26], like=nearly, is_excess=True)

    assert (2, 26) == (len(made), later.n_searched)
    anew = _fit(odd, shapes[:25], is_excess=True)
    assert anew.predict((50, 60)) == nearly.predict((50, 60))


def test_a_fit_of_other_columns_is_none_to_start_from(shapes, n_searches):
    """A size that begins to vary makes other terms."""
    like = _fit(_attention, [(8, length) for _, length in shapes[:9]])
    before = n_searches()

    again = _fit(_attention, shapes, like=like)

    assert before < n_searches()
    assert again.is_exact
