"""One quantity of one family as a function of sizes: samples, fit, trust."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from mimose.predictors.polynomial import LEFT_OUT_DEVIATIONS
from mimose.types import Sizes

STRETCH = 1.5
"""How far beyond the largest size seen an exact fit is trusted."""
NOISY_STRETCH = 1.25
"""The same for a fit of physical readings."""
_MOST_SHAPES = 48
"""Distinct shapes kept; more are kept only where none before was as far off."""
_MANY_SHAPES = 8
"""So many shapes tell noise from an excess that is fitted wrong."""
_FEW_SHAPES = 5
"""So many exact readings are worth another search for what explains them."""
_MANY_SHAPES_OF_NET = 24
"""The same for net changes: of equal layers one error is made many times."""
_BEARABLE = 5.0
"""How many times what is tolerated an excess of many shapes may be off."""
_BEARABLE_NET = 2.0
"""The same for a net change."""
_COARSER = 3.0
"""How much coarser the next fit is where one is not trusted."""
_ENOUGH = 16
"""Counts that no polynomial explains exactly; more would not change that."""
_WHOLE = 0.05
"""A count by a polynomial is this near to a whole number."""
_HALVED = 48
"""A smaller size is hardly an image's height or width."""
_REPEATS = 2
"""Measurements of one shape after which it needs no fit."""


_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


class Regressor(Protocol):
    """What a series asks of a predictor."""

    n_shapes_: int
    exact_: bool
    loo_error_: float

    def fit(self, X: object, y: object) -> object:
        """Fit X (n_samples, n_features) sizes to y (n_samples,)."""
        ...

    def predict_one(self, sizes: list[float]) -> float:
        """Predict at one shape."""
        ...


class Series:
    """Samples of one quantity and what they say of other shapes.

    Sizes that never varied, or always equalled another, are left out of the fit. A
    shape that was measured itself is answered from its own samples where no fit can
    be trusted. A predictor that fails is a reason for doubt, never an error: what asks
    is in the midst of somebody's training step.

    Args:
        make: Makes an unfitted regressor for readings of a given noise.
        noise: How far two readings of the same thing differ; 0 for exact ones.
        nonnegative: Whether the quantity cannot be negative.
        is_excess: Whether it is a peak's rise over the level it began at.
    """

    def __init__(
        self,
        make: Callable[[float], Regressor],
        noise: float,
        *,
        nonnegative: bool,
        is_excess: bool = False,
    ) -> None:
        self._make = make
        self.noise = noise
        self._nonnegative = nonnegative
        self.is_excess = is_excess
        self._samples: dict[Sizes, list[float]] = {}
        self._fit: _Fit | None = None
        self._failure = ""
        self._range: tuple[Sizes, Sizes] | None = None
        self._is_no_polynomial = False
        """Whether so many counts have shown it; no more fits are tried for them."""
        self.scale = 0.0
        """What an error is small against: a step's growth. Set by the owner."""

    def __len__(self) -> int:
        """Return the number of distinct shapes kept."""
        return len(self._samples)

    def add(self, sizes: Sizes, value: float) -> None:
        """Take in one measurement; what had another number of sizes is dropped."""
        if not self._fits(sizes):
            self._samples.clear()
            self._range = None
            self._distrust()
        low, high = self._range or (sizes, sizes)
        self._range = tuple(map(min, low, sizes)), tuple(map(max, high, sizes))
        known = self._samples.get(sizes)
        if known is not None:
            if len(known) < 8:
                known.append(value)
                if self._surprises(sizes, value):
                    self._distrust()
            return
        surprises = self._surprises(sizes, value)
        if surprises or len(self._samples) < _MOST_SHAPES:
            self._samples[sizes] = [value]
            if len(self._samples) > 4 * _MOST_SHAPES:
                self._forget_one()
        if surprises:
            self._distrust()
        elif self._fit is not None:
            self._fit.widen(sizes)

    def _fits(self, sizes: Sizes) -> bool:
        """Whether there are as many sizes as in the samples; any number before them."""
        return self._range is None or len(sizes) == len(self._range[0])

    def _distrust(self) -> None:
        """Fit anew when next asked."""
        self._fit, self._failure = None, ""

    def _forget_one(self) -> None:
        """Drop the oldest shape that is not the largest in any size."""
        high = tuple(map(max, *self._samples))
        for shape in self._samples:
            if not any(map(operator.eq, shape, high)):
                del self._samples[shape]
                return
        del self._samples[next(iter(self._samples))]

    def _surprises(self, sizes: Sizes, value: float) -> bool:
        fit = self._fit
        if fit is None or not self._trusts(fit):
            return True
        if not fit.same_structure(sizes):
            return True
        error = abs(self._value(fit.predict, sizes) - value)
        usual = fit.residual if len(self._samples) >= _MOST_SHAPES else 0.0
        return not error <= max(2 * fit.noise, 1e-6 * abs(value), usual)

    def predict(self, sizes: Sizes) -> float:
        """Return the value at one shape, 0 if none was ever measured.

        Where it cannot be negative, it is at least 0.
        """
        if not self._samples or not self._fits(sizes):
            return 0.0
        fit = self._fitted()
        is_known = sizes in self._samples
        if fit is not None and (self._trusts(fit) or not is_known):
            is_excess = self.is_excess
            ask = fit.predict_from_above if is_excess else fit.predict
            value = self._value(ask, sizes)
            if is_excess:
                value += self._allowance(fit)
            if is_excess and len(self._samples.get(sizes, ())) >= _REPEATS:
                value = max(value, float(np.median(self._samples[sizes])))
        else:
            value = math.nan
        if math.isnan(value):
            value = self._own(sizes) if is_known else self._most()
        return max(0.0, value) if self._nonnegative else value

    def exact(self, sizes: Sizes) -> int | None:
        """Return a count that is known to the last digit; None where it is not.

        As it was counted at that shape, each time the same; or by a polynomial that
        explains every sample exactly, where no size varies that never did before.
        """
        own = self._samples.get(sizes)
        if own is not None:
            return round(own[0]) if min(own) == max(own) else None
        if self._is_no_polynomial or not self._samples or not self._fits(sizes):
            return None
        fit = self._fitted()
        if fit is None or not (fit.is_exact and self._trusts(fit)):
            self._is_no_polynomial = len(self._samples) >= _ENOUGH
            return None
        if not fit.same_structure(sizes) or fit.outside(sizes, STRETCH):
            return None
        value = self._value(fit.predict, sizes)
        is_whole = abs(value - round(value)) < _WHOLE if math.isfinite(value) else False
        return round(value) if is_whole else None

    def doubt(self, sizes: Sizes) -> str:
        """Return why a prediction at these sizes is not trusted; "" if it is."""
        if not self._samples:
            return "never measured"
        if not self._fits(sizes):
            return "measured with another number of sizes"
        own = self._samples.get(sizes)
        if own is not None and (len(own) >= _REPEATS or self.noise == 0):
            return ""
        fit = self._fitted()
        is_trusted = fit is not None and self._trusts(fit)
        if fit is None or self._failure:
            return f"the predictor failed: {self._failure}"
        if not is_trusted:
            return f"{len(self._samples)} shapes measured, not enough to trust a fit"
        return fit.outside(sizes, STRETCH if fit.is_exact else NOISY_STRETCH)

    def has(self, sizes: Sizes) -> bool:
        """Whether this very shape was measured."""
        return sizes in self._samples

    @property
    def is_trusted(self) -> bool:
        """Whether there is a fit that may speak of shapes not measured."""
        fit = self._fitted() if self._samples else None
        return fit is not None and self._trusts(fit)

    @property
    def is_exact(self) -> bool:
        """Whether such a fit explains every reading."""
        return self.is_trusted and self._fit is not None and self._fit.is_exact

    @property
    def error(self) -> float:
        """The error at a shape left out of the fit; infinite where there is none."""
        fit = self._fitted() if self._samples else None
        return math.inf if fit is None else fit.loo_error

    def readings(self) -> list[tuple[Sizes, float]]:
        """Return what was measured: each shape's sizes and median."""
        return [(sizes, float(np.median(own))) for sizes, own in self._samples.items()]

    def _trusts(self, fit: _Fit) -> bool:
        """Whether a fit may speak of shapes not measured.

        What many shapes still scatter by is noise, which no further shape takes away.
        """
        return self._ask(fit.trusted, self._bearable()) is True

    def _bearable(self) -> float:
        """Return the largest error at a left-out shape of a fit that is trusted."""
        n_shapes = len(self._samples)
        times = 1.0
        if self.is_excess and n_shapes >= _MANY_SHAPES:
            times = _BEARABLE
        elif self.noise > 0 and n_shapes >= _MANY_SHAPES_OF_NET:
            times = _BEARABLE_NET
        return times * self._tolerance()

    def _allowance(self, fit: _Fit) -> float:
        """Return what an excess is raised by: nothing where errors are tolerated.

        It counts only where it makes the peak. A net change is not raised, for all that
        follows would be; what a reading is off by, the next one makes up for.
        """
        is_near = self._ask(fit.trusted, self._tolerance()) is True
        return 0.0 if is_near or not self._trusts(fit) else fit.loo_error

    def _tolerance(self) -> float:
        """Return the largest error at a left-out shape that is nothing to speak of."""
        return max(20 * self.noise, 0.02 * self.scale)

    def _own(self, sizes: Sizes) -> float:
        values = self._samples[sizes]
        return max(values) if self._nonnegative else float(np.median(values))

    def _most(self) -> float:
        """Return the largest reading, for want of anything better."""
        return max(map(max, self._samples.values()))

    def _fitted(self) -> _Fit | None:
        """Return the fit, made if need be; None where the predictor fails."""
        if self._fit is None and not self._failure:
            self._fit = self._ask(self._make_fit, self.is_excess)
            if self._fit is not None:
                self._value(self._fit.predict, next(iter(self._samples)))
        return self._fit

    def _make_fit(self, is_excess: bool) -> _Fit:
        """Return the finest fit within what is tolerated; failing all, the closest.

        What readings scatter by beyond the meter's noise asks for monomials that the
        samples then cannot settle. A coarser fit, with fewer, can be good enough.
        """
        fits = []
        for noise in self._grains():
            fit = self._new_fit(noise, is_excess)
            if self.noise == 0.0 and not fit.is_exact:
                fit = self._exact_fit(is_excess) or fit
            fits.append(fit)
            if fit.trusted(self._tolerance()):
                return fit
        return min(fits, key=lambda fit: fit.loo_error)

    def _exact_fit(self, is_excess: bool) -> _Fit | None:
        """Look for an exact fit where one on all sizes as they are is none.

        A stride of two makes ``ceil(size / 2)`` of a size, which is no polynomial of
        it: odd heights of an image take a little more than even ones. And what happens
        once (a library takes its workspace) is part of the first reading alone, which
        is forgotten where it is the only one that does not fit.
        """
        if len(self._samples) < _FEW_SHAPES:
            return None
        for features in _HALVINGS:
            halved = self._new_fit(self.noise, is_excess, features)
            if halved.is_exact and halved.trusted(self._tolerance()):
                return halved
        if len(self._samples) < _MANY_SHAPES:
            return None
        first, *others = self._samples
        rest = {sizes: self._samples[sizes] for sizes in others}
        later = self._new_fit(self.noise, is_excess, samples=rest)
        if not later.is_exact or not later.trusted(self._tolerance()):
            return None
        del self._samples[first]
        return later

    def _new_fit(
        self,
        noise: float,
        is_excess: bool,
        features: Callable[[Sizes], Sizes] | None = None,
        samples: dict[Sizes, list[float]] | None = None,
    ) -> _Fit:
        fit = _Fit(
            self._make(noise),
            self._samples if samples is None else samples,
            noise,
            is_raised=is_excess,
            features=features or _as_they_are,
        )
        for sizes in self._range or ():
            fit.widen(sizes)
        return fit

    def _grains(self) -> Iterator[float]:
        """Yield the noises to fit with: the meter's, and up to what is tolerated."""
        yield self.noise
        if self.noise > 0 and len(self._samples) >= _MANY_SHAPES:
            coarsest = self._tolerance() / LEFT_OUT_DEVIATIONS
            coarser = _COARSER * self.noise
            while coarser < coarsest:
                yield coarser
                coarser *= _COARSER
            yield coarsest

    def _value(self, predict: Callable[[Sizes], float], sizes: Sizes) -> float:
        """Return what a fit predicts; NaN where it fails, which the next doubt says."""
        value = self._ask(predict, sizes)
        if value is None:
            return math.nan
        if not math.isfinite(value):
            self._failure = f"it predicted {value}"
            return math.nan
        return value

    def _ask(self, ask: Callable[[_Asked], _Answer], what: _Asked) -> _Answer | None:
        """Ask a predictor; None where it fails, for the reason that is noted."""
        try:
            return ask(what)
        except Exception as error:  # anybody's predictor, in anybody's step
            self._failure = f"{type(error).__name__}: {error}"
            return None

    def state_dict(self) -> dict[str, Any]:
        """Return the samples as lists, ready for JSON; fits are made anew."""
        low, high = self._range or ((), ())
        return {
            "samples": [[list(sizes), own] for sizes, own in self._samples.items()],
            "low": list(low),
            "high": list(high),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over another series' samples.

        Args:
            state: What ``state_dict`` returned.
        """
        self._samples = {
            tuple(map(int, sizes)): list(map(float, own))
            for sizes, own in state["samples"]
        }
        low, high = (tuple(map(int, state[end])) for end in ("low", "high"))
        self._range = (low, high) if self._samples else None
        self._distrust()


class _Fit:
    """A regressor on the columns that vary by themselves.

    Args:
        regressor: Not fitted yet.
        samples: The readings, by shape.
        noise: What the regressor takes for noise.
        is_raised: Whether it is raised over 19 in 20 of the single readings: of equal
            layers that reach about the same level, the highest makes the peak.
        features: Turns sizes into what is fitted on.
    """

    def __init__(
        self,
        regressor: Regressor,
        samples: dict[Sizes, list[float]],
        noise: float,
        *,
        is_raised: bool,
        features: Callable[[Sizes], Sizes],
    ) -> None:
        shapes = list(samples)
        self._features = features
        rich = [features(shape) for shape in shapes]
        self._fitted_columns = [c for c, r in enumerate(_roles(rich)) if r == c]
        matrix = np.array(shapes, dtype=float).reshape(len(shapes), -1)
        self._roles = _roles(shapes)
        self._columns = [c for c, role in enumerate(self._roles) if role == c]
        self._first = shapes[0]
        self._low: Sizes = tuple(int(low) for low in matrix.min(axis=0))
        self._high: Sizes = tuple(int(high) for high in matrix.max(axis=0))
        self.noise = noise
        self._verdicts: dict[float, bool] = {}
        self._n_shapes = len(shapes)
        # Equal layers measure the same shape many times a step; the median shrugs off
        # the one reading in which something else happened.
        values = [float(np.median(samples[shape])) for shape in shapes]
        inputs = np.array([self._reduce(shape) for shape in shapes], dtype=float)
        self._regressor = regressor
        regressor.fit(inputs, np.array(values, dtype=float))
        self.is_exact = bool(regressor.exact_)
        self.residual = float(getattr(regressor, "residual_", 0.0))
        self._lift = 0.0
        if is_raised:
            rest = [v - self.predict(shape) for shape in shapes for v in samples[shape]]
            self._lift = max(0.0, float(np.quantile(rest, 0.95, method="higher")))

    def _reduce(self, sizes: Sizes) -> list[float]:
        features = self._features(sizes)
        return [float(features[c]) for c in self._fitted_columns] or [1.0]

    def predict(self, sizes: Sizes) -> float:
        return float(self._regressor.predict_one(self._reduce(sizes))) + self._lift

    def trusted(self, tolerance: float) -> bool:
        """More shapes than monomials, and each predicted when it is left out."""
        verdict = self._verdicts.get(tolerance)
        if verdict is None:
            verdict = self._verdicts[tolerance] = self._is_trusted(tolerance)
        return verdict

    def _is_trusted(self, tolerance: float) -> bool:
        if self._n_shapes < 2:
            return False
        if bool(getattr(self._regressor, "trusted_", False)):
            return True
        return self.loo_error <= tolerance

    @property
    def loo_error(self) -> float:
        """Error at a shape left out; infinite where the samples do not settle it."""
        n_terms = len(getattr(self._regressor, "monomials_", ())) or 1
        is_determined = self._n_shapes > n_terms + len(self._columns)
        return self._regressor.loo_error_ if is_determined else math.inf

    def same_structure(self, sizes: Sizes) -> bool:
        """Whether constant columns are constant still, and equal ones equal."""
        for column, role in enumerate(self._roles):
            expected = self._first[column] if role < 0 else sizes[role]
            if sizes[column] != expected:
                return False
        return True

    def outside(self, sizes: Sizes, stretch: float) -> str:
        for column, role in enumerate(self._roles):
            size = sizes[column]
            if role < 0 and size > self._first[column]:
                return f"{size} where only {self._first[column]} was measured"
            if role >= 0 and role != column and size != sizes[role]:
                return f"{size} and {sizes[role]} differ, which were always equal"
            if role == column and size > self._high[column] * stretch:
                return f"{size} is beyond {self._high[column]}, the most measured"
        return ""

    def predict_from_above(self, sizes: Sizes) -> float:
        """Predict; below the least sizes measured, no less than in proportion to them.

        An excess is a maximum, and below what was seen another of its parts may be
        the largest. What it is there is at most what it was at the least sizes, and
        falls with each of them. A fit that explains every one of exact readings is
        believed as it is.
        """
        raised = tuple(map(max, sizes, self._low))
        value = self.predict(sizes)
        if raised == sizes or (self.is_exact and self.noise == 0.0):
            return value
        below = [c for c in self._columns if sizes[c] < raised[c]]
        share = math.prod(sizes[c] / raised[c] for c in below)
        return max(value, self.predict(raised) * share)

    def widen(self, sizes: Sizes) -> None:
        """Take note of a shape that the fit predicted well."""
        self._low = tuple(map(min, self._low, sizes))
        self._high = tuple(map(max, self._high, sizes))


def _as_they_are(sizes: Sizes) -> Sizes:
    return sizes


def _halved(times: int) -> Callable[[Sizes], Sizes]:
    """Return what puts, behind sizes, those of images halved so often, and once more.

    Args:
        times: How often; each time rounded up.
    """

    def features(sizes: Sizes) -> Sizes:
        here = [-(-size // 2**times) if size >= _HALVED else 0 for size in sizes]
        return (*sizes, *here, *[-(-size // 2) for size in here])

    return features


_HALVINGS = tuple(map(_halved, (1, 3, 4)))
"""Strides of 2, 4, 8, 16 and 32, two at a time: with all there are too many terms."""


def _roles(shapes: list[Sizes]) -> list[int]:
    """Return for each column -1 (constant), itself, or the column it repeats."""
    columns = list(zip(*shapes, strict=True))
    first: dict[tuple[int, ...], int] = {}
    roles = []
    for index, values in enumerate(columns):
        is_constant = all(value == values[0] for value in values)
        roles.append(-1 if is_constant else first.setdefault(values, index))
    return roles
