"""What holds for every predictor."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone, is_regressor
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.validation import check_is_fitted

from mimose.predictors import PREDICTORS, EnvelopeRegressor, make_predictor

NAMES = (*PREDICTORS, "envelope")


@pytest.fixture(params=NAMES)
def predictor(request: pytest.FixtureRequest) -> Any:
    """Return an unfitted predictor of each kind, for non-negative values."""
    return make(request.param)


def make(name: str, **params: Any) -> Any:
    """Return a new predictor by its name."""
    if name == "envelope":
        return EnvelopeRegressor(**params)
    return make_predictor(name, **params)


def samples(n: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return sizes (batch, length) and the bytes of a transformer layer."""
    random = np.random.default_rng(seed)
    X = np.column_stack([random.integers(1, 33, n), random.integers(16, 513, n)])
    B, T = X.T.astype(float)
    return X.astype(float), 49152 * B * T + 48 * B * T**2


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.predict([[1.0, 2.0]]),
        lambda p: p.predict_one((1.0, 2.0)),
        lambda p: p.trusted_,
    ],
)
def test_unfitted(predictor, use):
    """Use before `fit` raises scikit-learn's error."""
    with pytest.raises(NotFittedError):
        use(predictor)


def test_finite_everywhere(predictor):
    """Predictions are finite and not negative, however far off the sizes are."""
    predictor.fit(*samples())
    far = [[0, 0], [1e9, 1e9], [-1e6, 3], [1e300, 1e300], [-1e300, 1e300], [0.5, 1e12]]

    values = predictor.predict(far)

    assert np.isfinite(values).all()
    assert (values >= 0.0).all()


def test_sign():
    """A quantity that falls to 0 is not predicted below, one with a sign is."""
    X = np.arange(1.0, 9.0)[:, None]
    for name in NAMES:
        falling = make(name).fit(X, 8.0 - X[:, 0])
        assert (falling.predict(np.arange(100.0)[:, None]) >= 0.0).all()
        assert falling.predict_one((50.0,)) >= 0.0
    for name in PREDICTORS:
        signed = make(name, nonnegative=False).fit(X, -X[:, 0])
        assert signed.predict(X).min() < 0.0


def test_predict_one_is_predict(predictor):
    """One shape at a time gives what many at once give, as a plain float.

    Also where an envelope is raised above what no two polynomials explain.
    """
    X, y = samples()
    for values in (y, np.random.default_rng(0).uniform(1, 100, len(y))):
        predictor.fit(X, values)
        one = [predictor.predict_one(tuple(row)) for row in X.tolist()]
        assert {float} == {type(value) for value in one}
        assert predictor.predict(X).tolist() == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize("value", [0.0, 4096.0])
def test_constant_values(predictor, value):
    """Values that do not differ are predicted as they are."""
    X, _ = samples()
    predictor.fit(X, np.full(len(X), value))

    assert [value] == pytest.approx(predictor.predict([[7.0, 300.0]]).tolist())
    assert predictor.trusted_


def test_few_shapes(predictor):
    """One distinct shape gives its mean, however often it was seen; no trust in two."""
    predictor.fit([[16.0, 128.0]] * 3, [9.0, 10.0, 11.0])

    assert 10.0 == pytest.approx(predictor.predict_one((16.0, 128.0)), abs=1.0)
    assert (1, False, False) == (
        predictor.n_shapes_,
        predictor.trusted_,
        predictor.exact_,
    )
    assert math.isinf(predictor.loo_error_)
    predictor.fit([[16.0, 128.0], [16.0, 256.0]], [100.0, 333.0])
    assert math.isfinite(predictor.predict_one((16.0, 200.0)))
    assert not predictor.trusted_


def test_seen(predictor):
    """The number of shapes and their range are told; a constant column does no harm."""
    X, _ = samples()
    X[:, 0] = 16.0
    y = 16.0 * X[:, 1] * 1000.0

    predictor.fit(np.concatenate([X, X]), np.concatenate([y, y]))

    assert 12 == predictor.n_shapes_
    assert (16.0, X[:, 1].min()) == predictor.low_
    assert (16.0, X[:, 1].max()) == predictor.high_
    assert predictor.loo_error_ < y.max()
    assert np.isfinite(predictor.predict(X)).all()


def test_the_same_again(predictor):
    """By a clone that was fitted before, and by a pickle; arrays are not touched."""
    X, y = samples()
    X.flags.writeable = y.flags.writeable = False
    assert predictor is predictor.fit(X, y)
    expected = predictor.predict(X).tolist()

    other = clone(predictor)
    with pytest.raises(NotFittedError):
        other.predict([[1.0, 2.0]])
    other.fit([[1.0]] * 2, [5.0, 5.0]).fit(X, y)
    assert expected == other.predict(X).tolist()
    copy = pickle.loads(pickle.dumps(predictor))
    assert expected == copy.predict(X).tolist()
    assert predictor.trusted_ is copy.trusted_


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        ([1.0, 2.0], [1.0, 2.0], "n_samples, n_features"),
        ([[1.0], [2.0]], [1.0], r"y must be \(2,\)"),
        (np.empty((0, 2)), [], "one sample"),
        ([[np.nan]], [1.0], "X .*NaN"),
        ([[1.0]], [np.inf], "y .*NaN"),
    ],
)
def test_bad_samples(predictor, X, y, message):
    """Samples of a wrong form are refused with the reason."""
    with pytest.raises(ValueError, match=message):
        predictor.fit(X, y)


def test_bad_columns_and_parameters(predictor):
    """Other columns than those fitted, and unknown parameters, are refused."""
    with pytest.raises(ValueError, match="'colour'"):
        predictor.set_params(colour=1)
    with pytest.raises(ValueError, match=r"3 column.* 2"):
        predictor.fit(*samples()).predict([[1.0, 2.0, 3.0]])


def test_parameters_of_parameters():
    """What is inside another estimator is read and set by its path."""
    predictor = make("support-vectors", noise=2.0)

    predictor.set_params(estimator__regressor__svr__C=3.0, noise=1.0)

    assert 3.0 == predictor.get_params()["estimator__regressor__svr__C"]
    assert 1.0 == predictor.get_params(deep=False)["noise"]
    assert predictor.get_params(deep=False).keys() < predictor.get_params().keys()
    assert "noise=1.0" in repr(predictor)


def test_scikit_learns_tools(predictor):
    """Pipelines and cross validation take a predictor for a regressor."""
    X, y = samples(40)
    piped = make_pipeline(FunctionTransformer(), clone(predictor))

    with pytest.raises(NotFittedError):
        check_is_fitted(predictor)
    check_is_fitted(predictor.fit(X, y))
    assert is_regressor(predictor)
    assert predictor.score(X, y) > 0.9
    assert piped.fit(X, y).predict(X).tolist() == predictor.predict(X).tolist()
    assert 3 == len(cross_val_score(predictor, X, y, cv=3))
