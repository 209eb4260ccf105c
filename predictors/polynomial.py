"""Polynomials in the sizes, with no more monomials than the samples ask for."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ._samples import nearly_largest, not_fitted
from ._shapes import ShapeRegressor
from ._subsets import leave_one_out, smallest_set

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ._samples import Samples

    Floats = NDArray[np.float64]

Monomial = tuple[int, ...]
"""The power of every input column."""

EXACT = 1e-9
"""Relative residual below which a fit is exact."""
_DEVIATIONS = 3.0
"""How many times the noise a fitted sample may be off."""
LEFT_OUT_DEVIATIONS = 5.0
"""How many times the noise a sample may be off when it was left out."""
_RELATIVE_TOLERANCE = 1e-3
"""Share of a value by which a fitted value may be off."""
_SMALLEST = 1e-3
"""Values below this share of the largest count as this share."""
_MOST_INEXACT = 4
"""The largest number of monomials where none explain the samples."""
_CONSTANT = (0,)
"""The column of the monomial of degree 0."""


class PolynomialRegressor(ShapeRegressor):
    """Least squares on the smallest set of monomials that explains the samples.

    Held bytes and FLOPs of a layer are polynomials of its input sizes with few
    terms, such as ``a*B*T + b*B*T**2``. Which terms is not known beforehand and the
    samples are few, so that every set of a size is tried before a larger one. Sizes
    that never varied are left out: their part cannot be told from a constant.

    Samples are weighted by their tolerance, the larger of a thousandth of the value and
    three times ``noise``. Without noise a set that explains the
    samples exactly is sought first. Sets need fewer monomials than there are
    distinct shapes; the samples of one shape are averaged.

    Args:
        max_degree: Highest total degree of a monomial.
        max_power: Highest power of one size.
        max_monomials: The largest number of monomials tried.
        noise: Absolute noise of a value, as a standard deviation, in units of y.
            Deviations of that size are not worth another monomial.
        nonnegative: Whether predictions below 0 are raised to 0.

    It has the attributes of `ShapeRegressor` as well.

    Attributes:
        monomials_: The powers of the input columns, one tuple a monomial.
        coef_: (n_monomials,) coefficients, in units of y.
        residual_: Largest distance of a fitted from a sampled value.
        relative_residual_: The same, relative to the value.
        loo_error_: Error at a shape that was left out, the largest but for one in 20;
            infinite where the other shapes do not determine the fit.
        loo_errors_: (n_shapes,) errors at the shapes left out, by shape.
    """

    monomials_: tuple[Monomial, ...]
    coef_: Floats
    residual_: float
    relative_residual_: float
    loo_error_: float
    loo_errors_: Floats

    def __init__(
        self,
        *,
        max_degree: int = 3,
        max_power: int = 2,
        max_monomials: int = 8,
        noise: float = 0.0,
        nonnegative: bool = False,
    ) -> None:
        self.max_degree = max_degree
        self.max_power = max_power
        self.noise = noise
        self.nonnegative = nonnegative
        self.max_monomials = max_monomials

    def _fit(self, samples: Samples) -> None:
        """Choose the monomials and fit their coefficients."""
        table = self._table(samples)
        scale = self._scale(samples.values)
        tolerance = fit_tolerance(scale, self.noise)
        columns = self._choose(table, samples, scale, tolerance)
        self._solve(table, columns, samples, scale, tolerance)

    def _refit(self, samples: Samples, like: PolynomialRegressor) -> bool:
        """Fit the coefficients of another's monomials.

        Of samples that another explains exactly no fewer monomials explain more of
        them, and of as many no others of a lower degree: a search would find the same.
        """
        table = self._table(samples)
        columns = tuple(table.places.get(each, -1) for each in like.monomials_)
        if -1 in columns or len(columns) >= self.n_shapes_:
            return False
        scale = self._scale(samples.values)
        tolerance = fit_tolerance(scale, self.noise)
        self._solve(table, columns, samples, scale, tolerance)
        if like.exact_ and not self.exact_:
            return False
        return self._explains or not like._explains

    def _table(self, samples: Samples) -> _Table:
        sizes = samples.sizes
        return _tabulate(
            sizes.tobytes(),
            sizes.shape[1],
            samples.varying,
            self.max_degree,
            self.max_power,
        )

    def predict_one(self, sizes: Sequence[float]) -> float:
        """Return the value at one shape, quickly and without checks.

        Args:
            sizes: The sizes, one a column.

        Raises:
            NotFittedError: If ``fit`` was not called.
        """
        try:
            terms = self._terms
        except AttributeError:
            raise not_fitted(self) from None
        value = 0.0
        for coefficient, factors in terms:
            for column in factors:
                coefficient *= sizes[column]
            value += coefficient
        return value if value > 0.0 or not self.nonnegative else 0.0

    @property
    def explains_(self) -> bool:
        """Whether every sample is fitted to within its tolerance."""
        self._refuse_unfitted()
        return self._explains

    @property
    def trusted_(self) -> bool:
        """Whether the samples bear the fit out: ``is_trusted()``."""
        return self.is_trusted()

    def is_trusted(self, tolerance: float = 0.01) -> bool:
        """Return whether the fit holds at shapes that it was not given.

        An exact fit needs one shape more than it has monomials. Any other needs
        another for every size that varies (each multiplies the sets that may fit by
        luck), and 19 in 20 shapes that are left out have to be predicted.

        Args:
            tolerance: Share of a value by which it may be off when left out. Five
                times the noise is allowed in any case.

        Raises:
            NotFittedError: If ``fit`` was not called.
        """
        self._refuse_unfitted()
        spare = self.n_shapes_ - len(self.monomials_)
        if self.n_shapes_ < 2 or spare < 1:
            return False
        varying = sum(map(float.__lt__, self.low_, self.high_))
        if not self.exact_ and spare <= varying:
            return False
        allowed = np.maximum(tolerance * self._scales, LEFT_OUT_DEVIATIONS * self.noise)
        beyond = np.abs(self.loo_errors_) - allowed
        return nearly_largest(beyond, self._scales) <= 0.0

    def _scale(self, values: Floats) -> Floats:
        """Return the (n_shapes,) sizes of the values, none of them 0."""
        size = np.abs(values)
        return np.maximum(size, _SMALLEST * float(size.max()) or 1.0)

    def _choose(
        self, table: _Table, samples: Samples, scale: Floats, tolerance: Floats
    ) -> tuple[int, ...]:
        """Return the columns of the monomials that explain the samples."""
        n_shapes = len(samples.values)
        if not samples.values.any():
            return ()
        if n_shapes == 1:
            return _CONSTANT
        columns = smallest_set(
            table.values / tolerance[:, None],
            samples.values / tolerance,
            EXACT * scale / tolerance,
            table.degrees,
            most=min(n_shapes - 1, self.max_monomials),
            most_inexact=max(1, min(n_shapes // 2, _MOST_INEXACT)),
            seek_exact=self.noise == 0.0,
        )
        return columns or _CONSTANT

    def _solve(
        self,
        table: _Table,
        columns: tuple[int, ...],
        samples: Samples,
        scale: Floats,
        tolerance: Floats,
    ) -> None:
        """Fit the coefficients of the monomials and the errors left out."""
        n_shapes, values = len(samples.values), samples.values
        own = table.values.take(columns, axis=1) if columns else np.zeros((n_shapes, 0))
        solution, residual, leverage = _least_squares(own, values, tolerance)
        if len(columns) >= n_shapes:
            leverage = np.ones(n_shapes)
        error = np.abs(values - own @ solution)

        self.monomials_ = tuple([table.monomials[column] for column in columns])
        self.coef_ = solution
        self._terms = tuple(
            zip(
                solution.tolist(),
                [table.factors[column] for column in columns],
                strict=True,
            )
        )
        self._scales = scale
        self.loo_errors_ = leave_one_out(residual, leverage) * tolerance
        self.loo_error_ = nearly_largest(np.abs(self.loo_errors_), values)
        if n_shapes == 1:
            self.loo_errors_ = np.array([np.inf])
            self.loo_error_ = np.inf
        self.residual_ = float(error.max()) + samples.spread
        self.relative_residual_ = float((error / scale).max())
        self.relative_residual_ += samples.spread / float(scale.min())
        self.exact_ = self.relative_residual_ <= EXACT and len(columns) < n_shapes
        self._explains = bool((error <= tolerance * (1 + EXACT)).all())

    def _evaluate(self, sizes: Floats) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            powers = np.array(self.monomials_, dtype=np.int_)
            return _design(sizes, powers.reshape(-1, sizes.shape[1])) @ self.coef_


def fit_tolerance(scale: Floats, noise: float) -> Floats:
    """Return the (n_shapes,) distances by which fitted values may be off.

    Args:
        scale: (n_shapes,) sizes of the values.
        noise: Of a value, as a standard deviation.
    """
    return np.maximum(_RELATIVE_TOLERANCE * scale, _DEVIATIONS * noise)


def _least_squares(
    design: Floats, values: Floats, tolerance: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return coefficients, and by sample residual and leverage, weighted.

    Args:
        design: (n_samples, n_columns) the columns.
        values: (n_samples,) what to explain.
        tolerance: (n_samples,) the unit of each row.
    """
    target, design = values / tolerance, design / tolerance[:, None]
    lengths = np.sqrt(np.einsum("nm,nm->m", design, design))
    lengths[lengths == 0.0] = 1.0
    design = design / lengths
    basis, inverse = design, np.ones((1, 1))
    if design.shape[1] != 1:
        basis, triangle = np.linalg.qr(design)
        inverse = np.linalg.inv(triangle)
    solution = inverse @ (basis.T @ target)
    # The second pass removes the rounding of the first.
    solution = solution + inverse @ (basis.T @ (target - design @ solution))
    leverage = np.einsum("nm,nm->n", basis, basis)
    return solution / lengths, target - design @ solution, leverage


class _Table(NamedTuple):
    """The candidate monomials, of low degree first, and their values."""

    monomials: tuple[Monomial, ...]
    places: dict[Monomial, int]
    factors: tuple[tuple[int, ...], ...]
    """The columns to multiply: those of (1, 2) are (0, 1, 1)."""
    degrees: NDArray[np.int_]
    values: Floats
    """(n_samples, n_monomials). Nobody writes to it."""


@lru_cache(maxsize=32)
def _tabulate(
    sizes: bytes,
    n_features: int,
    varying: tuple[int, ...],
    max_degree: int,
    max_power: int,
) -> _Table:
    """Tabulate the candidates. Many quantities are measured at the same sizes."""
    monomials, factors = _monomials(n_features, varying, max_degree, max_power)
    powers = np.array(monomials)
    return _Table(
        monomials,
        {monomial: column for column, monomial in enumerate(monomials)},
        factors,
        powers.sum(axis=1),
        _design(np.frombuffer(sizes).reshape(-1, n_features), powers),
    )


@lru_cache(maxsize=256)
def _monomials(
    n_features: int, varying: tuple[int, ...], max_degree: int, max_power: int
) -> tuple[tuple[Monomial, ...], tuple[tuple[int, ...], ...]]:
    """Return the candidate monomials, the constant first, and their factors."""
    ranges = (
        range(max_power + 1) if column in varying else range(1)
        for column in range(n_features)
    )
    found = []
    for powers in itertools.product(*ranges):
        if sum(powers) <= max_degree:
            found.append(powers)
    found.sort(key=lambda powers: (sum(powers), max(powers), powers))
    return tuple(found), tuple(map(_factors, found))


def _design(sizes: Floats, powers: NDArray[np.int_]) -> Floats:
    """Return the (n_samples, n_monomials) values of the monomials."""
    values = np.ones((len(sizes), len(powers)))
    for column in range(sizes.shape[1]):
        exponents = powers[:, column]
        if exponents.any():
            values *= sizes[:, column, None] ** exponents
    return values


def _factors(monomial: Monomial) -> tuple[int, ...]:
    """Return the columns to multiply."""
    return tuple(column for column, power in enumerate(monomial) for _ in range(power))
