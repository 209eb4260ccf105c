"""What is asked of a predictor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike


class Predictor(Protocol):
    """A quantity as a function of sizes, learned from samples.

    One that also has ``trusted_``, ``residual_`` or ``monomials_`` is believed.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> object:
        """Learn from all samples so far, ``X`` (n_samples, n_features)."""
        ...

    def predict_one(self, sizes: Sequence[float]) -> float:
        """Return one value: for the step that waits for a plan."""
        ...

    @property
    def exact_(self) -> bool:
        """Whether every sample is explained, so that it may be asked beyond them."""
        ...

    @property
    def loo_error_(self) -> float:
        """Error at shapes that were left out, in the unit of the values."""
        ...
