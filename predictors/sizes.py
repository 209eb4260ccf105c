"""Learns how the sizes of a layer's inputs follow from the sizes of the batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

_DIVISORS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 64, 128, 256)
"""Strides, and sides of image patches."""
_SETTLES_A_SUM = 4
"""Samples needed for a sum: one more than its three numbers."""

Row = tuple[int, ...]


class Term(NamedTuple):
    """One size of the batch, divided by a constant, rounded down or up."""

    column: int
    divisor: int = 1
    rounds_up: bool = False

    def at(self, sizes: Sequence[int]) -> int:
        """Return the value at the given sizes."""
        size = sizes[self.column]
        return -(-size // self.divisor) if self.rounds_up else size // self.divisor


Terms = tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A sum of products of terms, each times a factor, and a constant."""

    products: tuple[tuple[int, Terms], ...] = ()
    """The factor and the terms of each product."""
    constant: int = 0

    def __call__(self, sizes: Sequence[int]) -> int:
        """Return the value at the given sizes."""
        value = self.constant
        for product, terms in self.products:
            for term in terms:
                product *= term.at(sizes)
            value += product
        return value


class SizeMap:
    """Finds the simplest rule by which one size follows from the batch's sizes.

    Examples: a stage of a ResNet sees ``ceil(H / 8)``, a layer of a ViT
    ``(H // 16) * (W // 16) + 1`` tokens, a flattened batch ``B * T`` rows. A rule must
    match every sample. The first kind of this list that matches is used:

    1. a constant;
    2. a column of the batch;
    3. a multiple of a column, or a column plus a constant;
    4. a column divided by a number of a fixed list, plus a constant: the smallest
       constant first, then rounded up (a high guess is safer);
    5. a product of two columns, of which one or both are divided by the same number,
       plus a constant; or a product of three, of which two are;
    6. ``a * x + b * y + c`` of two columns, with a and b at least 1 and at least four
       samples: the tokens of several images and of a text.

    Attributes:
        rule_: The rule, or None if no rule matches.
    """

    rule_: Rule | None

    def fit(self, X: ArrayLike, y: ArrayLike) -> SizeMap:
        """Find the rule, and return the estimator.

        Args:
            X: (n_samples, n_features) The sizes of the batch.
            y: (n_samples,) The layer's size.
        """
        rows: list[Row] = [tuple(row) for row in np.asarray(X).tolist()]
        values: list[int] = np.asarray(y).tolist()
        self.rule_ = _rule(rows, values)
        seen = dict(zip(rows, values, strict=True))
        follows = all(seen[row] == v for row, v in zip(rows, values, strict=True))
        self._seen, self._most = seen if follows else {}, max(values)
        return self

    def predict_one(self, sizes: Sequence[int]) -> int:
        """Return the layer's size for one batch.

        Without a rule it is the size seen for this batch, or the largest size seen: the
        largest for every batch, if one batch has had different sizes.

        Args:
            sizes: (n_features,) The sizes of the batch.
        """
        if self.rule_ is not None:
            return self.rule_(sizes)
        return self._seen.get(tuple(sizes), self._most)


def _rule(rows: list[Row], values: list[int]) -> Rule | None:
    if len(set(values)) == 1:
        return Rule(constant=values[0])
    columns = list(zip(*rows, strict=True))
    for number, column in enumerate(columns):
        if column == tuple(values):
            return Rule(((1, (Term(number),)),))
    # A constant column cannot explain a size that varies.
    moving = [number for number, column in enumerate(columns) if len(set(column)) > 1]
    for candidates in (_singles(moving), _pairs(moving), _triples(moving)):
        tried = (_matching(terms, rows, values) for terms in candidates)
        found = [rule for rule in tried if rule is not None]
        if found:
            return min(found, key=_simplicity)
    return _sum(moving, rows, values)


_WAYS = ((1, False), *itertools.product(_DIVISORS, (True, False)))
"""Divisors, and whether to round up."""


def _singles(columns: list[int]) -> Iterator[Terms]:
    for column, how in itertools.product(columns, _WAYS):
        yield (Term(column, *how),)


def _pairs(columns: list[int]) -> Iterator[Terms]:
    pairs = itertools.combinations_with_replacement(columns, 2)
    for (i, j), how in itertools.product(pairs, _WAYS):
        yield Term(i, *how), Term(j, *how)
        yield Term(i, *how), Term(j)
        yield Term(i), Term(j, *how)


def _triples(columns: list[int]) -> Iterator[Terms]:
    pairs = itertools.combinations_with_replacement(columns, 2)
    for (i, j), other, how in itertools.product(pairs, columns, _WAYS):
        if other not in (i, j):
            yield Term(i, *how), Term(j, *how), Term(other)


def _matching(terms: Terms, rows: list[Row], values: list[int]) -> Rule | None:
    """Return the rule of these terms that matches every sample, if there is one.

    Only one number is free: a factor excludes divisors and a constant.
    """
    low, high = values.index(min(values)), values.index(max(values))
    of_low, of_high = (math.prod(t.at(rows[i]) for t in terms) for i in (low, high))
    if of_high <= of_low:
        return None
    factor, over = divmod(values[high] - values[low], of_high - of_low)
    constant = values[low] - factor * of_low
    is_whole = all(term.divisor == 1 for term in terms)
    if over or not factor or (factor > 1 and (constant or not is_whole)):
        return None
    if constant and len(terms) > 2:
        return None
    rule = Rule(((factor, terms),), constant)
    is_right = all(rule(row) == v for row, v in zip(rows, values, strict=True))
    return rule if is_right else None


def _simplicity(rule: Rule) -> tuple[int, int, int, int]:
    ((_, terms),) = rule.products
    divisor = max(term.divisor for term in terms)
    up = sum(term.rounds_up for term in terms)
    return divisor > 1, abs(rule.constant), -up, divisor


def _sum(columns: list[int], rows: list[Row], values: list[int]) -> Rule | None:
    """Return the sum of multiples of two columns that matches every sample, if any."""
    if len(values) < _SETTLES_A_SUM:
        return None
    for pair in itertools.combinations(columns, 2):
        design = np.array([[row[pair[0]], row[pair[1]], 1] for row in rows])
        solution, _, rank, _ = np.linalg.lstsq(design, np.array(values), rcond=None)
        first, second, constant = map(int, np.rint(solution))
        rule = Rule(((first, (Term(pair[0]),)), (second, (Term(pair[1]),))), constant)
        is_right = all(rule(row) == v for row, v in zip(rows, values, strict=True))
        if rank == 3 and min(first, second) > 0 and is_right:
            return rule
    return None
