"""What readings are over a fit, so that the fit can be moved through them.

A fit says how a series goes on; where it was measured, the readings themselves are
nearer to what a step takes there than two parameters for all sizes are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class Residuals:
    """Ratios of readings to a fit, by size.

    Between two sizes they are interpolated along the logarithm of the size; before the
    first and beyond the last they are as there.
    """

    places: tuple[float, ...] = (0.0,)
    """Logarithms of the sizes that were measured, in order."""
    ratios: tuple[float, ...] = (1.0,)
    """Readings over the fit there."""

    @classmethod
    def of(cls, sizes: ArrayLike, fitted: ArrayLike, measured: ArrayLike) -> Residuals:
        """Compare (n_points,) readings with a fit at these sizes.

        Sizes and readings are positive. Where the fit is not, at one of them, it is
        taken as it is.
        """
        x, of_fit, values = (
            np.asarray(each, np.float64) for each in (sizes, fitted, measured)
        )
        if (of_fit <= 0.0).any():
            return cls()
        order = np.argsort(x)
        ratios = (values / of_fit)[order]
        return cls(tuple(np.log(x[order]).tolist()), tuple(ratios.tolist()))

    def at(self, size: float) -> float:
        """Return the ratio at a size."""
        return float(np.interp(math.log(size), self.places, self.ratios))
