"""Samples of one quantity of one family: immutable, with the fit that they make.

Note: [Fits are made when asked for]
A fit is made by the first reader and remembered with the samples, which it changes
nothing of. Two threads that read at once make the same fit twice, and either stays.
What comes in later is compared with the fit if there is one by then: samples that it
foretells are not all kept, and an early one that it leaves out is dropped. Who asks for
the readings of such a shape waits for the fit, so that all answers agree. The next fit
begins with the terms of the last, if there was one: see `mimose.predictors.trust`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from mimose.predictors import Predictor, Trust, VaryingFit, best_fit
from mimose.predictors.trust import reach
from mimose.types import Sizes

Readings: TypeAlias = Mapping[Sizes, tuple[float, ...]]
"""By shape, the oldest first."""

_MOST_SHAPES = 48
"""Distinct shapes kept; more are kept only where none before was as far off."""
_MOST_READINGS = 8
"""Readings of one shape that are kept."""
_ENOUGH = 16
"""Counts that no polynomial explains exactly; more would not change that."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What sort of quantity it is, and how it is fitted."""

    make: Callable[[float], Predictor]
    """Makes an unfitted predictor for readings of a given noise."""
    noise: float
    """How far two readings of the same thing differ; 0 for exact ones."""
    nonnegative: bool
    """Whether the quantity cannot be negative."""
    is_excess: bool = False
    """Whether it is a peak's rise over the level it began at."""


class Fitted(NamedTuple):
    """The fit of some samples, or why there is none."""

    fit: VaryingFit | None
    counted: Readings
    """All readings; but for an early shape's, where what it read happened once."""
    why_not: str = ""


class Verdict(NamedTuple):
    """What a fit may be asked, where errors are small against some scale."""

    scale: float
    fit: VaryingFit | None
    counted: Readings
    is_trusted: bool = False
    """Whether it may speak of shapes not measured."""
    reach: float = 0.0
    """How many times the largest size measured, if it is trusted."""
    allowance: float = 0.0
    """What an excess is raised by."""
    why_not: str = ""
    """Why the predictor cannot be asked at all."""


class Samples:
    """What was measured of one quantity. Who reads it never changes what it says.

    Args:
        kind: What sort of quantity.
        readings: By shape.
        low: The least of each size measured; () before any.
        high: The largest.
        is_hopeless: Whether so many counts have shown that no polynomial tells them.
        fitted: The fit of these readings, if it is known already.
        like: Else the last fit of some of them: its terms are tried first.
    """

    __slots__ = (
        "_fitted",
        "_like",
        "_verdict",
        "high",
        "is_hopeless",
        "kind",
        "low",
        "readings",
    )

    def __init__(
        self,
        kind: Kind,
        readings: Readings | None = None,
        low: Sizes = (),
        high: Sizes = (),
        *,
        is_hopeless: bool = False,
        fitted: Fitted | None = None,
        like: VaryingFit | None = None,
    ) -> None:
        self.kind = kind
        self.readings: Readings = {} if readings is None else readings
        self.low = low
        self.high = high
        self.is_hopeless = is_hopeless
        self._fitted = fitted
        self._like = like
        self._verdict: Verdict | None = None

    def verdict(self, scale: float) -> Verdict:
        """Return the fit and what it may be asked.

        Note: [Fits are made when asked for]. There has to be a reading.

        Args:
            scale: How large steps are, in bytes of growth.
        """
        verdict = self._verdict
        if verdict is None or verdict.scale != scale:
            verdict = self._verdict = self._judge(scale)
        return verdict

    def _judge(self, scale: float) -> Verdict:
        if self._fitted is None:
            self._fitted = self._fit(scale)
        fit, counted, why_not = self._fitted
        if fit is None:
            return Verdict(scale, None, counted, why_not=why_not)
        trust = self._trust(scale, len(counted))
        try:
            is_trusted = trust.holds(fit)
            allowance = trust.allowance(fit) if trust.is_excess else 0.0
        except Exception as error:  # anybody's predictor, in anybody's step
            return Verdict(scale, fit, counted, why_not=failure_text(error))
        return Verdict(
            scale, fit, counted, is_trusted, reach(fit, len(counted)), allowance
        )

    def _trust(self, scale: float, n_shapes: int) -> Trust:
        return Trust(self.kind.noise, scale, self.kind.is_excess, n_shapes)

    def _fit(self, scale: float) -> Fitted:
        """Fit; a predictor that fails is a reason, never an error.

        What asks is in the midst of somebody's training step.
        """
        try:
            trust = self._trust(scale, len(self.readings))
            seen = self.low, self.high
            make, like = self.kind.make, self._like
            best = best_fit(make, self.readings, trust, seen, like)
            first = best.fit.predict(next(iter(self.readings)))
        except Exception as error:  # anybody's predictor, in anybody's step
            return Fitted(None, self.readings, failure_text(error))
        if not math.isfinite(first):
            return Fitted(None, self.readings, f"it predicted {first}")
        rest = self.readings
        if best.left_out is not None:
            rest = {sizes: own for sizes, own in rest.items() if sizes != best.left_out}
        return Fitted(best.fit, rest)

    def own(self, sizes: Sizes, scale: float) -> tuple[float, ...]:
        """Return the readings of a shape itself; () if there are none that count.

        Args:
            sizes: The shape.
            scale: How large steps are, in bytes of growth.
        """
        own = self.readings.get(sizes, ())
        n_first = self._trust(scale, len(self.readings)).n_left_out_of
        if own and sizes in islice(self.readings, n_first):
            own = self.verdict(scale).counted.get(sizes, ())
        return own

    def with_readings(
        self, more: Iterable[tuple[Sizes, float]], scale: float
    ) -> Samples:
        """Return the samples with some more.

        Args:
            more: Each one's sizes and value. Of another number of sizes than those
                before, it begins anew.
            scale: How large steps are, in bytes of growth.
        """
        taking = _Taking(self, scale)
        for sizes, value in more:
            taking.add(sizes, value)
        return taking.done()

    def state_dict(self) -> dict[str, Any]:
        """Return the readings as lists, ready for JSON; fits are made anew."""
        return {
            "samples": [[list(s), list(own)] for s, own in self.readings.items()],
            "low": list(self.low),
            "high": list(self.high),
        }

    @classmethod
    def from_state(cls, kind: Kind, state: Mapping[str, Any]) -> Samples:
        """Return the samples that ``state_dict`` told of.

        Args:
            kind: What sort of quantity.
            state: What it returned.
        """
        readings = {
            tuple(map(int, sizes)): tuple(map(float, own))
            for sizes, own in state["samples"]
        }
        low, high = (tuple(map(int, state[end])) for end in ("low", "high"))
        return cls(kind, readings, low, high)


class _Taking:
    """Samples while some more are taken in; nobody else sees them.

    Args:
        samples: Those there are.
        scale: How large steps are.
    """

    def __init__(self, samples: Samples, scale: float) -> None:
        self._kind = samples.kind
        fitted = samples._fitted
        self._readings = dict(samples.readings if fitted is None else fitted.counted)
        self._low, self._high = samples.low, samples.high
        self._fit = None if fitted is None else fitted.fit
        self._like = samples._like if self._fit is None else self._fit
        self._scale = scale
        has_tried = fitted is not None and len(self._readings) >= _ENOUGH
        self._is_hopeless = samples.is_hopeless or (has_tried and not self._explains())

    def _explains(self) -> bool:
        """Whether the fit explains all counts."""
        fit = self._fit
        return fit is not None and fit.is_exact and self._is_trusted(fit)

    def done(self) -> Samples:
        fit, readings = self._fit, self._readings
        return Samples(
            self._kind,
            readings,
            self._low,
            self._high,
            is_hopeless=self._is_hopeless,
            fitted=None if fit is None else Fitted(fit, readings),
            like=self._like,
        )

    def add(self, sizes: Sizes, value: float) -> None:
        if self._readings and len(sizes) != len(self._low):
            self._readings, self._fit, self._like = {}, None, None
            self._low = self._high = ()
        self._low = tuple(map(min, self._low or sizes, sizes))
        self._high = tuple(map(max, self._high or sizes, sizes))
        own = self._readings.get(sizes)
        if own is not None and len(own) >= _MOST_READINGS:
            return
        surprises = self._surprises(sizes, value)
        if own is not None:
            self._readings[sizes] = (*own, value)
        elif surprises or len(self._readings) < _MOST_SHAPES:
            self._readings[sizes] = (value,)
            if len(self._readings) > 4 * _MOST_SHAPES:
                self._forget_one()
        if surprises:
            self._fit = None
        elif own is None and self._fit is not None:
            self._fit = self._fit.widened(sizes)

    def _forget_one(self) -> None:
        """Drop the oldest shape that is not the largest in any size."""
        high = tuple(map(max, *self._readings))
        for shape in self._readings:
            if not any(map(operator.eq, shape, high)):
                del self._readings[shape]
                return
        del self._readings[next(iter(self._readings))]

    def _surprises(self, sizes: Sizes, value: float) -> bool:
        """Whether a reading is other than the fit foretells, or there is none."""
        fit = self._fit
        if fit is None or not self._is_trusted(fit) or not fit.same_structure(sizes):
            return True
        try:
            error = abs(fit.predict(sizes) - value)
        except Exception:  # anybody's predictor, in anybody's step
            return True
        usual = fit.residual if len(self._readings) >= _MOST_SHAPES else 0.0
        return not error <= max(2 * fit.noise, 1e-6 * abs(value), usual)

    def _is_trusted(self, fit: VaryingFit) -> bool:
        kind, n_shapes = self._kind, len(self._readings)
        trust = Trust(kind.noise, self._scale, kind.is_excess, n_shapes)
        try:
            return trust.holds(fit)
        except Exception:  # anybody's predictor, in anybody's step
            return False


def failure_text(error: Exception) -> str:
    """Return what a predictor failed with, for the reason that is told."""
    return f"{type(error).__name__}: {error}"
