"""Plans by shape, the least recently used forgotten first."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from cachetools import LRUCache

from mimose.cost.growth import ExactShape, Growth
from mimose.planners import Plan
from mimose.types import NOTHING_FREE, Headrooms, Sizes
from mimose.worker import lock

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
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
    between: tuple[tuple[int, ...], ...] = ()
    """How often each unit was called where each forward but the last ends."""
    ends: tuple[int, ...] = ()
    """How many events have run there."""
    version: int = 0
    """Of the cost model that it was made from."""
    sizes: Sizes = ()
    """It was made for."""
    headrooms: Headrooms = field(default_factory=dict)
    """Of the calls that hold something on the host, by unit and call."""

    def headrooms_at(self, sizes: Sizes) -> Headrooms:
        """Return what is free around calls in a step of exact sizes.

        Below the sizes that it was made for a step is predicted to reach less, and what
        is free was not asked for.
        """
        return self.headrooms if sizes == self.sizes else NOTHING_FREE

    exact: dict[Sizes, ExactShape] = field(default_factory=dict)
    """What the plan comes to at exact sizes of the bucket, as far as asked for."""
    decided: dict[Sizes, tuple[ExactShape, object]] = field(default_factory=dict)
    """The last decision for it at exact sizes, and what that was made of."""
    parts: dict[tuple[int, ...], CachedPlan] = field(default_factory=dict)
    """By how often each unit was called, what the plan was to steps that ran less."""
    imposed: dict[tuple[str, ...], CachedPlan] = field(default_factory=dict)
    """By their actions, plans that ran in its place as other ranks asked for them."""

    def calls_until(self, part: int) -> tuple[int, ...]:
        """Return how often each unit is called up to the end of one of its forwards."""
        return self.between[part] if part < len(self.between) else self.calls

    def events_of(self, part: int) -> slice:
        """Return where the events of one of its forwards stand among all."""
        ends = (0, *self.ends, len(self.events))
        return slice(*ends[part : part + 2]) if part < len(ends) - 1 else slice(0)

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
        self._lock = lock()
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
        self, key: Hashable, is_good: Callable[[CachedPlan, _T], bool], today: _T
    ) -> CachedPlan | None:
        """Return the plan for a key if it is still good; else drop it.

        Counts a hit or a miss.

        Args:
            key: The plan's.
            is_good: Judges the plan by what is given with it.
            today: What that is.
        """
        with self._lock:
            found = self._plans.get(key)
            if found is None:
                self.misses += 1
                return None
            if not is_good(found, today):
                self.misses += 1
                del self._plans[key]
                return None
            self.hits += 1
            return found

    def count_hit(self) -> None:
        """Count the last miss as a hit: the plan was there, made ahead."""
        self.misses -= 1
        self.hits += 1

    def peek(self, key: Hashable) -> CachedPlan | None:
        """Return the plan for a key, good or not; counts nothing."""
        with self._lock:
            return self._plans.get(key)

    def put(
        self, key: Hashable, plan: CachedPlan, in_place_of: CachedPlan | None = None
    ) -> CachedPlan:
        """Keep a plan unless another came first; return the one that is kept.

        Args:
            key: The plan's.
            plan: The plan.
            in_place_of: The one that it replaces; where that is gone, it is not kept.
        """
        with self._lock:
            if in_place_of is None:
                return self._plans.setdefault(key, plan)
            if self._plans.get(key) is in_place_of:
                self._plans[key] = plan
            return self._plans.get(key, plan)
