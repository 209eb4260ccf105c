"""Upper envelopes of polynomials, for quantities that are a maximum."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from ._samples import Samples, nearly_largest, not_fitted
from ._shapes import ShapeRegressor
from .polynomial import EXACT, PolynomialRegressor, fit_tolerance

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Mask = NDArray[np.bool_]

_FEW = 2
"""A polynomial with as many monomials that explains the samples is not split."""
_CUTS = 10
"""The largest number of places at which one order of the samples is cut."""
_STARTS = 3
"""How many of the cuts are refined."""
_ROUNDS = 4
"""How often the samples are assigned anew."""
_CLEARLY = 2.0
"""How much closer two polynomials that do not explain the samples have to come."""
_MOST_A_PIECE = 3
"""The largest number of monomials of one of two polynomials."""


class EnvelopeRegressor(ShapeRegressor):
    """One polynomial, or the larger of two, or one raised above the samples.

    The excess of a segment is the highest of several moments, each of which is a
    polynomial of the sizes: a maximum, which no polynomial fits. The samples are
    explained in this order:

    1. by one polynomial (`PolynomialRegressor`);
    2. by the larger of two, when that explains the samples and one does not, or
       only with more monomials. The samples are cut along a size, a product or a
       ratio of sizes; then each goes to the polynomial that is larger there and
       both are fitted anew, until nothing changes. No chance is involved;
    3. failing both, by the best single polynomial, or by the larger of two when
       that comes twice as close.

    Unless the fit is exact, it is then raised until no more than one in 20 shapes'
    means lies above it: an excess that is predicted too low breaks a budget, one a
    little too high costs next to nothing. So a prediction is rarely too low by more
    than the noise of a new reading, and too high by about twice the noise; in the
    third case by as much as most samples are off.

    Args:
        noise: Absolute noise of a value, as a standard deviation, in units of y.
        nonnegative: Whether predictions below 0 are raised to 0.

    It has the attributes of `ShapeRegressor` as well.

    Attributes:
        pieces_: The one or two fitted polynomials.
        shift_: By how much their maximum is raised, in units of y.
        residual_: Largest distance of a fitted from a sampled value, unraised.
        explains_: Whether each is within its tolerance, unraised.
        loo_error_: Error at a shape that was left out of its polynomial, the largest
            but for one in 20. Where nothing else determines that, the other
            polynomial is what is left.
    """

    pieces_: tuple[PolynomialRegressor, ...]
    shift_: float
    residual_: float
    explains_: bool
    loo_error_: float

    def __init__(self, *, noise: float = 0.0, nonnegative: bool = True) -> None:
        self.noise = noise
        self.nonnegative = nonnegative

    def _fit(self, samples: Samples) -> None:
        """Fit the envelope."""
        single = self._piece(samples)
        pieces: tuple[PolynomialRegressor, ...] = (single,)
        mask = np.ones(len(samples.values), dtype=np.bool_)
        few = single.exact_ or len(single.monomials_) <= _FEW
        if samples.varying and not (few and single.explains_):
            pieces, mask = self._pair(samples, single) or (pieces, mask)
        self._take_over(pieces, mask, samples)

    def _refit(self, samples: Samples, like: EnvelopeRegressor) -> bool:
        """Fit another's polynomials to the samples where they were the larger."""
        mask = np.ones(len(samples.values), dtype=np.bool_)
        sides = [samples]
        if len(like.pieces_) > 1:
            first, second = (each._evaluate(samples.sizes) for each in like.pieces_)
            mask = first > second
            if not mask.any() or mask.all():
                return False
            sides = [_some(samples, mask), _some(samples, ~mask)]
        pieces: list[PolynomialRegressor] = []
        for side, old in zip(sides, like.pieces_, strict=True):
            piece = old.refitted(side)
            if piece is None:
                return False
            pieces.append(piece)
        self._take_over(tuple(pieces), mask, samples)
        if like.exact_ and not self.exact_:
            return False
        return self.explains_ or not like.explains_

    def _take_over(
        self, pieces: tuple[PolynomialRegressor, ...], mask: Mask, samples: Samples
    ) -> None:
        """Make the envelope of fitted polynomials, and raise it."""
        rest = samples.values - _highest(pieces, samples.sizes)
        self.pieces_ = pieces
        off, size = np.abs(rest), np.abs(samples.values)
        near = off <= EXACT * np.maximum(size, 1e-3 * size.max())
        self.exact_ = all(piece.exact_ for piece in pieces) and bool(near.all())
        self.shift_ = (
            0.0 if self.exact_ else max(0.0, nearly_largest(rest, samples.values))
        )
        self.residual_ = float(off.max()) + samples.spread
        tolerance = self._tolerance(samples) * (1.0 + EXACT)
        self.explains_ = bool((off <= tolerance).all())
        left_out = _left_out(pieces, mask, samples)
        self.loo_error_ = nearly_largest(left_out, samples.values)

    def _evaluate(self, sizes: Floats) -> Floats:
        return _highest(self.pieces_, sizes) + self.shift_

    def predict_one(self, sizes: Sequence[float]) -> float:
        """Return the value at one shape, quickly and without checks.

        Args:
            sizes: The sizes, one a column.

        Raises:
            NotFittedError: If ``fit`` was not called.
        """
        try:
            pieces = self.pieces_
        except AttributeError:
            raise not_fitted(self) from None
        value = pieces[0].predict_one(sizes)
        for piece in pieces[1:]:
            value = max(value, piece.predict_one(sizes))
        value += self.shift_
        return value if value > 0.0 or not self.nonnegative else 0.0

    @property
    def trusted_(self) -> bool:
        """Whether the samples bear the fit out: ``is_trusted()``."""
        return self.is_trusted()

    def is_trusted(self, tolerance: float = 0.01) -> bool:
        """Return whether every piece is trusted by its own samples.

        Two pieces could also have been cut elsewhere. When they are exact each needs
        two shapes more than it has monomials, otherwise both together need four
        more for every size that varies, and one for the cut.

        Args:
            tolerance: As in `PolynomialRegressor.is_trusted`.

        Raises:
            NotFittedError: If ``fit`` was not called.
        """
        self._refuse_unfitted()
        if not all(piece.is_trusted(tolerance) for piece in self.pieces_):
            return False
        if len(self.pieces_) == 1:
            return True
        spare = [piece.n_shapes_ - len(piece.monomials_) for piece in self.pieces_]
        if self.exact_:
            return min(spare) >= 2
        varying = sum(map(float.__lt__, self.low_, self.high_))
        return sum(spare) > 4 * varying + 1

    def _piece(self, samples: Samples, most: int = 8) -> PolynomialRegressor:
        piece = PolynomialRegressor(noise=self.noise, max_monomials=most)
        piece.fit_samples(samples)
        return piece

    def _pair(
        self, samples: Samples, single: PolynomialRegressor
    ) -> tuple[tuple[PolynomialRegressor, ...], Mask] | None:
        """Return two polynomials that are better than the single one, if there are.

        With them, which samples are the first one's.
        """
        masks = np.array(list(_cuts(samples)), dtype=np.bool_)
        if not len(masks):
            return None
        tolerance = self._tolerance(samples)
        both = np.concatenate([masks, ~masks])
        losses = _rough_losses(samples, tolerance, both).reshape(2, -1).sum(axis=0)

        most = _MOST_A_PIECE
        if single.explains_ and self.noise > 0.0:  # both together have to have fewer
            most = min(most, max(1, _terms((single,)) - 2))
        best: tuple[PolynomialRegressor, ...] = ()
        best_mask = masks[0]
        least = _worst((single,), samples, tolerance) / _CLEARLY
        for start in np.argsort(losses, kind="stable")[:_STARTS]:
            for pair, mask in self._alternate(samples, masks[start], most):
                worst = _worst(pair, samples, tolerance)
                if worst < least or worst <= 1.0:
                    best, best_mask, least = pair, mask, worst
                elif least <= 1.0:
                    break
            if least <= 1.0:
                break
        if not best:
            return None
        if single.explains_ and (least > 1.0 or _terms(best) >= _terms((single,))):
            return None
        return best, best_mask

    def _tolerance(self, samples: Samples) -> Floats:
        size = np.abs(samples.values)
        tolerance: Floats = np.maximum(
            fit_tolerance(size, self.noise), EXACT * size.max()
        )
        return tolerance

    def _alternate(
        self, samples: Samples, mask: Mask, most: int
    ) -> Iterator[tuple[tuple[PolynomialRegressor, ...], Mask]]:
        """Yield the pairs that result from fitting and assigning in turn."""
        for _ in range(_ROUNDS):
            if not mask.any() or mask.all():
                return
            sides = (_some(samples, mask), _some(samples, ~mask))
            pair = tuple(self._piece(side, most) for side in sides)
            yield pair, mask
            first, second = (piece._evaluate(samples.sizes) for piece in pair)
            larger = first > second
            if (larger == mask).all():
                return
            mask = larger


def _worst(
    pieces: tuple[PolynomialRegressor, ...], samples: Samples, tolerance: Floats
) -> float:
    """Return the largest residual, in units of its tolerance."""
    rest = np.abs(samples.values - _highest(pieces, samples.sizes))
    return float((rest / tolerance).max()) * (1.0 - EXACT)


def _left_out(
    pieces: tuple[PolynomialRegressor, ...], mask: Mask, samples: Samples
) -> Floats:
    """Return (n_shapes,) errors of what is left when a shape is left out."""
    errors = np.empty(len(samples.values))
    for piece, rows, other in zip(pieces, (mask, ~mask), pieces[::-1], strict=False):
        own = np.abs(piece.loo_errors_)
        is_known = np.isfinite(own)
        if other is not piece and not is_known.all():
            rest = np.abs(samples.values - other._evaluate(samples.sizes))[rows]
            own = np.where(is_known, own, rest)
        errors[rows] = own
    return errors


def _terms(pieces: tuple[PolynomialRegressor, ...]) -> int:
    return sum(len(piece.monomials_) for piece in pieces)


def _highest(pieces: tuple[PolynomialRegressor, ...], sizes: Floats) -> Floats:
    values = pieces[0]._evaluate(sizes)
    for piece in pieces[1:]:
        values = np.maximum(values, piece._evaluate(sizes))
    return values


def _some(samples: Samples, rows: Mask) -> Samples:
    sizes = samples.sizes[rows]
    return Samples(
        sizes=sizes,
        values=samples.values[rows],
        spread=samples.spread,
        low=tuple(sizes.min(axis=0).tolist()),
        high=tuple(sizes.max(axis=0).tolist()),
    )


def _cuts(samples: Samples) -> Iterator[Mask]:
    """Yield the samples above each cut, along sizes, products and ratios."""
    columns = [np.maximum(samples.sizes[:, i], 1e-9) for i in samples.varying]
    orders = [*columns]
    if len(columns) > 1:
        orders.append(np.multiply.reduce(columns))
        orders.extend(a / b for a, b in itertools.combinations(columns, 2))
    for order in orders:
        levels = np.unique(order)[2:-1]  # at least two shapes on either side
        if len(levels) > _CUTS:
            places = np.linspace(0, len(levels) - 1, _CUTS)
            levels = levels[places.round().astype(np.intp)]
        for level in levels:
            yield order >= level


def _rough_losses(samples: Samples, scale: Floats, masks: Mask) -> Floats:
    """Return what the best pair of simple monomials leaves on each side.

    Simple monomials are the constant and products of powers of up to 2 of one size
    with the first power of the others. This only ranks the cuts.

    Args:
        samples: The condensed samples.
        scale: (n_shapes,) tolerance of each value.
        masks: (n_sides, n_shapes) the shapes on each side.
    """
    columns = [samples.sizes[:, i] for i in samples.varying]
    product = np.multiply.reduce(columns)
    basis = np.stack(
        [np.ones_like(product), product]
        + [product * column for column in columns]
        + (columns if len(columns) > 1 else [])
    )
    basis = basis / np.abs(basis).max(axis=1, keepdims=True) / scale
    kept = masks[:, None, :] * basis  # (n_sides, n_monomials, n_shapes)
    target = masks * (samples.values / scale)
    gram = kept @ kept.transpose(0, 2, 1)
    right = (kept @ target[:, :, None])[:, :, 0]
    total = np.einsum("sn,sn->s", target, target)
    i, j = np.triu_indices(len(basis), 1)
    determinant = gram[:, i, i] * gram[:, j, j] - gram[:, i, j] ** 2
    gain = (
        right[:, i] ** 2 * gram[:, j, j]
        + right[:, j] ** 2 * gram[:, i, i]
        - 2 * right[:, i] * right[:, j] * gram[:, i, j]
    )
    regular = determinant > 1e-12 * gram[:, i, i] * gram[:, j, j]
    gain = np.where(regular, gain / np.where(regular, determinant, 1.0), 0.0)
    losses: Floats = np.maximum(total - gain.max(axis=1), 0.0)
    return losses
