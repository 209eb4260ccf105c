"""What regressors on sizes share: samples by shape in, checked predictions out."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ._samples import as_sizes, condense, not_fitted
from ._sklearn import Regressor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from ._samples import Samples

    Floats = NDArray[np.float64]

_Own = TypeVar("_Own", bound="ShapeRegressor")


class ShapeRegressor(Regressor):
    """A regressor that is fitted on one sample for each distinct shape.

    Attributes:
        n_features_in_: Number of input columns.
        n_shapes_: Number of distinct shapes seen.
        exact_: Whether the samples are explained to rounding, with one to spare.
        low_: Smallest size seen, by column.
        high_: Largest size seen, by column.
    """

    nonnegative: bool
    n_features_in_: int
    n_shapes_: int
    exact_: bool
    low_: tuple[float, ...]
    high_: tuple[float, ...]

    def fit(self: _Own, X: ArrayLike, y: ArrayLike) -> _Own:
        """Fit the samples of each shape, averaged.

        Args:
            X: (n_samples, n_features) sizes.
            y: (n_samples,) values, such as bytes.

        Raises:
            ValueError: If there is no sample, the lengths differ, or a number is
                NaN or infinite.
        """
        samples = condense(X, y)
        self.fit_samples(samples)
        return self

    def fit_samples(self, samples: Samples) -> None:
        """Do what ``fit`` does, with samples that are checked and condensed."""
        self._take(samples)
        try:
            self._fit(samples)
        except BaseException:
            del self.n_shapes_  # it is not fitted
            raise

    def refitted(self: _Own, samples: Samples) -> _Own | None:
        """Return one that fits what this has found, and has searched for nothing else.

        Args:
            samples: More of what this was fitted to; checked and condensed.

        Returns:
            None where that explains them worse.
        """
        made = copy.copy(self)
        made._take(samples)
        return made if made._refit(samples, self) else None

    def _take(self, samples: Samples) -> None:
        """Remember what follows from the samples alone."""
        self.n_features_in_ = samples.sizes.shape[1]
        self.n_shapes_ = len(samples.values)
        self.low_, self.high_ = samples.low, samples.high

    @abstractmethod
    def _fit(self, samples: Samples) -> None:
        """Fit; what follows from the samples alone is known already."""

    def _refit(self: _Own, samples: Samples, like: _Own) -> bool:
        """Fit as another was fitted; return whether that holds."""
        return False

    def predict(self, X: ArrayLike) -> Floats:
        """Return the (n_samples,) values at the given sizes.

        Args:
            X: (n_samples, n_features) sizes.

        Raises:
            NotFittedError: If ``fit`` was not called.
            ValueError: If the columns are not those of ``fit``.
        """
        self._refuse_unfitted()
        values = np.nan_to_num(self._evaluate(as_sizes(X, self.n_features_in_)))
        return np.maximum(values, 0.0) if self.nonnegative else values

    @abstractmethod
    def _evaluate(self, sizes: Floats) -> Floats:
        """Return the (n_samples,) values as they come, whatever their sign."""

    def predict_one(self, sizes: Sequence[float]) -> float:
        """Return the value at one shape.

        Args:
            sizes: The sizes, one a column.

        Raises:
            NotFittedError: If ``fit`` was not called.
        """
        return float(self.predict([sizes])[0])

    def _refuse_unfitted(self) -> None:
        if not hasattr(self, "n_shapes_"):
            raise not_fitted(self)
