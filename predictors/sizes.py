"""How the sizes that a unit sees follow from the sizes of the batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ._samples import as_sizes, not_fitted
from ._sklearn import BaseEstimator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    Integers = NDArray[np.int64]

_DIVISORS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 64, 128, 256)

_SETTLES_A_SUM = 4
"""Samples: one more than there is to settle."""


@dataclass(frozen=True, slots=True)
class Term:
    """``(sizes[column] + before) // divisor + after``."""

    column: int
    divisor: int = 1
    before: int = 0
    after: int = 0

    def __call__(self, sizes: Sequence[float]) -> int:
        """Return the value at the given sizes."""
        value = int(sizes[self.column]) + self.before
        return value // self.divisor + self.after


@dataclass(frozen=True, slots=True)
class Rule:
    """``factor * term * term ... + constant``; a constant without terms."""

    terms: tuple[Term, ...] = ()
    factor: int = 1
    constant: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing in it that two samples could not settle."""
        if not self.terms:
            return True
        (first, *rest) = self.terms
        whole = first == Term(first.column) and self.factor == 1
        return whole and not rest and not self.constant

    def __call__(self, sizes: Sequence[float]) -> int:
        """Return the value at the given sizes."""
        if not self.terms:
            return self.constant
        value = self.factor
        for term in self.terms:
            value *= term(sizes)
        return value + self.constant


@dataclass(frozen=True, slots=True)
class Sum:
    """Multiples of two columns, and a constant."""

    columns: tuple[int, int]
    factors: tuple[int, int]
    constant: int

    is_plain = False
    """As of a `Rule`: more samples are needed."""

    def __call__(self, sizes: Sequence[float]) -> int:
        """Return the value at the given sizes."""
        pairs = zip(self.columns, self.factors, strict=True)
        return self.constant + sum(int(sizes[i]) * factor for i, factor in pairs)


class SizeMap(BaseEstimator):
    """The simplest rule by which one size follows from the batch's sizes.

    A stage of a ResNet sees ``ceil(H / 8)``, a layer of a ViT
    ``(H // 16) * (W // 16) + 1`` tokens, a flattened batch ``B * T`` rows. A rule
    has to match every sample. Tried in this order, the first that does is taken:

    1. the size equals a column of the batch;
    2. it is constant;
    3. it is a multiple of a column;
    4. ``(x + a) // b + c`` of one column x, with b from a fixed list. Where the
       samples allow for several, ``x + c`` goes first, then c = 0, then the
       rounding up (a guess had better be high), then the smallest b;
    5. a product of two such terms with c = 0, rounding down or up, plus a constant,
       or times a further column. Equal divisors go first, then the least constant;
    6. ``a * x + b * y + c`` of two columns, from four samples and more, with a and b
       at least 1: the tokens of a number of images, and a text's.

    Attributes:
        rule_: The rule, or ``None``.
        found_: Whether there is one.
        exact_: Whether it may be used for sizes not seen: it was found from two
            distinct samples, and, if it has a divisor, a factor or a constant to
            settle, from three distinct values. Whether a column that stood still
            may move is for the caller to say.
    """

    rule_: Rule | Sum | None
    found_: bool
    exact_: bool

    def fit(self, X: ArrayLike, y: ArrayLike) -> SizeMap:
        """Find the rule.

        Args:
            X: (n_samples, n_features) sizes of the batch.
            y: (n_samples,) the unit's size.

        Raises:
            ValueError: If there is no sample, the lengths differ, or a number is
                NaN or infinite.
        """
        root = as_sizes(X)
        own = as_sizes(np.asarray(y, dtype=np.float64).reshape(-1, 1))[:, 0]
        if not len(root) or len(root) != len(own):
            msg = f"X and y must go together, got {len(root)} and {len(own)} sample(s)."
            raise ValueError(msg)
        sizes, values = root.astype(np.int64), own.astype(np.int64)
        whole = bool((sizes == root).all() and (values == own).all())

        self.n_features_in_ = root.shape[1]
        self.rule_ = next(_rules(sizes, values), None) if whole else None
        self.found_ = self.rule_ is not None
        self.exact_ = False
        if self.rule_ is not None:
            settled = self.rule_.is_plain or len(np.unique(values)) >= 3
            self.exact_ = settled and bool((sizes != sizes[0]).any())
        self._seen = dict(zip(map(tuple, root.tolist()), own.tolist(), strict=True))
        self._highest = int(np.ceil(own.max()))
        return self

    def predict_one(self, sizes: Sequence[float]) -> int:
        """Return the unit's size for a batch.

        Without a rule: what was seen for these sizes, else the largest size seen.

        Args:
            sizes: The sizes of the batch, one a column.

        Raises:
            NotFittedError: If ``fit`` was not called.
        """
        try:
            rule = self.rule_
        except AttributeError:
            raise not_fitted(self) from None
        if rule is not None:
            return rule(sizes)
        return int(self._seen.get(tuple(sizes), self._highest))


def _rules(sizes: Integers, values: Integers) -> Iterator[Rule | Sum]:
    """Yield rules that match every sample, the simplest first."""
    for column in range(sizes.shape[1]):
        if (sizes[:, column] == values).all():
            yield Rule((Term(column),))
    if (values == values[0]).all():
        yield Rule(constant=int(values[0]))
        return
    # A column that stands still explains nothing about a size that moves.
    columns = np.flatnonzero((sizes != sizes[0]).any(axis=0)).tolist()
    for column in columns:
        yield from _multiples(sizes, values, column)
    found = [term for c in columns for term in _terms(sizes, values, c)]
    yield from (Rule((term,)) for term in sorted(found, key=_simplicity))
    yield from _products(sizes, values)
    yield from _sums(sizes, values, columns)


def _multiples(sizes: Integers, values: Integers, column: int) -> Iterator[Rule]:
    x = sizes[:, column]
    if x[0] > 0:
        factor = values[0] // x[0]
        if factor > 1 and (factor * x == values).all():
            yield Rule((Term(column),), factor=int(factor))


def _terms(sizes: Integers, values: Integers, column: int) -> Iterator[Term]:
    """Yield every term of one column that matches."""
    x = sizes[:, column]
    for divisor in _DIVISORS:
        before = np.arange(divisor)
        after = values - (x + before[:, None]) // divisor
        for a in before[(after == after[:, :1]).all(axis=1)].tolist():
            yield Term(column, divisor, a, int(after[a, 0]))


def _simplicity(term: Term) -> tuple[bool, int, int, int, int]:
    rounding = {term.divisor - 1: 0, 0: 1}.get(term.before, 2)
    return (
        term.divisor > 1,
        abs(term.after),
        rounding,
        term.divisor,
        term.column,
    )


def _products(sizes: Integers, values: Integers) -> Iterator[Rule]:
    """Yield the products of two or three terms, plus a constant, that match."""
    choices = [(1, 0)]
    for divisor in _DIVISORS[1:]:
        choices += [(divisor, 0), (divisor, divisor - 1)]
    divisors, before = np.array(choices).T
    # (n_features, n_choices, n_samples)
    terms = (sizes.T[:, None, :] + before[:, None]) // divisors[:, None]
    columns = range(sizes.shape[1])
    pairs = list(itertools.combinations_with_replacement(columns, 2))

    found = []
    for i, j in pairs:
        products = terms[i][:, None, :] * terms[j][None, :, :]
        constants = values[0] - products[:, :, 0]
        match = (products[:, :, -1] + constants == values[-1]).nonzero()
        sums = products[match] + constants[match][:, None]
        for k in np.flatnonzero((sums == values).all(axis=1)).tolist():
            p, q = int(match[0][k]), int(match[1][k])
            constant = int(constants[p, q])
            found.append((p != q, abs(constant), p + q, i, j, p, q, constant))
    for *_, i, j, p, q, constant in sorted(found):
        yield Rule((Term(i, *choices[p]), Term(j, *choices[q])), constant=constant)

    for (i, j), extra in itertools.product(pairs, columns):
        if extra in (i, j):
            continue
        for p in range(len(choices)):  # the same rounding on both sides of an image
            if (terms[i, p] * terms[j, p] * sizes[:, extra] == values).all():
                yield Rule((Term(i, *choices[p]), Term(j, *choices[p]), Term(extra)))


def _sums(sizes: Integers, values: Integers, columns: list[int]) -> Iterator[Sum]:
    """Yield the sums of multiples of two columns that match, and nothing by chance."""
    if len(values) < _SETTLES_A_SUM:
        return
    for pair in itertools.combinations(columns, 2):
        design = np.column_stack((sizes[:, pair], np.ones_like(values)))
        solution, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
        found = np.rint(solution).astype(np.int64)
        settled = rank == design.shape[1] and (found[:2] > 0).all()
        if settled and (design @ found == values).all():
            a, b, constant = found.tolist()
            yield Sum(pair, (a, b), constant)
