"""Predictors by name, and the published alternatives."""

from __future__ import annotations

import numpy as np
import pytest

from mimose.predictors import (
    PREDICTORS,
    EstimatorPredictor,
    PolynomialRegressor,
    QuadraticScalarRegressor,
    make_predictor,
)


def test_default():
    """Without a name there is the polynomial, with what was asked for."""
    predictor = make_predictor(noise=3.0, nonnegative=False)

    assert isinstance(predictor, PolynomialRegressor)
    assert 3.0 == predictor.noise
    assert not predictor.nonnegative


def test_unknown():
    """An unknown name is refused with those that are known."""
    with pytest.raises(ValueError, match="'xgboost': choose one of polynomial, boost"):
        make_predictor("xgboost")


def test_polynomial_is_nearest():
    """From ten samples of a text model the polynomial errs least of all."""
    random = np.random.default_rng(0)
    T = random.integers(30, 333, 10)[:, None]
    unseen = random.integers(30, 333, 100)[:, None]

    def held(T):
        return 32.0 * (49152.0 * T[:, 0] + 48.0 * T[:, 0] ** 2)

    errors = {}
    for name in PREDICTORS:
        predicted = make_predictor(name).fit(T, held(T)).predict(unseen)
        errors[name] = np.mean(np.abs(predicted / held(unseen) - 1.0))

    assert errors["polynomial"] < 1e-9
    assert errors["polynomial"] <= min(errors.values())
    assert errors["quadratic-scalar"] < 0.01


def test_adapter_trust():
    """The adapter trusts a fit by its error at shapes left out."""
    X = np.arange(1.0, 21.0)[:, None]
    noise = np.random.default_rng(0).uniform(0, 1, 20)
    predictor = EstimatorPredictor(QuadraticScalarRegressor())

    assert predictor.fit(X, 5.0 * X[:, 0] + X[:, 0] ** 2).trusted_
    assert not predictor.fit(X, noise).trusted_
    assert not predictor.fit(X[:4], X[:4, 0]).trusted_
