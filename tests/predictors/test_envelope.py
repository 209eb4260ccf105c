"""Envelopes of excesses."""

from __future__ import annotations

import numpy as np
import pytest

from mimose.predictors import EnvelopeRegressor

MIB = 2.0**20


def attention_or_mlp(X):
    """Return an excess that is attention's at long inputs and the MLP's at short."""
    B, T = np.asarray(X, dtype=float).T
    return np.maximum(12e3 * B * T, 48.0 * B * T**2)


def floor_or_line(X):
    """Return an excess with a floor that no input goes below."""
    B, T = np.asarray(X, dtype=float).T
    return np.maximum(64 * MIB, 12e3 * B * T)


def lengths(n, random):
    """Return n shapes of one batch size."""
    return np.column_stack([np.full(n, 16), random.integers(16, 513, n)])


def shapes(n, random):
    """Return n shapes whose two sizes vary."""
    return np.column_stack([random.integers(1, 33, n), random.integers(16, 513, n)])


def inside(X, of):
    """Return the rows of X that lie within the range of another."""
    return X[((X >= of.min(axis=0)) & (X <= of.max(axis=0))).all(axis=1)]


def test_one_polynomial():
    """An excess that is one polynomial gets one piece and no shift."""
    X = shapes(8, np.random.default_rng(0))
    y = 5e3 * X[:, 0] * X[:, 1]

    fitted = EnvelopeRegressor().fit(X, y)

    assert 1 == len(fitted.pieces_)
    assert 0.0 == fitted.shift_
    assert fitted.exact_
    assert fitted.trusted_


@pytest.mark.parametrize("draw", [lengths, shapes])
@pytest.mark.parametrize("excess", [attention_or_mlp, floor_or_line])
def test_two_polynomials(draw, excess):
    """The larger of two polynomials is found, and holds where nothing was seen."""
    random = np.random.default_rng(0)
    X, unseen = draw(24, random), draw(200, random)
    unseen = inside(unseen, X)

    fitted = EnvelopeRegressor().fit(X, excess(X))

    assert 2 == len(fitted.pieces_)
    assert excess(unseen) == pytest.approx(fitted.predict(unseen), rel=0.01)


@pytest.mark.parametrize("draw", [lengths, shapes])
@pytest.mark.parametrize("excess", [attention_or_mlp, floor_or_line])
def test_rarely_too_low(draw, excess):
    """On noisy readings, trusted predictions are too low by little, and seldom."""
    short, n_trusted = [], 0
    for seed in range(12):
        random = np.random.default_rng(seed)
        X = draw(24, random)
        fitted = EnvelopeRegressor(noise=MIB)
        fitted.fit(X, excess(X) + random.normal(0, MIB, len(X)))
        unseen = inside(draw(200, random), X)
        if fitted.trusted_:
            n_trusted += 1
            reading = excess(unseen) + random.normal(0, MIB, len(unseen))
            short.append(reading - fitted.predict(unseen))

    assert n_trusted >= 8
    assert np.percentile(np.concatenate(short), 99) < 1.5 * MIB
    assert np.percentile(np.concatenate(short), 1) > -8 * MIB


def test_raised_above_the_samples():
    """What no two polynomials explain is covered, by the shift that is recorded."""
    random = np.random.default_rng(0)
    X = shapes(20, random)
    y = random.uniform(1, 100, 20)

    fitted = EnvelopeRegressor().fit(X, y)

    assert fitted.shift_ > 0.0
    assert (fitted.predict(X) >= y * (1 - 1e-12)).all()
    assert not fitted.trusted_
