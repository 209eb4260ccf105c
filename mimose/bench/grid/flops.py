"""FLOPs of many batches, counted on a few of them.

A model that consists of matrix products and attention does a number of operations that
is a polynomial of the second degree in its batch's sizes. Such a polynomial is known
exactly, in whole numbers, from as many batches as it has terms. Others are counted to
check it, the largest among them; where it fails, every batch is counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import sympy

from mimose.bench.grid.traces import Sizes

_DEGREE = 2
_CHECKS = 3
"""Batches counted beyond those that the polynomial is made of."""


def count_all(
    batches: Sequence[Sizes], count: Callable[[int], int | None]
) -> list[int | None]:
    """Return the FLOPs of each of several batches, none of the same sizes.

    Args:
        batches: Their sizes.
        count: Takes a place among them, and counts that batch by running it. None
            where it cannot be counted.
    """
    counted: dict[int, int | None] = {}
    by_size = sorted(range(len(batches)), key=lambda i: sum(batches[i].values()))
    terms = sympy.Matrix([_terms(batches[i]) for i in by_size])
    # The shortest that determine the polynomial, and all as combinations of these
    weights, chosen = terms.T.rref()
    for i in (*chosen, *_checks(len(batches), chosen)):
        counted[by_size[i]] = count(by_size[i])
    if None in counted.values():
        return [None] * len(batches)
    known = sympy.Matrix([[counted[by_size[i]] for i in chosen]])
    told = dict(zip(by_size, known * weights[: len(chosen), :], strict=True))
    if not all(flops.is_Integer for flops in told.values()) or any(
        told[i] != flops for i, flops in counted.items()
    ):
        return [counted[i] if i in counted else count(i) for i in range(len(batches))]
    return [int(told[i]) for i in range(len(batches))]


def _terms(sizes: Sizes) -> list[int]:
    """Return 1, each size, and each product of two."""
    return [math.prod(factors) for factors in _monomials([*sizes.values()])]


def _monomials(values: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for degree in range(_DEGREE + 1):
        yield from itertools.combinations_with_replacement(values, degree)


def _checks(n_batches: int, chosen: Sequence[int]) -> list[int]:
    """Return the largest of those that were not chosen, and some in even steps."""
    others = [i for i in range(n_batches) if i not in chosen]
    step = max(1, len(others) // _CHECKS)
    return others[::-step][:_CHECKS]
