"""Which of the walks that have come equally far need not be carried on."""

from typing import NamedTuple

import numpy as np

from .base import BoolArray, FloatArray, IntArray


class Walks(NamedTuple):
    """(n,) walks that have come equally far, those that hold least first."""

    held: FloatArray
    cost: FloatArray
    level: FloatArray | None
    """None where none of them matters."""
    saved: BoolArray | None = None
    """Whether their last event saved its output; None where that does not matter."""

    def picked(self, at: IntArray) -> "Walks":
        """Read some of them."""
        level = None if self.level is None else self.level[at]
        saved = None if self.saved is None else self.saved[at]
        return Walks(self.held[at], self.cost[at], level, saved)


def undominated(walks: Walks, low_level: float, shared_bytes: float) -> IntArray:
    """Find the walks for which no other holds and costs no more.

    A walk whose level matters is no match for another. One that has saved its output
    may still hold that much more behind the next event than one that has not.

    Args:
        walks: In any order.
        low_level: A level that does not matter.
        shared_bytes: The output that the next event may let go, or share.

    Returns:
        Positions, those that hold least first.
    """
    at = _undominated(walks, low_level)
    if walks.saved is None:
        return at
    # Those that have saved are no better than any; the others match those of their
    # kind, and those that have saved by what they may hold behind the next event.
    later = walks._replace(held=walks.held + np.where(walks.saved, shared_bytes, 0.0))
    free = _undominated(later, low_level)
    both = np.concatenate((at[walks.saved[at]], free[~walks.saved[free]]))
    ordered: IntArray = both[walks.held[both].argsort(kind="stable")]
    return ordered


def _undominated(walks: Walks, low_level: float) -> IntArray:
    """Positions of the walks that no other matches in bytes and cost, by bytes."""
    cost = walks.cost
    if walks.level is None:
        order = walks.held.argsort(kind="stable")
        ordered = matches = cost[order]
    else:
        order = np.lexsort((walks.level, cost, walks.held))
        ordered = cost[order]
        matches = np.where(walks.level[order] <= low_level, ordered, np.inf)
    cheapest_before = np.empty(len(order) + 1)
    cheapest_before[0] = np.inf
    np.minimum.accumulate(matches, out=cheapest_before[1:])
    found: IntArray = order[ordered < cheapest_before[:-1]]
    return found


def beaten(walks: Walks, low_level: float) -> BoolArray:
    """Tell of walks whose level matters whether one that holds no more beats them.

    Args:
        walks: Those that hold least first.
        low_level: A level that does not matter.

    Returns:
        (n,) whether another is no higher, costs no more, and has saved no more.
    """
    is_beaten = np.zeros(len(walks.held), dtype=np.bool_)
    assert walks.level is not None
    (high,) = (walks.level > low_level).nonzero()
    level, cost = walks.level[high], walks.cost[high]
    beats = (level[:, None] <= level) & (cost[:, None] <= cost)
    if walks.saved is not None:
        saved = walks.saved[high]
        beats &= saved[:, None] <= saved
    # Who comes before holds no more; of equals the first stays.
    is_beaten[high] = np.triu(beats, 1).any(axis=0)
    return is_beaten
