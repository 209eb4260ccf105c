"""The smallest set of columns that explains a target.

All sets of a size are tried at once while they are few: each carries the
residual of the target, the leverages, and every column made orthogonal to the
set, so that one more column costs one multiplication (modified Gram-Schmidt)
and leave-one-out errors come for free. Past a certain number only the sets that
leave the least are extended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_WORK = 120_000
"""How many numbers the orthogonalised columns of a complete generation may fill."""
_NARROW_WORK = 15_000
"""The same once only the most promising sets are extended."""
_NARROWEST = 80
"""How many sets are extended at the least."""
_AT_ONCE = 15_000
"""How many numbers are made orthogonal without a pause."""
_COLLINEAR = 1e-16
"""Squared length below which nothing is left of a column of length 1."""


@dataclass(frozen=True, slots=True)
class _Best:
    columns: tuple[int, ...]
    loo: float


def leave_one_out(residual: Floats, leverage: Floats) -> Floats:
    """Return the errors at samples left out, infinite where nothing else tells.

    Args:
        residual: (..., n_samples) observed - fitted.
        leverage: (..., n_samples) diagonal of the hat matrix.
    """
    spare = 1.0 - leverage
    known = spare > 1e-9
    return np.where(known, residual / np.where(known, spare, 1.0), np.inf)


def smallest_set(
    design: Floats,
    target: Floats,
    exact: Floats,
    degrees: NDArray[np.int_],
    *,
    most: int,
    most_inexact: int,
    seek_exact: bool,
) -> tuple[int, ...]:
    """Return the columns of the smallest set that explains the target.

    Rows are in units of their tolerance: a residual of at most 1 everywhere
    explains the target. A set that explains it exactly is preferred to a smaller
    one that does not, if asked for. Among sets of one size that explain the target
    the leave-one-out error decides (among exact ones, where it is rounding noise,
    the lowest degree). When no set explains it, the leave-one-out error decides
    over all sizes, and a larger set has to be better by a clear step.

    Args:
        design: (n_samples, n_columns) the columns.
        target: (n_samples,) what to explain.
        exact: (n_samples,) residual up to which a row counts as exact.
        degrees: (n_columns,) complexity of each column.
        most: The largest size tried, less than n_samples.
        most_inexact: The largest size accepted when nothing explains the target.
        seek_exact: Whether to go on past the first set that explains the target.
    """
    n_rows, n_columns = design.shape
    lengths = np.sqrt(np.einsum("nm,nm->m", design, design))
    lengths[lengths == 0.0] = 1.0
    left = (design / lengths).T[None]
    residual, leverage = target[None], np.zeros((1, n_rows))
    members = np.zeros((1, 0), dtype=np.intp)
    wide = max(_NARROWEST, _WORK // (n_rows * n_columns))
    narrow = max(_NARROWEST, _NARROW_WORK // (n_rows * n_columns))
    complete = True
    explained: _Best | None = None
    closest: list[_Best] = []

    for size in range(1, min(most, n_columns) + 1):
        squares = np.einsum("smn,smn->sm", left, left)
        dots = (left @ residual[:, :, None])[:, :, 0]
        usable = squares > _COLLINEAR
        if complete and size > 1:  # each set once: in ascending order of columns
            usable &= np.arange(n_columns) > members[:, -1:]
        parents, added = np.nonzero(usable)
        if not len(parents):
            break
        square, dot = squares[parents, added], dots[parents, added]
        losses = np.einsum("sn,sn->s", residual, residual)[parents] - dot * dot / square
        if len(parents) > (wide if complete else narrow):
            order = _lowest(losses, narrow if complete else narrow * size)
            if not complete:
                order = _without_repeats(members, parents, added, order)
            order = order[:narrow]
            parents, added = parents[order], added[order]
            square, dot = square[order], dot[order]
            complete = False

        vectors = left[parents, added] / np.sqrt(square)[:, None]
        residual = residual[parents] - (dot / np.sqrt(square))[:, None] * vectors
        leverage = leverage[parents] + vectors * vectors
        members = np.concatenate([members[parents], added[:, None]], axis=1)

        # inf * 0 cannot occur: an infinite error stays infinite under the mean.
        loo = np.sqrt(np.mean(leave_one_out(residual, leverage) ** 2, axis=1))
        size_of = np.abs(residual)
        is_exact = (size_of <= exact).all(axis=1)
        if is_exact.any():
            rows = np.flatnonzero(is_exact)
            ranks = degrees[members[rows]].sum(axis=1)
            best = rows[np.lexsort((np.arange(len(rows)), ranks))[0]]
            return _sorted(members[best])
        if explained is None:
            rows = np.flatnonzero(size_of.max(axis=1) <= 1.0)
            if len(rows):
                best = rows[np.argmin(loo[rows])]
                explained = _Best(_sorted(members[best]), float(loo[best]))
            elif size <= most_inexact:
                best = np.argmin(loo)
                closest.append(_Best(_sorted(members[best]), float(loo[best])))
        if explained is not None and not seek_exact:
            break
        if size < most:
            left = _made_orthogonal(left, parents, vectors)

    if explained is not None:
        return explained.columns
    limit = 1.15 * min((one.loo for one in closest), default=0.0)
    return next((one.columns for one in closest if one.loo <= limit), ())


def _made_orthogonal(
    left: Floats, parents: NDArray[np.intp], vectors: Floats
) -> Floats:
    """Return what is left of the parents' columns beside one more vector each."""
    made = np.empty((len(parents), *left.shape[1:]))
    at_once = max(1, _AT_ONCE // made[0].size)
    for first in range(0, len(made), at_once):
        some = slice(first, first + at_once)
        columns, vector = left[parents[some]], vectors[some, :, None]
        along = columns @ vector
        np.subtract(columns, along * vector.transpose(0, 2, 1), out=made[some])
    return made


def _lowest(losses: Floats, count: int) -> NDArray[np.intp]:
    """Return where the lowest losses are, in their order; equal ones all or none."""
    if len(losses) <= count:
        return np.argsort(losses, kind="stable")
    highest = np.partition(losses, count - 1)[count - 1]
    (found,) = (losses <= highest).nonzero()
    order: NDArray[np.intp] = found[np.argsort(losses[found], kind="stable")]
    return order


def _sorted(columns: NDArray[np.intp]) -> tuple[int, ...]:
    return tuple(sorted(columns.tolist()))


def _without_repeats(
    members: NDArray[np.intp],
    parents: NDArray[np.intp],
    added: NDArray[np.intp],
    order: NDArray[np.intp],
) -> NDArray[np.intp]:
    """Return ``order`` with the first way to reach each set only."""
    masks = (1 << members).sum(axis=1)[parents] | (1 << added)
    _, first = np.unique(masks[order], return_index=True)
    return order[np.sort(first)]
