"""The last numbers of a series, and their order statistics."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from math import ceil


class SortedWindow:
    """Keeps the last numbers, in order of arrival and of size.

    Args:
        size: How many.
        values: To begin with; of too many, the last.
    """

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._arrived = deque(map(float, values), maxlen=size)
        self._sorted = sorted(self._arrived)

    def __len__(self) -> int:
        return len(self._arrived)

    def append(self, value: float) -> None:
        """Take in a number; where it is full, the oldest goes."""
        if len(self._arrived) == self._arrived.maxlen:
            del self._sorted[bisect_left(self._sorted, self._arrived[0])]
        self._arrived.append(value)
        insort(self._sorted, value)

    def values(self) -> list[float]:
        """Return the numbers, the oldest first."""
        return list(self._arrived)

    def exceeded_by_at_most(self, share: float, count: float) -> float:
        """Return the order statistic of rank ``share * count``; at most the largest.

        Args:
            share: Of `count`.
            count: Their number, or one more for a number still to come.
        """
        rank = min(ceil(share * count), len(self._sorted))
        return self._sorted[max(rank, 1) - 1]
