"""What every predictor offers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import ArrayLike, NDArray


class Predictor(Protocol):
    """A quantity as a function of sizes, learned from samples."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> Predictor:
        """Learn from all samples so far, ``X`` (n_samples, n_features)."""
        ...

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return (n_samples,) values: for reports and tests, many at once."""
        ...

    def predict_one(self, sizes: Sequence[float]) -> float:
        """Return one value: for the step that waits for a plan."""
        ...

    @property
    def trusted_(self) -> bool:
        """Whether a plan may rest on the prediction inside what was seen."""
        ...

    @property
    def exact_(self) -> bool:
        """Whether it may be asked somewhat beyond what was seen."""
        ...

    @property
    def n_shapes_(self) -> int:
        """Number of distinct shapes seen: says how far learning has come."""
        ...

    @property
    def low_(self) -> tuple[float, ...]:
        """Smallest size seen, by column: smaller sizes are raised to it."""
        ...

    @property
    def high_(self) -> tuple[float, ...]:
        """Largest size seen, by column."""
        ...
