"""scikit-learn's manners without scikit-learn.

Importing scikit-learn takes 90 MiB, pandas among them, which a training process keeps
for good. Its tools ask no estimator for a base class, only for the methods below. They
import it where they need it: whoever calls them has it already.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


class BaseEstimator:
    """An estimator whose parameters can be read, set and cloned.

    The constructor takes parameters by name, and only stores them.
    """

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        """Return the constructor's parameters; none where there is no constructor."""
        if cls.__init__ is object.__init__:
            return ()
        return tuple(inspect.signature(cls).parameters)

    def __repr__(self) -> str:
        params = (f"{k}={v!r}" for k, v in self.get_params(deep=False).items())
        return f"{type(self).__name__}({', '.join(params)})"

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn's tools know of any estimator."""
        from sklearn.utils import Tags, TargetTags

        return Tags(estimator_type=None, target_tags=TargetTags(required=False))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the constructor's parameters by name.

        Args:
            deep: Whether those of parameters that are estimators follow, as
                ``name__inner``.
        """
        params = {name: getattr(self, name) for name in self._names()}
        if deep:
            for name, value in tuple(params.items()):
                if hasattr(value, "get_params") and not isinstance(value, type):
                    inner = value.get_params()
                    params.update({f"{name}__{k}": v for k, v in inner.items()})
        return params

    def set_params(self, **params: Any) -> BaseEstimator:
        """Set parameters by name and return the estimator.

        Args:
            params: The values; ``name__inner`` sets a parameter of a parameter.

        Raises:
            ValueError: If there is no parameter of that name.
        """
        for name in sorted(params, key=lambda name: "__" in name):
            own, _, inner = name.partition("__")
            if own not in self._names():
                msg = f"{type(self).__name__} has no parameter {own!r}."
                raise ValueError(msg)
            if inner:
                getattr(self, own).set_params(**{inner: params[name]})
            else:
                setattr(self, own, params[name])
        return self


class Regressor(BaseEstimator, ABC):
    """An estimator that predicts numbers, and has a score."""

    _estimator_type = "regressor"  # what scikit-learn before 1.6 reads

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn's tools know of a regressor."""
        from sklearn.utils import RegressorTags

        tags = super().__sklearn_tags__()
        tags.estimator_type, tags.regressor_tags = "regressor", RegressorTags()
        tags.target_tags.required = True
        return tags

    @abstractmethod
    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the (n_samples,) values at the sizes ``X``."""

    def score(self, X: ArrayLike, y: ArrayLike) -> float:
        """Return the coefficient of determination.

        Args:
            X: (n_samples, n_features) sizes.
            y: (n_samples,) values.
        """
        from sklearn.metrics import r2_score

        return float(r2_score(y, self.predict(X)))
