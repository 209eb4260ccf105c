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


def test_fit_returns_self(predictor):
    """`fit` returns the predictor."""
    assert predictor is predictor.fit(*samples())


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
    with pytest.raises(NotFittedError, match="not fitted yet"):
        use(predictor)


def test_finite_everywhere(predictor):
    """Predictions are finite and not negative, however far off the sizes are."""
    predictor.fit(*samples())
    far = [[0, 0], [1e9, 1e9], [-1e6, 3], [1e300, 1e300], [-1e300, 1e300], [0.5, 1e12]]

    values = predictor.predict(far)

    assert np.isfinite(values).all()
    assert (values >= 0.0).all()


def test_finite_everywhere_falling(predictor):
    """Predictions of a quantity that falls to 0 do not go below it."""
    X = np.arange(1.0, 9.0)[:, None]
    predictor.fit(X, 8.0 - X[:, 0])

    assert (predictor.predict(np.arange(100.0)[:, None]) >= 0.0).all()


@pytest.mark.parametrize("name", PREDICTORS)
def test_signed(name):
    """Where values may be negative, so may predictions."""
    X, y = samples()

    assert make(name, nonnegative=False).fit(X, -y).predict(X).min() < 0.0


def test_predict_one_is_predict(predictor):
    """One shape at a time gives what many at once give, as a plain float."""
    X, y = samples()
    predictor.fit(X, y)

    one = [predictor.predict_one(tuple(row)) for row in X.tolist()]

    assert {float} == {type(value) for value in one}
    assert predictor.predict(X).tolist() == pytest.approx(one, rel=1e-12)


def test_predict_one_not_negative(predictor):
    """The fast path is clipped as well."""
    X = np.arange(1.0, 9.0)[:, None]
    predictor.fit(X, 8.0 - X[:, 0])

    assert predictor.predict_one((50.0,)) >= 0.0


def test_constant_values(predictor):
    """Values that do not differ are predicted as they are."""
    X, _ = samples()
    predictor.fit(X, np.full(len(X), 4096.0))

    assert [4096.0] == pytest.approx(predictor.predict([[7.0, 300.0]]).tolist())
    assert predictor.trusted_


def test_zeros(predictor):
    """A quantity that is always 0 is predicted as 0."""
    X, _ = samples()

    assert [0.0] == predictor.fit(X, np.zeros(len(X))).predict([[7.0, 300.0]]).tolist()


def test_one_shape(predictor):
    """One distinct shape gives its mean and no trust, however often it was seen."""
    predictor.fit([[16.0, 128.0]] * 3, [9.0, 10.0, 11.0])

    assert 10.0 == pytest.approx(predictor.predict_one((16.0, 128.0)), abs=1.0)
    assert 1 == predictor.n_shapes_
    assert not predictor.trusted_
    assert not predictor.exact_


def test_two_shapes(predictor):
    """Two shapes of a curve are accepted, without trust."""
    predictor.fit([[16.0, 128.0], [16.0, 256.0]], [100.0, 333.0])

    assert math.isfinite(predictor.predict_one((16.0, 200.0)))
    assert not predictor.trusted_


def test_constant_column(predictor):
    """A column that never varies does no harm."""
    X, y = samples()
    X[:, 0] = 16.0
    y = 16.0 * X[:, 1] * 1000.0

    predictor.fit(X, y)

    assert (16.0, X[:, 1].min()) == predictor.low_
    assert (16.0, X[:, 1].max()) == predictor.high_
    assert np.isfinite(predictor.predict(X)).all()


def test_seen(predictor):
    """The number of shapes and their range are those of the samples."""
    X, y = samples()
    predictor.fit(np.concatenate([X, X]), np.concatenate([y, y]))

    assert 12 == predictor.n_shapes_
    assert tuple(X.min(axis=0)) == predictor.low_
    assert tuple(X.max(axis=0)) == predictor.high_


def test_refit_forgets(predictor):
    """A second `fit` leaves nothing of the first."""
    X, y = samples()
    again = clone(predictor).fit(X, y).predict(X)

    predictor.fit([[1.0]] * 2, [5.0, 5.0]).fit(X, y)

    assert again.tolist() == predictor.predict(X).tolist()


def test_deterministic(predictor):
    """The same samples give the same predictor."""
    X, y = samples()
    other = clone(predictor)

    assert (
        predictor.fit(X, y).predict(X).tolist() == other.fit(X, y).predict(X).tolist()
    )


def test_picklable(predictor):
    """A fitted predictor survives pickling."""
    X, y = samples()
    predictor.fit(X, y)

    copy = pickle.loads(pickle.dumps(predictor))

    assert predictor.predict(X).tolist() == copy.predict(X).tolist()
    assert predictor.trusted_ is copy.trusted_


def test_clone(predictor):
    """scikit-learn's `clone` gives an unfitted predictor of the same parameters."""
    copy = clone(predictor.fit(*samples()))

    assert str(predictor.get_params()) == str(copy.get_params())
    with pytest.raises(NotFittedError):
        copy.predict([[1.0, 2.0]])


def test_arrays_not_modified(predictor):
    """Neither fitting nor predicting touches the arrays."""
    X, y = samples()
    X_before, y_before = X.copy(), y.copy()
    X.flags.writeable = y.flags.writeable = False

    predictor.fit(X, y).predict(X)

    assert (X_before == X).all()
    assert (y_before == y).all()


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        ([1.0, 2.0], [1.0, 2.0], "n_samples, n_features"),
        ([[1.0], [2.0]], [1.0], r"y must be \(2,\)"),
        (np.empty((0, 2)), [], "At least one sample"),
        ([[np.nan]], [1.0], "X holds NaN"),
        ([[1.0]], [np.inf], "y holds NaN"),
    ],
)
def test_bad_samples(predictor, X, y, message):
    """Samples of a wrong form are refused with the reason."""
    with pytest.raises(ValueError, match=message):
        predictor.fit(X, y)


def test_bad_columns(predictor):
    """Other columns than those fitted are refused."""
    with pytest.raises(ValueError, match=r"3 column\(s\), fit saw 2"):
        predictor.fit(*samples()).predict([[1.0, 2.0, 3.0]])


def test_roughly_right(predictor):
    """Every predictor explains most of what it was given."""
    X, y = samples(40)

    assert predictor.fit(X, y).score(X, y) > 0.9


def test_parameters_of_parameters():
    """What is inside another estimator is read and set by its path."""
    predictor = make("support-vectors", noise=2.0)

    predictor.set_params(estimator__regressor__svr__C=3.0, noise=1.0)

    assert 3.0 == predictor.get_params()["estimator__regressor__svr__C"]
    assert 1.0 == predictor.get_params(deep=False)["noise"]
    assert predictor.get_params(deep=False).keys() < predictor.get_params().keys()


def test_unknown_parameter(predictor):
    """A parameter that is not there cannot be set."""
    with pytest.raises(ValueError, match="has no parameter 'colour'"):
        predictor.set_params(colour=1)


def test_scikit_learns_tools(predictor):
    """Pipelines and cross validation take a predictor for a regressor."""
    X, y = samples()
    piped = make_pipeline(FunctionTransformer(), clone(predictor))

    with pytest.raises(NotFittedError):
        check_is_fitted(predictor)
    check_is_fitted(predictor.fit(X, y))
    assert is_regressor(predictor)
    assert piped.fit(X, y).predict(X).tolist() == predictor.predict(X).tolist()
    assert 3 == len(cross_val_score(predictor, X, y, cv=3))


def test_representation():
    """A predictor shows what it was made with."""
    text = repr(make("envelope", noise=2.0))

    assert text.startswith("EnvelopeRegressor(")
    assert "noise=2.0" in text
