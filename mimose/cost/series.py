"""One quantity of one family as a function of sizes: what its samples say."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

from mimose.cost.samples import Samples, Verdict, failure_text
from mimose.predictors import VaryingFit
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

    __slots__ = ("_samples", "_scale", "is_excess", "noise")

    def __init__(self, samples: Samples, scale: float) -> None:
        self._samples = samples
        self._scale = scale
        self.is_excess = samples.kind.is_excess
        self.noise = samples.kind.noise

    def __len__(self) -> int:
        """Return the number of distinct shapes kept, one left out by a fit included."""
        return len(self._samples.readings)

    def __repr__(self) -> str:
        """Show how much was measured."""
        return f"Series({len(self)} shapes)"

    def predict(self, sizes: Sizes) -> float:
        """Return the value at one shape, 0 if none was ever measured.

        Where it cannot be negative, it is at least 0.
        """
        samples = self._samples
        if not samples.readings or len(sizes) != len(samples.low):
            return 0.0
        verdict = samples.verdict(self._scale)
        own = verdict.counted.get(sizes, ())
        value = math.nan
        if verdict.fit is not None and (verdict.is_trusted or not own):
            value = self._by_fit(verdict, verdict.fit, sizes, own)
        if not math.isfinite(value):
            value = self._by_readings(verdict, own)
        return max(0.0, value) if samples.kind.nonnegative else value

    def _by_fit(
        self, verdict: Verdict, fit: VaryingFit, sizes: Sizes, own: tuple[float, ...]
    ) -> float:
        if not self.is_excess:
            return _answer(fit.predict, sizes)[0]
        value = _answer(fit.predict_from_above, sizes)[0] + verdict.allowance
        if len(own) >= REPEATS:
            value = max(value, median(own))
        return value

    def _by_readings(self, verdict: Verdict, own: tuple[float, ...]) -> float:
        """Return what was read there; of other shapes, for want of better, the most."""
        if not own:
            return max(map(max, verdict.counted.values()))
        return max(own) if self._samples.kind.nonnegative else median(own)

    def exact(self, sizes: Sizes) -> int | None:
        """Return a count that is known to the last digit; None where it is not.

        As it was counted at that shape, each time the same; or by a polynomial that
        explains every sample exactly, where no size varies that never did before.
        """
        samples = self._samples
        own = samples.own(sizes, self._scale)
        if own:
            return round(own[0]) if min(own) == max(own) else None
        if not samples.readings or samples.is_hopeless:
            return None
        if len(sizes) != len(samples.low):
            return None
        verdict = samples.verdict(self._scale)
        fit = verdict.fit
        if fit is None or not (fit.is_exact and verdict.is_trusted):
            return None
        if not fit.same_structure(sizes) or fit.outside(sizes, verdict.reach):
            return None
        value = _answer(fit.predict, sizes)[0]
        is_whole = abs(value - round(value)) < _WHOLE if math.isfinite(value) else False
        return round(value) if is_whole else None

    def doubt(self, sizes: Sizes) -> str:
        """Return why a prediction at these sizes is not trusted; "" if it is."""
        samples = self._samples
        if not samples.readings:
            return "never measured"
        if len(sizes) != len(samples.low):
            return "measured with another number of sizes"
        own = samples.own(sizes, self._scale)
        if own and (len(own) >= REPEATS or self.noise == 0):
            return ""
        verdict = samples.verdict(self._scale)
        fit, why_not = verdict.fit, verdict.why_not
        if fit is not None and not why_not:
            if not verdict.is_trusted:
                n_shapes = len(verdict.counted)
                return f"{n_shapes} shapes measured, not enough to trust a fit"
            reason = fit.outside(sizes, verdict.reach)
            if reason:
                return reason
            why_not = _answer(fit.predict, sizes)[1]
        return f"the predictor failed: {why_not}" if why_not else ""

    def has(self, sizes: Sizes) -> bool:
        """Whether this very shape was measured."""
        return bool(self._samples.own(sizes, self._scale))

    @property
    def is_trusted(self) -> bool:
        """Whether there is a fit that may speak of shapes not measured."""
        samples = self._samples
        return bool(samples.readings) and samples.verdict(self._scale).is_trusted

    @property
    def is_exact(self) -> bool:
        """Whether such a fit explains every reading."""
        if not self.is_trusted:
            return False
        fit = self._samples.verdict(self._scale).fit
        return fit is not None and fit.is_exact

    @property
    def error(self) -> float:
        """The error at a shape left out of the fit; infinite where there is none."""
        samples = self._samples
        fit = samples.verdict(self._scale).fit if samples.readings else None
        return math.inf if fit is None else fit.loo_error

    def medians(self) -> list[tuple[Sizes, float]]:
        """Return what was measured: each shape's sizes and median, the oldest first."""
        samples = self._samples
        if not samples.readings:
            return []
        readings = samples.verdict(self._scale).counted.items()
        return [(sizes, median(own)) for sizes, own in readings]


def _answer(ask: Callable[[Sizes], float], sizes: Sizes) -> tuple[float, str]:
    """Ask a predictor; NaN where it fails, and why it did."""
    try:
        value = ask(sizes)
    except Exception as error:  # anybody's predictor, in anybody's step
        return math.nan, failure_text(error)
    return (value, "") if math.isfinite(value) else (math.nan, f"it predicted {value}")
