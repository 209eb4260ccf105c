"""Polynomials with few monomials."""

from __future__ import annotations

import numpy as np
import pytest

from mimose.predictors import PolynomialRegressor

MIB = 2.0**20

# name -> columns' ranges, {monomial: coefficient}, parameters
LAYERS = {
    "attention": ([(1, 33), (16, 513)], {(1, 1): 49152.0, (1, 2): 48.0}, {}),
    "bias": ([(1, 33), (16, 513)], {(1, 1): 8.0, (0, 2): 32.0, (0, 0): 512.0}, {}),
    "vit": (
        [(1, 17), (100, 5000)],
        {(1, 0): 3072.0, (1, 1): 640.0, (1, 2): 0.25},
        {},
    ),
    "vit, sides": (
        [(1, 17), (64, 500), (64, 500)],
        {(1, 0, 0): 3072.0, (1, 1, 1): 64.0, (1, 2, 2): 0.25},
        {"max_degree": 5},
    ),
    "decoder": (
        [(1, 17), (16, 300), (16, 300)],
        {
            (1, 1, 0): 81920.0,
            (1, 2, 0): 96.0,
            (1, 0, 1): 8192.0,
            (1, 1, 1): 48.0,
            (0, 2, 0): 32.0,
        },
        {},
    ),
}


def draw(ranges, n, random):
    """Return n distinct shapes within the ranges."""
    return np.column_stack([random.integers(low, high, n) for low, high in ranges])


def polynomial(X, terms):
    """Return the values of a polynomial given as {monomial: coefficient}."""
    values = np.zeros(len(X))
    for powers, coefficient in terms.items():
        values += coefficient * np.prod(X.astype(float) ** np.array(powers), axis=1)
    return values


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("spare", [2, 20])
def test_exact_support(name, spare):
    """Noise-free samples give back the layer's own monomials and coefficients."""
    ranges, terms, params = LAYERS[name]
    random = np.random.default_rng(7)
    X = draw(ranges, len(terms) + spare, random)
    unseen = draw(ranges, 200, random)

    fitted = PolynomialRegressor(**params).fit(X, polynomial(X, terms))

    assert set(terms) == set(fitted.monomials_)
    found = dict(zip(fitted.monomials_, fitted.coef_.tolist(), strict=True))
    assert terms == pytest.approx(found, rel=1e-6)
    assert fitted.exact_
    assert fitted.trusted_
    expected = polynomial(unseen, terms)
    assert expected == pytest.approx(fitted.predict(unseen), rel=1e-9)


def test_only_varying_columns():
    """A column that never varies appears in no monomial."""
    X = np.array([[16, 8, t] for t in (20, 50, 90, 200, 300)])

    fitted = PolynomialRegressor().fit(X, 7.0 * X[:, 2] + 3.0 * X[:, 2] ** 2)

    assert {(0, 0, 1), (0, 0, 2)} == set(fitted.monomials_)
    assert fitted.trusted_


def test_as_many_shapes_as_monomials():
    """With one shape a monomial anything fits, and nothing is trusted."""
    ranges, terms, _ = LAYERS["decoder"]
    X = draw(ranges, len(terms), np.random.default_rng(1))

    fitted = PolynomialRegressor().fit(X, polynomial(X, terms))

    assert not fitted.exact_
    assert not fitted.trusted_


def test_duplicates_are_averaged():
    """The samples of one shape count as their mean."""
    X = np.array([[1], [1], [2], [3], [4]])
    y = np.array([9.0, 11.0, 20.0, 30.0, 40.0])

    fitted = PolynomialRegressor().fit(X, y)

    assert ((1,),) == fitted.monomials_
    assert [10.0] == pytest.approx(fitted.coef_.tolist())
    assert 4 == fitted.n_shapes_
    assert 1.0 == pytest.approx(fitted.residual_)
    assert not fitted.exact_


@pytest.mark.parametrize("n", [6, 32])
@pytest.mark.parametrize("seed", range(3))
def test_noise_is_not_fitted(n, seed):
    """Noisy samples of two monomials hardly ever get more than two."""
    random = np.random.default_rng(seed)
    X = draw([(1, 33), (16, 513)], n, random)
    truth = polynomial(X, {(1, 1): 12345.0, (1, 2): 48.0})
    unseen = draw([(4, 30), (50, 450)], 100, random)

    fitted = PolynomialRegressor(noise=MIB).fit(X, truth + random.normal(0, MIB, n))

    assert len(fitted.monomials_) <= 3
    error = fitted.predict(unseen) - polynomial(unseen, {(1, 1): 12345.0, (1, 2): 48.0})
    assert np.median(np.abs(error)) < 3 * MIB


def test_untrusted_when_left_out_badly():
    """A sample off the curve is noticed."""
    X = np.array([[t] for t in (10, 50, 100, 200, 300, 400)])
    y = 10.0 * X[:, 0]
    y[2] *= 1.3

    fitted = PolynomialRegressor().fit(X, y)

    assert not fitted.trusted_
    assert fitted.is_trusted(tolerance=10.0)
