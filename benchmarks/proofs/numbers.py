"""Statistics of many values, and numbers as text."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import numpy as np

MIB = 2**20


def quantile(values: Iterable[float], share: float) -> float | None:
    """Return the smallest value that `share` of all do not exceed; None of nothing."""
    listed = list(values)
    if not listed:
        return None
    return float(np.quantile(listed, share, method="inverted_cdf"))


def mean(values: Iterable[float]) -> float | None:
    """Return the mean, None of nothing."""
    listed = list(values)
    return statistics.fmean(listed) if listed else None


def worst(values: Iterable[float]) -> float | None:
    """Return the largest value, None of nothing."""
    return max(values, default=None)


def percent(share: float | None, digits: int = 2) -> str:
    """Write a share for people."""
    return "" if share is None else f"{share:.{digits}%}"


def mebibytes(n_bytes: float | None) -> str:
    """Write bytes for people."""
    return "" if n_bytes is None else f"{n_bytes / MIB:.1f}"
