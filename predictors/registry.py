"""Predictors by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .alternatives import (
    EstimatorPredictor,
    QuadraticScalarRegressor,
    boosting,
    support_vectors,
    tree,
)
from .polynomial import PolynomialRegressor

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Predictor

_ALTERNATIVES: dict[str, Callable[[], Any]] = {
    "boosting": boosting,
    "quadratic-scalar": QuadraticScalarRegressor,
    "support-vectors": support_vectors,
    "tree": tree,
}

PREDICTORS = ("polynomial", *sorted(_ALTERNATIVES))
"""The names that `make_predictor` knows, the default first."""


def make_predictor(
    name: str = "polynomial", *, noise: float = 0.0, nonnegative: bool = True
) -> Predictor:
    """Return a new predictor.

    Args:
        name: One of ``PREDICTORS``.
        noise: Absolute noise of a value, as a standard deviation, in units of y.
        nonnegative: Whether predictions below 0 are raised to 0.

    Raises:
        ValueError: If there is no predictor of that name.
    """
    if name == "polynomial":
        return PolynomialRegressor(noise=noise, nonnegative=nonnegative)
    if name not in _ALTERNATIVES:
        msg = f"Unknown predictor {name!r}: choose one of {', '.join(PREDICTORS)}."
        raise ValueError(msg)
    estimator = _ALTERNATIVES[name]()
    return EstimatorPredictor(estimator, noise=noise, nonnegative=nonnegative)
