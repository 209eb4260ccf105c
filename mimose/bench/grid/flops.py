"""FLOPs of many batches, counted on a few of them.

A model that consists of matrix products and attention does a number of operations that
is a polynomial of the second degree in the lengths of its batch. Such a polynomial is
known exactly, in whole numbers, from as many batches as it has terms. Others are
counted to check it, the largest among them; where it fails, every batch is counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import sympy

from mimose.bench.grid.traces import Sizes
from mimose.bench.grid.workload import largest

_DEGREE = 2
_LANES = 8


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
    for i in [*(by_size[i] for i in chosen), *_checks(batches)]:
        if i not in counted:
            counted[i] = count(i)
        if counted[i] is None:
            return [counted.get(i) for i in range(len(batches))]
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


def _checks(batches: Sequence[Sizes]) -> list[int]:
    """Return the largest of each size, two between, and one of multiples of 8.

    Kernels may treat such lengths otherwise.
    """
    by_size = sorted(range(len(batches)), key=lambda i: sum(batches[i].values()))
    even = [i for i in by_size if not any(n % _LANES for n in batches[i].values())]
    most = [batches.index(each) for each in largest(batches)]
    between = [by_size[len(batches) * third // 3] for third in (1, 2)]
    return [*most, *between, *even[-1:]]
