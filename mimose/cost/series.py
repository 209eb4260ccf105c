"""One quantity of one family as a function of sizes: its samples and its predictions.

A series is immutable. The first reader makes the fit, which is stored with it. Two
threads that read at once make the same fit twice, and one of them is stored. A new
reading that an exact fit predicts changes nothing; after any other the next reader fits
again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mimose.cost.pattern import as_tuples, oldest_small
from mimose.predictors import Estimator, Fit, LeastSquares
from mimose.types import Sizes

NEVER = "never measured"
_MOST_SHAPES = 64
"""Distinct shapes kept: then the oldest goes that is not the largest in any size."""
_MOST_READINGS = 8
"""Readings of one shape that are kept."""
_REPEATS = 2
"""Readings of one shape after which it needs no fit."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a quantity, which decides how it is fitted."""

    estimator: Estimator
    """The estimator; each quantity fits a copy."""
    noise: float = 0.0
    """By how much two readings of the same quantity differ; 0 for exact ones."""
    nonnegative: bool = True
    """Whether the quantity cannot be negative."""
    is_transient: bool = False
    """Whether it is a transient peak."""


def kinds_of(predictor: Estimator | None, noise_bytes: float) -> Mapping[str, Kind]:
    """Return the sorts of quantities, and how each is fitted.

    Args:
        predictor: Fits all of them; None for the default estimator.
        noise_bytes: How far two readings of the meter differ.
    """
    counted = predictor or LeastSquares()
    read = predictor or LeastSquares(noise=noise_bytes)
    return {
        "exact": Kind(counted),
        "transient": Kind(read, noise_bytes, is_transient=True),
        "retained": Kind(read, noise_bytes, nonnegative=False),
    }


@dataclass(eq=False, slots=True)
class Series:
    """Predicts one quantity at any shape, from its readings. It is immutable.

    If no fit is trusted, a measured shape is predicted from its own readings. An
    estimator that fails is not trusted, and raises no error, because the caller runs
    inside the user's training step.
    """

    kind: Kind
    readings: Mapping[Sizes, tuple[float, ...]] = field(default_factory=dict)
    """By shape, the oldest first."""
    high: Sizes = ()
    """The largest of each size measured; () before any."""
    _fit: Fit | None = None
    """Of these readings, if it was made already."""
    why_not: str = ""
    """Why there is no fit: an estimator that fails is a reason, never an error."""
    _last: tuple[tuple[Sizes, float], tuple[float, str]] | None = None
    """The last shape and scale that were asked for, and the answer."""

    @property
    def has_fit(self) -> bool:
        """Whether the fit was made already."""
        return self._fit is not None

    def fit(self) -> Fit | None:
        """Return the cached fit, fitting the readings first if needed.

        None without readings, or if the estimator failed.
        """
        if self._fit is None and self.readings and not self.why_not:
            kind = self.kind
            try:
                self._fit = Fit(
                    kind.estimator, self.readings, kind.noise, is_peak=kind.is_transient
                )
            except Exception as error:  # a user's estimator must not end the step
                self.why_not = _failure_text(error)
        return self._fit

    def with_readings(self, more: Iterable[tuple[Sizes, float]]) -> Series:
        """Return the series with some more readings.

        Args:
            more: Each one's sizes and value. Of another number of sizes than those
                before, it begins anew.
        """
        readings, high, fit = dict(self.readings), self.high, self._fit
        for sizes, value in more:
            if len(sizes) != len(high):
                readings, high, fit = {}, sizes, None
            high = tuple(map(max, high, sizes))
            own = readings.get(sizes, ())
            if len(own) >= _MOST_READINGS:
                continue
            if fit is not None and not _predicts(fit, sizes, high, value):
                fit = None
            readings[sizes] = (*own, value)
            if len(readings) > _MOST_SHAPES:
                shapes = list(readings)
                del readings[shapes[oldest_small(shapes)]]
        return Series(self.kind, readings, high, fit)

    @property
    def most(self) -> float:
        """The largest reading; 0 before any."""
        return max(map(max, self.readings.values()), default=0.0)

    def predict(self, sizes: Sizes, scale: float = 0.0) -> float:
        """Return the value at one shape, 0 if none was ever measured.

        Where it cannot be negative, it is at least 0.

        Args:
            sizes: The shape.
            scale: The growth of a step in bytes, of which tolerances are shares.
        """
        return self._answer(sizes, scale)[0]

    def why_unknown(self, sizes: Sizes, scale: float = 0.0) -> str:
        """Return why a prediction at these sizes is not trusted; "" if it is.

        Args:
            sizes: The shape.
            scale: As for `predict`.
        """
        return self._answer(sizes, scale)[1]

    def _answer(self, sizes: Sizes, scale: float) -> tuple[float, str]:
        """Return both; a plan asks for them several times."""
        asked, last = (sizes, scale), self._last
        if last is None or last[0] != asked:  # another thread may ask, too
            last = self._last = asked, self._find_answer(*asked)
        return last[1]

    def _find_answer(self, sizes: Sizes, scale: float) -> tuple[float, str]:
        if not self.readings:
            return 0.0, NEVER
        if len(sizes) != len(self.high):
            return 0.0, "measured with another number of sizes"
        kind, own = self.kind, self.readings.get(sizes, ())
        fit, value, failure = self.fit(), math.nan, self.why_not
        is_trusted = fit is not None and fit.is_trusted(scale)
        if fit is not None and (is_trusted or not own):
            value, failure = _asked(fit, sizes, scale)
        why_not = f"the predictor failed: {failure}" if failure else ""
        if len(own) >= (_REPEATS if kind.noise else 1):
            why_not = ""
        elif fit is not None and not is_trusted:
            n_shapes = len(self.readings)
            why_not = f"{n_shapes} shapes measured, not enough to trust a fit"
        elif fit is not None:
            why_not = fit.outside(sizes, self.high, scale) or why_not
        if math.isnan(value):
            value = self._by_readings(own)
        if kind.is_transient and len(own) >= _REPEATS:
            value = max(value, median(own))
        return max(0.0, value) if kind.nonnegative else value, why_not

    def _by_readings(self, own: tuple[float, ...]) -> float:
        """Return the readings' value at this shape; without any, the largest of all."""
        if not own:
            return self.most
        return max(own) if self.kind.nonnegative else median(own)

    def state_dict(self) -> dict[str, Any]:
        """Return the readings as lists, ready for JSON; fits are made anew."""
        samples = [[list(sizes), list(own)] for sizes, own in self.readings.items()]
        return {"samples": samples, "high": list(self.high)}

    @classmethod
    def from_state(cls, kind: Kind, state: Mapping[str, Any]) -> Series:
        """Return the series from what ``state_dict`` returned.

        Args:
            kind: What sort of quantity.
            state: What it returned.
        """
        return cls(kind, dict(as_tuples(state["samples"])), tuple(state["high"]))


def _predicts(fit: Fit, sizes: Sizes, high: Sizes, value: float) -> bool:
    """Whether a reading is what a settled fit says: then the same fit results."""
    if not fit.is_settled or fit.outside(sizes, high):
        return False
    return abs(fit.predict(sizes) - value) <= 1e-9 * max(1.0, abs(value))


def _asked(fit: Fit, sizes: Sizes, scale: float) -> tuple[float, str]:
    """Ask a fit; NaN where it fails, and why it did."""
    try:
        value = fit.predict(sizes, scale)
    except Exception as error:  # a user's estimator must not end the step
        return math.nan, _failure_text(error)
    return (value, "") if math.isfinite(value) else (math.nan, f"it says {value}")


def _failure_text(error: Exception) -> str:
    """Return what an estimator failed with, for the step's reason."""
    return f"{type(error).__name__}: {error}"
