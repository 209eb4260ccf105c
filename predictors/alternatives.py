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

from ._samples import as_sizes, condense, nearly_largest, not_fitted
from ._shapes import ShapeRegressor
from ._sklearn import Regressor

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from ._samples import Samples

    Floats = NDArray[np.float64]

_FOLDS = 5
_LEAST_SHAPES = 5
_TOLERANCE = 0.1
"""Mean relative error up to which an estimator is trusted."""
_LARGEST = 1e12
"""Sizes are cut off here: trees refuse what does not fit into 32 bits."""


class EstimatorPredictor(ShapeRegressor):
    """Any scikit-learn regressor as a predictor.

    Trust follows Mimose's acceptance of a fit: a mean error of at most 10%, here at
    shapes that were left out and not at those fitted. It is never exact. One
    distinct shape, or values that do not differ, give a constant.

    Args:
        estimator: The regressor; a copy of it is fitted.
        noise: Absolute noise of a value, in units of y; errors of five times that
            size do not count.
        nonnegative: Whether predictions below 0 are raised to 0.

    It has the attributes of `ShapeRegressor` as well.

    Attributes:
        estimator_: The fitted regressor, or ``None`` for a constant.
    """

    estimator_: Any
    exact_ = False

    def __init__(
        self,
        estimator: Any,
        *,
        noise: float = 0.0,
        nonnegative: bool = True,
    ) -> None:
        self.estimator = estimator
        self.noise = noise
        self.nonnegative = nonnegative

    def _fit(self, samples: Samples) -> None:
        """Fit a copy of the regressor."""
        self._samples = samples
        self._errors: Floats | None = None
        self._constant = float(samples.values.mean())
        varies = bool(np.ptp(samples.values)) and bool(samples.varying)
        self.estimator_ = self._fitted(slice(None)) if varies else None

    def _evaluate(self, sizes: Floats) -> Floats:
        if self.estimator_ is None:
            return np.full(len(sizes), self._constant)
        values: Floats = self.estimator_.predict(np.clip(sizes, -_LARGEST, _LARGEST))
        return values

    @property
    def trusted_(self) -> bool:
        """Whether shapes that were left out are predicted; found out when asked."""
        self._refuse_unfitted()
        values = np.abs(self._samples.values)
        counted = np.maximum(np.abs(self._left_out()) - 5.0 * self.noise, 0.0)
        size = np.maximum(values, 1e-3 * values.max())
        size[size == 0.0] = 1.0
        return bool(np.mean(counted / size) <= _TOLERANCE)

    @property
    def loo_error_(self) -> float:
        """Error at shapes left out, a fifth at a time; the largest but for 1 in 20."""
        self._refuse_unfitted()
        return nearly_largest(np.abs(self._left_out()), self._samples.values)

    def _fitted(self, rows: Any) -> Any:
        samples = self._samples
        estimator = deepcopy(self.estimator)
        return estimator.fit(samples.sizes[rows], samples.values[rows])

    def _left_out(self) -> Floats:
        """Return the (n_shapes,) errors at shapes left out; infinite where few are."""
        if self._errors is None:
            self._errors = self._cross_validate(self._samples)
        return self._errors

    def _cross_validate(self, samples: Samples) -> Floats:
        if self.n_shapes_ < _LEAST_SHAPES:
            return np.full(self.n_shapes_, np.inf)
        errors = np.zeros(self.n_shapes_)
        if self.estimator_ is None:
            return errors
        fold = np.arange(self.n_shapes_) % _FOLDS
        for one in range(_FOLDS):
            out = fold == one
            estimator = self._fitted(~out)
            errors[out] = estimator.predict(samples.sizes[out]) - samples.values[out]
        return errors


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
