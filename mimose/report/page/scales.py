"""Axes: where they begin and end, and which numbers stand at them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MARGIN = 0.06
_LEAST_SPAN = 0.02
"""Of the highest value: readings that differ by less look level."""
_LEAST_DEVIATION = 0.1
"""Per cent: lesser deviations look like none."""
_FROM_ZERO = 0.6
"""An axis begins at 0 where the lowest value is below this share of the highest."""
_FAR = 2.0
"""A line is far off where the axis would grow more than this many times for it."""
_OUTLIER = 2.0
"""The same of the last hundredth of the values."""


@dataclass(frozen=True, slots=True)
class Extent:
    """From where to where an axis goes."""

    low: float
    high: float
    has_line: bool = False
    """Whether the line that was asked for lies within."""
    counts: tuple[int, int] | None = None
    """Of an axis that counts, the least and the greatest number there is."""

    def place(self, value: float) -> float:
        """Return where a value lies, from 0 at the low end to 1; beyond, the end."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def beyond(self, value: float) -> int:
        """Tell on which side a value lies outside: -1, 1, or 0 for inside."""
        return int(value > self.high) - int(value < self.low)


def whole(values: Sequence[float], *, from_zero: bool = True) -> Extent:
    """Choose an axis that has all values on it.

    Args:
        values: At least one.
        from_zero: Whether it begins at 0 where that costs little.
    """
    return _between(min(values), max(values), None, from_zero=from_zero)


def extent(values: Sequence[float], line: float | None = None) -> Extent:
    """Choose an axis that shows how values differ, whatever they lie far below.

    It begins at 0 where that costs little, and leaves out a line, and the last
    hundredth of the values, that would squeeze all others.

    Args:
        values: At least one.
        line: Where a line is wanted, such as a budget.
    """
    return _between(*_bulk(values), line)


def _between(
    low: float, high: float, line: float | None, *, from_zero: bool = True
) -> Extent:
    if from_zero and 0.0 <= low < _FROM_ZERO * high:
        low = 0.0
    span = max(high - low, _LEAST_SPAN * max(abs(low), abs(high))) or 1.0
    has_line = line is not None and low - span <= line <= low + _FAR * span
    if line is not None and has_line:
        low, high = min(low, line), max(high, line)
    missing = max(0.0, span - (high - low)) / 2
    margin = _MARGIN * max(high - low, span)
    bottom = low if low == 0.0 else low - missing - margin
    return Extent(bottom, high + missing + margin, has_line)


def _bulk(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value, without a few far from all others."""
    found = np.asarray(values, dtype=float)
    first, last = float(found.min()), float(found.max())
    low, high = (float(q) for q in np.quantile(found, (0.01, 0.99)))
    span = max(high - low, _LEAST_SPAN * max(abs(low), abs(high)))
    return (
        low if low - first > _OUTLIER * span else first,
        high if last - high > _OUTLIER * span else last,
    )


def around_zero(values: Sequence[float]) -> Extent:
    """Choose an axis for deviations, that has 0 within.

    Args:
        values: At least one, in per cent.
    """
    low, high = _bulk(values)
    most = max(abs(low), abs(high), _LEAST_DEVIATION)
    return Extent(min(low, -0.2 * most) * 1.1, max(high, 0.2 * most) * 1.1)


def ticks(axis: Extent, most: int) -> list[tuple[float, str]]:
    """Choose round numbers within an axis, and write each.

    Args:
        axis: The axis.
        most: About how many there is room for.

    >>> ticks(Extent(0.0, 1100.0), 5)
    [(0.0, '0'), (500.0, '500'), (1000.0, '1,000')]
    """
    low, high = axis.counts or (axis.low, axis.high)
    rough = (axis.high - axis.low) / most
    if axis.counts:
        rough = max(1.0, rough)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * n for n in (1, 2, 5, 10) if power * n >= rough), 10 * power)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [
        (n * step, f"{n * step + 0.0:,.{decimals}f}") for n in range(first, last + 1)
    ]
