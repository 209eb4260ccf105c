"""The little of scikit-learn that is subclassed, with types.

scikit-learn ships no type information. A type checker reads the declarations
below and keeps checking the estimators strictly; at run time the real classes
are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    class BaseEstimator:
        """Estimator with parameters that can be read, set and cloned."""

        def get_params(self, deep: bool = True) -> dict[str, Any]:
            """Return the constructor's parameters by name."""
            ...

        def set_params(self, **params: Any) -> BaseEstimator:
            """Set parameters by name and return the estimator."""
            ...

    class RegressorMixin:
        """Marks a regressor and gives it a score."""

        def score(self, X: ArrayLike, y: ArrayLike) -> float:
            """Return the coefficient of determination."""
            ...

    class NotFittedError(ValueError, AttributeError):
        """Raised when an estimator is used before ``fit``."""

else:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.exceptions import NotFittedError

__all__ = ["BaseEstimator", "NotFittedError", "RegressorMixin"]
