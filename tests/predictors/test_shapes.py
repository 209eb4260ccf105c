"""What regressors on sizes share."""

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

from mimose.predictors import ShapeRegressor


class _Fails(ShapeRegressor):
    """Cannot be fitted."""

    def _fit(self, samples):
        raise FloatingPointError(len(samples.values))

    def _evaluate(self, sizes):
        return np.zeros(len(sizes))


def test_a_fit_that_failed_is_none():
    """Nothing is predicted by what a fit left half done."""
    regressor = _Fails()
    with pytest.raises(FloatingPointError):
        regressor.fit([[1.0], [2.0]], [1.0, 2.0])
    with pytest.raises(NotFittedError):
        regressor.predict([[1.0]])
