"""Plans by shape, the least recently used forgotten first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from cachetools import LRUCache

from mimose.planners import Plan
from mimose.types import Sizes, Uncounted


@dataclass(frozen=True, slots=True)
class Growth:
    """A plan's predicted growth at one exact shape.

    Outputs of the last step that are freed before the backward are part of what a
    step starts from: only what comes behind the forward profits from that.
    """

    before_release_bytes: float
    after_release_bytes: float
    """As if nothing were freed."""

    def bytes(self, released_bytes: float) -> float:
        """Return the growth where so much is freed."""
        after = self.after_release_bytes - released_bytes
        return max(self.before_release_bytes, after)


class ExactShape(NamedTuple):
    """What a plan comes to at exact sizes."""

    growth: Growth
    flops: int
    """Recomputed, as far as they are known."""
    uncounted: Uncounted
    """Recomputations whose FLOPs are not."""


@dataclass(slots=True)
class CachedPlan:
    """A plan with all that a hit needs."""

    plan: Plan
    events: tuple[str, ...]
    """Their names, in order."""
    by_unit: tuple[tuple[str, ...], ...]
    """The actions of each unit's calls."""
    calls: tuple[int, ...]
    """How often each unit is called."""
    growth: Growth
    """At the shape that the plan was made for (the bucket's upper end)."""
    headroom_bytes: float
    """What it was made for."""
    is_off: bool = False
    """Whether a step under it grew by much more or less than predicted."""
    exact: dict[Sizes, ExactShape] = field(default_factory=dict)
    """What the plan comes to at exact sizes of the bucket."""

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is recomputed."""
        return self.plan.extra_cost == 0


class PlanCache:
    """A least-recently-used cache of plans, under one lock.

    Args:
        maxsize: The most plans kept.
    """

    def __init__(self, maxsize: int) -> None:
        self._plans: LRUCache[Hashable, CachedPlan] = LRUCache(maxsize)
        self._lock = threading.Lock()
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        """Return the number of plans kept."""
        return len(self._plans)

    def __repr__(self) -> str:
        """Show size, hits and misses."""
        return (
            f"PlanCache(size={len(self._plans)}/{int(self._plans.maxsize)}, "
            f"hits={self.hits}, misses={self.misses})"
        )

    def get(
        self, key: Hashable, is_good: Callable[[CachedPlan], bool]
    ) -> CachedPlan | None:
        """Return the plan for a key if it is still good; else drop it.

        Counts a hit or a miss.
        """
        with self._lock:
            found = self._plans.get(key)
            if found is not None and is_good(found):
                self.hits += 1
                return found
            self.misses += 1
            if found is not None:
                del self._plans[key]
            return None

    def put(self, key: Hashable, plan: CachedPlan) -> CachedPlan:
        """Keep a plan unless another came first; return the one that is kept."""
        with self._lock:
            return self._plans.setdefault(key, plan)

    def clear(self) -> None:
        """Drop all plans, as after a step over budget."""
        with self._lock:
            self._plans.clear()
