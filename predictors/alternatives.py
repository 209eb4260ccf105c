"""The regressors that Mimose was compared with, behind the predictors' interface.

Source: Liao et al., "Exploiting Input Tensor Dynamics in Activation Checkpointing
for Efficient Training on GPU", IPDPS 2023, Table IV. They are here to be measured
against `PolynomialRegressor`, which is more accurate with far fewer samples.
"""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from ._samples import as_sizes, condense, not_fitted
from ._sklearn import Regressor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from ._samples import Samples

    Floats = NDArray[np.float64]

_FOLDS = 5
_LEAST_SHAPES = 5
_LARGEST = 1e12
"""Sizes are cut off here: trees refuse what does not fit into 32 bits."""


class EstimatorPredictor(Regressor):
    """Any scikit-learn regressor as a predictor.

    Trust follows Mimose's acceptance of a fit: a mean error of at most 10%, here at
    shapes that were left out and not at those fitted. It is never exact. One
    distinct shape, or values that do not differ, give a constant.

    Args:
        estimator: The regressor; a copy of it is fitted.
        tolerance: Mean relative error up to which it is trusted.
        noise: Absolute noise of a value, in units of y; errors of five times that
            size do not count.
        nonnegative: Whether predictions below 0 are raised to 0.

    Attributes:
        estimator_: The fitted regressor, or ``None`` for a constant.
        n_features_in_: Number of input columns.
        n_shapes_: Number of distinct shapes seen.
        exact_: ``False``.
        low_: Smallest size seen, by column.
        high_: Largest size seen, by column.
    """

    estimator_: Any
    n_features_in_: int
    n_shapes_: int
    exact_: bool
    low_: tuple[float, ...]
    high_: tuple[float, ...]

    def __init__(
        self,
        estimator: Any,
        *,
        tolerance: float = 0.1,
        noise: float = 0.0,
        nonnegative: bool = True,
    ) -> None:
        self.estimator = estimator
        self.tolerance = tolerance
        self.noise = noise
        self.nonnegative = nonnegative

    def fit(self, X: ArrayLike, y: ArrayLike) -> EstimatorPredictor:
        """Fit a copy of the regressor.

        Args:
            X: (n_samples, n_features) sizes.
            y: (n_samples,) values, such as bytes.

        Raises:
            ValueError: If there is no sample, the lengths differ, or a number is
                NaN or infinite.
        """
        samples = condense(X, y)
        self.n_features_in_ = samples.sizes.shape[1]
        self.n_shapes_ = len(samples.values)
        self.exact_ = False
        self.low_, self.high_ = samples.low, samples.high
        self._samples = samples
        self._trusted: bool | None = None
        self._constant = float(samples.values.mean())
        varies = bool(np.ptp(samples.values)) and bool(samples.varying)
        self.estimator_ = self._fitted(slice(None)) if varies else None
        return self

    def predict(self, X: ArrayLike) -> Floats:
        """Return the (n_samples,) values at the given sizes.

        Args:
            X: (n_samples, n_features) sizes.

        Raises:
            NotFittedError: If ``fit`` was not called.
            ValueError: If the columns are not those of ``fit``.
        """
        if not hasattr(self, "estimator_"):
            raise not_fitted(self)
        sizes = as_sizes(X, self.n_features_in_)
        if self.estimator_ is None:
            values = np.full(len(sizes), self._constant)
        else:
            within = np.clip(sizes, -_LARGEST, _LARGEST)
            values = np.nan_to_num(self.estimator_.predict(within))
        return np.maximum(values, 0.0) if self.nonnegative else values

    def predict_one(self, sizes: Sequence[float]) -> float:
        """Return the value at one shape.

        Args:
            sizes: The sizes, one a column.

        Raises:
            NotFittedError: If ``fit`` was not called.
        """
        return float(self.predict([sizes])[0])

    @property
    def trusted_(self) -> bool:
        """Whether shapes that were left out are predicted; found out when asked."""
        if not hasattr(self, "estimator_"):
            raise not_fitted(self)
        if self._trusted is None:
            self._trusted = self._predicts_left_out(self._samples)
        return self._trusted

    def _fitted(self, rows: Any) -> Any:
        samples = self._samples
        estimator = deepcopy(self.estimator)
        return estimator.fit(samples.sizes[rows], samples.values[rows])

    def _predicts_left_out(self, samples: Samples) -> bool:
        if self.n_shapes_ < _LEAST_SHAPES:
            return False
        if self.estimator_ is None:
            return True
        fold = np.arange(self.n_shapes_) % _FOLDS
        errors = np.empty(self.n_shapes_)
        for one in range(_FOLDS):
            out = fold == one
            estimator = self._fitted(~out)
            errors[out] = estimator.predict(samples.sizes[out]) - samples.values[out]
        counted = np.maximum(np.abs(errors) - 5.0 * self.noise, 0.0)
        size = np.maximum(np.abs(samples.values), 1e-3 * np.abs(samples.values).max())
        return bool(np.mean(counted / size) <= self.tolerance)


class QuadraticScalarRegressor(Regressor):
    """Mimose's estimator: quadratic least squares in one scalar.

    The published scalar is the length of a text or the pixels of an image. Whatever
    varies beside it, such as the batch or a target length, is missed.

    Args:
        feature: ``"product"`` of the sizes that vary, or the ``"first"`` of them.

    Attributes:
        coef_: (3,) coefficients of 1, s, s**2 for the scalar s divided by its
            largest value.
    """

    coef_: Floats

    def __init__(self, *, feature: str = "product") -> None:
        self.feature = feature

    def fit(self, X: ArrayLike, y: ArrayLike) -> QuadraticScalarRegressor:
        """Fit the coefficients.

        Args:
            X: (n_samples, n_features) sizes.
            y: (n_samples,) values, such as bytes.

        Raises:
            ValueError: If ``feature`` is unknown or the samples are not usable.
        """
        if self.feature not in ("first", "product"):
            msg = f"feature must be 'first' or 'product', got {self.feature!r}."
            raise ValueError(msg)
        samples = condense(X, y)
        columns = samples.varying or (0,)
        self._columns = columns[:1] if self.feature == "first" else columns
        self._unit = 1.0
        self._unit = float(np.abs(self._scalar(samples.sizes)).max()) or 1.0
        powers = np.vander(self._scalar(samples.sizes), 3, increasing=True)
        solution = np.linalg.lstsq(powers, samples.values, rcond=None)[0]
        self.coef_ = solution.astype(np.float64)
        return self

    def predict(self, X: ArrayLike) -> Floats:
        """Return the (n_samples,) values at the given sizes.

        Args:
            X: (n_samples, n_features) sizes.

        Raises:
            NotFittedError: If ``fit`` was not called.
        """
        if not hasattr(self, "coef_"):
            raise not_fitted(self)
        scalar = self._scalar(as_sizes(X))
        values: Floats = np.vander(scalar, 3, increasing=True) @ self.coef_
        return values

    def _scalar(self, sizes: Floats) -> Floats:
        scalar: Floats = np.prod(sizes[:, list(self._columns)], axis=1)
        return scalar / self._unit


# scikit-learn's estimators are imported when one is chosen: together they take
# longer to import than the rest of this package.


def support_vectors() -> Any:
    """Return a support vector regressor, with sizes and values scaled."""
    scaler = import_module("sklearn.preprocessing").StandardScaler
    pipeline = import_module("sklearn.pipeline").make_pipeline
    target = import_module("sklearn.compose").TransformedTargetRegressor
    vectors = import_module("sklearn.svm").SVR(C=100.0, epsilon=0.01)
    return target(regressor=pipeline(scaler(), vectors), transformer=scaler())


def tree() -> Any:
    """Return a regression tree."""
    return import_module("sklearn.tree").DecisionTreeRegressor(random_state=0)


def boosting() -> Any:
    """Return boosted regression trees."""
    return import_module("sklearn.ensemble").GradientBoostingRegressor(random_state=0)
