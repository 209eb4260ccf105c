"""Checking and condensing samples, shared by the predictors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Samples with one row for each distinct shape."""

    sizes: Floats
    """(n_shapes, n_features), in the order in which they first appeared."""
    values: Floats
    """(n_shapes,) mean of the shape's values."""
    spread: float
    """Largest distance of a value from its shape's mean."""
    low: tuple[float, ...]
    """Smallest size seen, by column."""
    high: tuple[float, ...]
    """Largest size seen, by column."""

    @property
    def varying(self) -> tuple[int, ...]:
        """The columns that took more than one value."""
        pairs = zip(self.low, self.high, strict=True)
        return tuple(i for i, (low, high) in enumerate(pairs) if low < high)


def as_sizes(X: ArrayLike, n_features: int | None = None) -> Floats:
    """Return ``X`` as a finite float array of two dimensions.

    Args:
        X: (n_samples, n_features) sizes.
        n_features: How many columns there have to be; any number if ``None``.

    Raises:
        ValueError: If ``X`` has another form or holds NaN or infinity.
    """
    sizes = np.asarray(X, dtype=np.float64)
    if sizes.ndim != 2:
        msg = f"X must be (n_samples, n_features), got {sizes.ndim} dimension(s)."
        raise ValueError(msg)
    if n_features is not None and sizes.shape[1] != n_features:
        msg = f"X has {sizes.shape[1]} column(s), fit saw {n_features}."
        raise ValueError(msg)
    if not np.isfinite(sizes).all():
        msg = "X holds NaN or infinity."
        raise ValueError(msg)
    return sizes


def condense(X: ArrayLike, y: ArrayLike) -> Samples:
    """Check the samples and average those of the same shape.

    Args:
        X: (n_samples, n_features) sizes.
        y: (n_samples,) values.

    Raises:
        ValueError: If there is no sample, the lengths differ, or a number is NaN
            or infinite.
    """
    sizes = as_sizes(X)
    values = np.asarray(y, dtype=np.float64)
    if values.shape != (len(sizes),):
        msg = f"y must be ({len(sizes)},) to go with X, got shape {values.shape}."
        raise ValueError(msg)
    if not len(sizes):
        msg = "At least one sample is needed, got none."
        raise ValueError(msg)
    if not np.isfinite(values).all():
        msg = "y holds NaN or infinity."
        raise ValueError(msg)

    low, high = tuple(sizes.min(axis=0).tolist()), tuple(sizes.max(axis=0).tolist())
    first: dict[tuple[float, ...], int] = {}
    group = [first.setdefault(tuple(row), len(first)) for row in sizes.tolist()]
    spread = 0.0
    if len(first) < len(sizes):
        which = np.array(group)
        means = np.bincount(which, weights=values) / np.bincount(which)
        spread = float(np.abs(values - means[which]).max())
        sizes, values = np.array(list(first), dtype=np.float64), means
    return Samples(sizes=sizes, values=values, spread=spread, low=low, high=high)


def nearly_largest(values: Floats, of: Floats) -> float:
    """Return the value that 19 in 20 do not exceed; the largest of up to 20.

    A process's memory jumps now and then for reasons of its own, and the more samples
    there are the farther off is the worst of them. Two values are never passed over:
    an infinite one, and that of the largest sample, which is the one to break budgets.

    Args:
        values: (n,) values, at least one.
        of: (n,) samples that they belong to.
    """
    own: list[float] = values.tolist()
    largest = max(own)
    if math.isinf(largest):
        return largest
    return max(quantile(own, 0.95), own[int(of.argmax())])


def quantile(values: Sequence[float], share: float) -> float:
    """Return the least of the values that such a share of them does not exceed.

    Args:
        values: At least one.
        share: From 0 to 1.
    """
    return sorted(values)[math.ceil(share * (len(values) - 1))]


def not_fitted(estimator: Any) -> Exception:
    """Return scikit-learn's ``NotFittedError``, for an estimator used before ``fit``.

    It is a ``ValueError`` and an ``AttributeError``.
    """
    # Imported only here: see ``_sklearn.py``.
    from sklearn.exceptions import NotFittedError

    name = type(estimator).__name__
    error: Exception = NotFittedError(
        f"This {name} is not fitted yet: call fit(X, y) first."
    )
    return error
