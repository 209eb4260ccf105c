"""One quantity of one family as a function of sizes: what its samples say."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import numpy as np

from mimose.learn.samples import Fitted, Samples, said
from mimose.predictors import STRETCH, Trust, VaryingFit
from mimose.predictors.trust import REPEATS
from mimose.types import Sizes

_WHOLE = 0.05
"""A count by a polynomial is this near to a whole number."""


class Series:
    """What samples of one quantity say of other shapes. It is read, never changed.

    A shape that was measured itself is answered from its own samples where no fit can
    be trusted. A predictor that fails is a reason for doubt, never an error: what asks
    is in the midst of somebody's training step.

    Args:
        samples: What was measured.
        scale: What an error is small against: a step's growth, in bytes.
    """

    def __init__(self, samples: Samples, scale: float) -> None:
        self._samples = samples
        self._scale = scale

    def __len__(self) -> int:
        """Return the number of distinct shapes kept."""
        return len(self._samples.counted)

    def __repr__(self) -> str:
        """Show how much was measured."""
        return f"Series({len(self)} shapes)"

    @property
    def is_excess(self) -> bool:
        """Whether it is a peak's rise over the level it began at."""
        return self._samples.kind.is_excess

    @property
    def noise(self) -> float:
        """How far two readings of the same thing differ."""
        return self._samples.kind.noise

    @property
    def _fitted(self) -> Fitted:
        return self._samples.fitted(self._scale)

    @cached_property
    def _trust(self) -> Trust:
        """What is asked of the fit, which is made by now."""
        return self._samples.trust(self._scale)

    def predict(self, sizes: Sizes) -> float:
        """Return the value at one shape, 0 if none was ever measured.

        Where it cannot be negative, it is at least 0.
        """
        samples = self._samples
        if not samples.readings or not samples.fits(sizes):
            return 0.0
        fit = self._fitted.fit
        own = self._samples.counted.get(sizes)
        value = math.nan
        if fit is not None and (self._holds(fit) or own is None):
            value = self._by_fit(fit, sizes, own or ())
        if not math.isfinite(value):
            value = self._most() if own is None else self._by_own(own)
        return max(0.0, value) if samples.kind.nonnegative else value

    def _by_fit(self, fit: VaryingFit, sizes: Sizes, own: tuple[float, ...]) -> float:
        if not self.is_excess:
            return _answer(fit.predict, sizes)[0]
        value = _answer(fit.predict_from_above, sizes)[0]
        allowance = _answer(self._trust.allowance, fit)[0]
        value += 0.0 if math.isnan(allowance) else allowance
        if len(own) >= REPEATS:
            value = max(value, float(np.median(own)))
        return value

    def exact(self, sizes: Sizes) -> int | None:
        """Return a count that is known to the last digit; None where it is not.

        As it was counted at that shape, each time the same; or by a polynomial that
        explains every sample exactly, where no size varies that never did before.
        """
        samples = self._samples
        own = samples.readings.get(sizes)
        if own is not None:
            return round(own[0]) if min(own) == max(own) else None
        if samples.is_hopeless or not samples.readings or not samples.fits(sizes):
            return None
        fit = self._fitted.fit
        if fit is None or not fit.is_exact or not self._holds(fit):
            return None
        if not fit.same_structure(sizes) or fit.outside(sizes, STRETCH):
            return None
        value = _answer(fit.predict, sizes)[0]
        is_whole = abs(value - round(value)) < _WHOLE if math.isfinite(value) else False
        return round(value) if is_whole else None

    def doubt(self, sizes: Sizes) -> str:
        """Return why a prediction at these sizes is not trusted; "" if it is."""
        samples = self._samples
        if not samples.readings:
            return "never measured"
        if not samples.fits(sizes):
            return "measured with another number of sizes"
        own = self._samples.counted.get(sizes)
        if own is not None and (len(own) >= REPEATS or self.noise == 0):
            return ""
        fitted = self._fitted
        fit = fitted.fit
        if fit is None:
            return f"the predictor failed: {fitted.why_not}"
        try:
            reason = self._trust.doubt(fit, sizes)
        except Exception as error:  # anybody's predictor, in anybody's step
            return f"the predictor failed: {said(error)}"
        if reason:
            return reason
        why_not = _answer(fit.predict, sizes)[1]
        return f"the predictor failed: {why_not}" if why_not else ""

    def has(self, sizes: Sizes) -> bool:
        """Whether this very shape was measured."""
        return sizes in self._samples.counted

    @property
    def is_trusted(self) -> bool:
        """Whether there is a fit that may speak of shapes not measured."""
        fit = self._fitted.fit if self._samples.readings else None
        return fit is not None and self._holds(fit)

    @property
    def is_exact(self) -> bool:
        """Whether such a fit explains every reading."""
        fit = self._fitted.fit if self._samples.readings else None
        return fit is not None and fit.is_exact and self._holds(fit)

    @property
    def error(self) -> float:
        """The error at a shape left out of the fit; infinite where there is none."""
        fit = self._fitted.fit if self._samples.readings else None
        return math.inf if fit is None else fit.loo_error

    def medians(self) -> list[tuple[Sizes, float]]:
        """Return what was measured: each shape's sizes and median, the oldest first."""
        readings = self._samples.counted.items()
        return [(sizes, float(np.median(own))) for sizes, own in readings]

    def _holds(self, fit: VaryingFit) -> bool:
        try:
            return self._trust.holds(fit)
        except Exception:  # anybody's predictor, in anybody's step
            return False

    def _by_own(self, own: tuple[float, ...]) -> float:
        return max(own) if self._samples.kind.nonnegative else float(np.median(own))

    def _most(self) -> float:
        """Return the largest reading, for want of anything better."""
        return max(map(max, self._samples.counted.values()))


def _answer(ask: Callable[..., float], what: object) -> tuple[float, str]:
    """Ask a predictor; NaN where it fails, and why it did."""
    try:
        value = ask(what)
    except Exception as error:  # anybody's predictor, in anybody's step
        return math.nan, said(error)
    return (value, "") if math.isfinite(value) else (math.nan, f"it predicted {value}")
