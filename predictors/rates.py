"""What units of work cost, fitted to times that are noisy by a share of themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 5
_TOLERATED = 1.5
"""Errors beyond so many median errors count by their size, not by its square."""


def fit_rates(
    work: NDArray[np.float64],
    seconds: NDArray[np.float64],
    counts: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Fit times by a sum of works, each at a rate that is not negative.

    Least squares of relative errors, with Huber's weights: a machine that is busy with
    something else for a while makes single times too long, never too short.

    Args:
        work: (n_samples, n_works), not negative.
        seconds: (n_samples,) positive.
        counts: (n_samples,) readings behind each; None for one.

    Returns:
        (n_works,) seconds a unit of work.
    """
    usual = np.maximum(np.abs(work).max(axis=0), 1e-300)
    relative = work / usual / seconds[:, None]
    base = np.ones(len(seconds)) if counts is None else np.sqrt(counts)
    weights = base
    rates = np.zeros(work.shape[1])
    for _ in range(_ROUNDS):
        rates = _not_negative(relative * weights[:, None], weights)
        errors = np.abs(relative @ rates - 1.0)
        most = _TOLERATED * max(float(np.median(errors)), 1e-9)
        weights = base * np.sqrt(np.minimum(1.0, most / np.maximum(errors, 1e-300)))
    fitted: NDArray[np.float64] = rates / usual
    return fitted


def _not_negative(
    work: NDArray[np.float64], seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the least squares among rates that are not negative.

    Works are few, so each set of those that take time at all is tried: SciPy's own
    would be loaded in the midst of somebody's training.
    """
    best, least = np.zeros(work.shape[1]), float(seconds @ seconds)
    for columns in _sets(work.shape[1]):
        own = work[:, columns]
        found = np.linalg.lstsq(own, seconds, rcond=None)[0]
        if found.min() < 0.0:
            continue
        left = seconds - own @ found
        if left @ left < least:
            best, least = np.zeros(work.shape[1]), float(left @ left)
            best[columns] = found
    return best


def _sets(n_works: int) -> Iterator[list[int]]:
    for size in range(1, n_works + 1):
        yield from map(list, itertools.combinations(range(n_works), size))
