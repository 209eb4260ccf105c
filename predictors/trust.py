"""Whether a fit may speak of shapes that were not measured: the one place that says.

A fit is trusted where it has seen more shapes than it has terms, tells each shape from
the others to what is tolerated, and is asked within what was measured or a little
beyond. Scatter that many shapes show is noise, which no further shape takes away: so
where there are many a fit may be off by more, and coarser ones are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .polynomial import LEFT_OUT_DEVIATIONS, PolynomialRegressor
from .varying import HALVINGS, VaryingFit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .base import Predictor

    Sizes = tuple[int, ...]
    Readings = Mapping[Sizes, Sequence[float]]

EXTRAPOLATION = 1.5
"""How far beyond the largest size seen an exact fit is trusted, ..."""
FAR_EXTRAPOLATION = 4.0
"""... and one that explains some shapes: the longest batch may come early."""
NOISY_EXTRAPOLATION = 1.25
"""The same for a fit of physical readings."""
REPEATS = 2
"""Readings of one shape after which it needs no fit."""
_OF_NOISE, _OF_SCALE = 20, 0.02
"""An error within so many times the noise, or this share of the scale, is nothing."""
_MANY_SHAPES = 8
"""So many shapes tell noise from an excess that is fitted wrong."""
_SOME_SHAPES = 4
"""So many exact readings that one polynomial explains go on like it."""
_FEW_SHAPES = 5
"""So many exact readings are worth another search for what explains them."""
_FIRST_SHAPES = 4
"""One of so many may be of what happens once: DDP makes its buckets anew in step two,
and gloo's thread lets the old ones go a step later on a busy machine."""
_MOST_OF_HALVED = 4
"""The largest number of monomials of sizes and halved ones."""
_MANY_SHAPES_OF_NET = 24
"""The same for net changes: of equal layers one error is made many times."""
_BEARABLE = 5.0
"""How many times what is tolerated an excess of many shapes may be off."""
_BEARABLE_NET = 2.0
"""The same for a net change."""
_MORE_SHAPES = 1.25
"""With so many times the shapes all is searched again, where no fit is exact."""
_WORSE = 2.0
"""The same where they are off by so many times what they were."""
_COARSER = 3.0
"""How much coarser the next fit is where one is not trusted."""


@dataclass(frozen=True, slots=True)
class Trust:
    """What is asked of a fit of one quantity."""

    noise: float
    """How far two readings of the same thing differ; 0 for exact ones."""
    scale: float
    """What an error is small against, in the quantity's unit."""
    is_excess: bool
    """Whether it is a peak's rise over the level it began at."""
    n_shapes: int
    """Distinct shapes measured."""

    @property
    def tolerance(self) -> float:
        """The largest error at a left-out shape that is nothing to speak of."""
        return max(_OF_NOISE * self.noise, _OF_SCALE * self.scale)

    @property
    def bearable(self) -> float:
        """The largest error at a left-out shape of a fit that is trusted."""
        times = 1.0
        if self.is_excess and self.n_shapes >= _MANY_SHAPES:
            times = _BEARABLE
        elif self.noise > 0 and self.n_shapes >= _MANY_SHAPES_OF_NET:
            times = _BEARABLE_NET
        return times * self.tolerance

    @property
    def n_left_out_of(self) -> int:
        """How many of the first shapes there are of which one may be left out."""
        may = self.noise == 0.0 and self.n_shapes > _FEW_SHAPES
        return _FIRST_SHAPES if may else 0

    def holds(self, fit: VaryingFit) -> bool:
        """Whether a fit may speak of shapes not measured."""
        return is_near(fit, self.bearable)

    def allowance(self, fit: VaryingFit) -> float:
        """Return what an excess is raised by: nothing where errors are tolerated.

        It counts only where it makes the peak. A net change is not raised, for all that
        follows would be; what a reading is off by, the next one makes up for.
        """
        is_raised = not is_near(fit, self.tolerance) and self.holds(fit)
        return fit.loo_error if is_raised else 0.0

    def grains(self) -> Iterator[float]:
        """Yield the noises to fit with: the meter's, and up to what is tolerated."""
        yield self.noise
        if self.noise > 0 and self.n_shapes >= _MANY_SHAPES:
            coarsest = self.tolerance / LEFT_OUT_DEVIATIONS
            coarser = _COARSER * self.noise
            while coarser < coarsest:
                yield coarser
                coarser *= _COARSER
            yield coarsest


def reach(fit: VaryingFit, n_shapes: int) -> float:
    """Return how many times the largest size measured a trusted fit may be asked at.

    Args:
        fit: The fit.
        n_shapes: Shapes that bear it out, those that came after it included.
    """
    if not fit.is_exact:
        return NOISY_EXTRAPOLATION
    return FAR_EXTRAPOLATION if n_shapes >= _SOME_SHAPES else EXTRAPOLATION


def is_near(fit: VaryingFit, tolerance: float) -> bool:
    """Whether a fit tells left-out shapes to a tolerance, or says itself that it does.

    Args:
        fit: The fit.
        tolerance: The largest error, in the quantity's unit.
    """
    return fit.n_shapes >= 2 and (fit.says_trusted or fit.loo_error <= tolerance)


@dataclass(frozen=True, slots=True)
class BestFit:
    """The fit that serves, and what had to be left out for it."""

    fit: VaryingFit
    left_out: Sizes | None = None
    """One of the first shapes, where its reading was of what happened once."""


def best_fit(
    make: Callable[[float], Predictor],
    readings: Readings,
    trust: Trust,
    seen: Sequence[Sizes] = (),
    like: VaryingFit | None = None,
) -> BestFit:
    """Return the finest fit within what is tolerated; failing all, the closest.

    What readings scatter by beyond the meter's noise asks for monomials that the
    samples then cannot settle. A coarser fit, with fewer, can be good enough.

    Args:
        make: Makes an unfitted predictor for readings of a given noise.
        readings: By shape, in the order in which they came; at least one.
        trust: What is asked of the fit.
        seen: Other shapes that count as measured.
        like: The best of fewer readings. Where its terms hold on, no others are
            searched for: it costs a tenth of a search.

    Raises:
        Exception: Whatever the predictor raises.
    """
    if like is not None and _may_hold(like, trust, len(readings)):
        again = like.again(readings, is_raised=trust.is_excess)
        if again is not None and _holds_on(again, trust):
            return BestFit(again.widened(*seen))
    fits = []
    for noise in trust.grains():
        fit = VaryingFit(make(noise), readings, noise, is_raised=trust.is_excess)
        fit = fit.widened(*seen)
        if trust.noise == 0.0 and not fit.is_exact:
            if like is not None and not (like.is_exact or _is_due(like, len(readings))):
                return BestFit(fit.searched_like(like))
            exact = _exact_fit(make, readings, trust, seen)
            if exact is not None:
                return exact
        fits.append(fit)
        if is_near(fit, trust.tolerance):
            return BestFit(fit)
    return BestFit(min(fits, key=lambda fit: fit.loo_error))


def _may_hold(like: VaryingFit, trust: Trust, n_shapes: int) -> bool:
    """Whether the terms of a fit may still be those that a search would find.

    If they explain all of exact readings, they are. Of others a search among many more
    may find terms that err less.
    """
    if trust.noise == 0.0:
        return like.is_exact
    return is_near(like, trust.tolerance) and not _is_due(like, n_shapes)


def _is_due(like: VaryingFit, n_shapes: int) -> bool:
    """Whether there are so many more shapes that all is to be searched again."""
    return n_shapes > _MORE_SHAPES * like.n_searched


def _holds_on(again: VaryingFit, trust: Trust) -> bool:
    """Whether terms that were fitted to further readings serve as well as before."""
    is_no_worse = again.residual <= _WORSE * again.residual_searched
    return is_near(again, trust.tolerance) and (again.is_exact or is_no_worse)


def _exact_fit(
    make: Callable[[float], Predictor],
    readings: Readings,
    trust: Trust,
    seen: Sequence[Sizes],
) -> BestFit | None:
    """Look for an exact fit where one on all sizes as they are is none.

    A stride of two makes ``ceil(size / 2)`` of a size, which is no polynomial of
    it: odd heights of an image take a little more than even ones. One polynomial
    of few terms has to tell that, for of so many sizes there are many. And what
    happens once (a library takes its workspace) is part of one of the first readings,
    which is left out where it is the only one that does not fit.
    """
    if len(readings) < _FEW_SHAPES:
        return None
    for features in HALVINGS:
        simple = PolynomialRegressor(max_monomials=_MOST_OF_HALVED)
        halved = VaryingFit(simple, readings, 0.0, is_raised=False, features=features)
        if halved.is_exact and is_near(halved, trust.tolerance):
            return BestFit(halved.widened(*seen))
    for odd in tuple(readings)[: trust.n_left_out_of]:
        rest = {sizes: own for sizes, own in readings.items() if sizes != odd}
        without = VaryingFit(make(0.0), rest, 0.0, is_raised=trust.is_excess)
        if without.is_exact and is_near(without, trust.tolerance):
            return BestFit(without.widened(*seen), left_out=odd)
    return None
