"""The plans there are: those in use, those made ahead, and who makes others.

Note: [Made ahead]
A plan for a shape that is on its way is made in the worker thread from what is held
now, a little under it, and waits until its step comes. That step takes it as if it had
made it itself: all else that a new shape asks for (measuring, trying actions) stays. A
plan that does not fit by then is made anew.

Note: [Refined]
The planner on the step's path is near the optimum. Where it has not proven that its
plan is one, the worker thread solves the same problem to its end, and puts what comes
out in the plan's place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TypeAlias

from mimose.cost.learner import Learner
from mimose.cost.model import CostModel
from mimose.cost.problem import Memory, doubt
from mimose.exceptions import InfeasibleBudgetError
from mimose.planners import Planner
from mimose.policy.plan_cache import CachedPlan, PlanCache
from mimose.policy.planning import Order, PlanMaker, at_sizes
from mimose.worker import Lane, lock

IsGood: TypeAlias = Callable[[CachedPlan, Memory], bool]
"""Whether a plan may be used with what is held now."""

_MOST_READY = 256
"""Plans made ahead that wait for their steps."""


class Plans:
    """Keeps plans by shape; has them made ahead and refined.

    Args:
        learner: Holds what has been learned.
        maker: Makes plans.
        cache_size: The most plans kept.
        is_good: Judges plans made earlier.
        refiner: Solves a problem to its end; None where plans stay as they were made.

    Attributes:
        cache: Those in use.
        n_ready: New shapes whose plan was there when they came.
        n_made: Those that had to wait for theirs.
    """

    def __init__(
        self,
        learner: Learner,
        maker: PlanMaker,
        cache_size: int,
        is_good: IsGood,
        refiner: Planner | None,
    ) -> None:
        self._learner = learner
        self._maker = maker
        self._is_good = is_good
        self._refiner = refiner
        self.cache = PlanCache(cache_size)
        self._ready: OrderedDict[Hashable, CachedPlan] = OrderedDict()
        self._lock = lock()
        self.n_ready = 0
        self.n_made = 0

    def cached(self, key: Hashable, memory: Memory) -> CachedPlan | None:
        """Return the plan that a shape had before, if it is good today."""
        return self.cache.get(key, self._is_good, memory)

    def has(self, key: Hashable, memory: Memory) -> bool:
        """Whether a shape's step, were it the next, would find a plan that is good."""
        for found in (self.cache.peek(key), self._ready.get(key)):
            if found is not None and self._is_good(found, memory):
                return True
        return False

    def ready(self, key: Hashable, memory: Memory) -> CachedPlan | None:
        """Take out the plan that was made ahead for a new shape, if it is good."""
        with self._lock:
            found = self._ready.pop(key, None)
        if found is None or not self._is_good(found, memory):
            return None
        return found

    def make(self, model: CostModel, order: Order) -> CachedPlan:
        """Make a plan now.

        Args:
            model: What is known of costs.
            order: What it is to be made for.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        return self._maker.make(model, order)

    def count(self, *, was_ready: bool) -> None:
        """Take note of a new shape."""
        if was_ready:
            self.n_ready += 1
            self.cache.count_hit()
        else:
            self.n_made += 1

    def keep(self, key: Hashable, made: CachedPlan, order: Order) -> None:
        """Keep a plan for the next time, and have it refined: Note: [Refined]."""
        self.cache.put(key, made)
        if self._refiner is None or made.plan.optimal or made.keeps_all:
            return
        planner = self._refiner
        self._learner.worker.submit(
            Lane.REFINE, key, lambda: self._refine(key, made, order, planner)
        )

    def _refine(
        self, key: Hashable, made: CachedPlan, order: Order, planner: Planner
    ) -> None:
        model = self._learner.model
        if self.cache.peek(key) is not made or made.version < model.valid_since:
            return
        if order.facts.context not in model.patterns:
            return
        try:
            refined = self._maker.make(model, order, planner)
        except InfeasibleBudgetError:
            return  # more was learned since, and the plan is not good any more
        is_dearer = refined.plan.extra_cost > made.plan.extra_cost
        if is_dearer and (made.version == model.version or not refined.plan.optimal):
            return
        self.cache.put(key, refined, in_place_of=made)

    def prepare(self, key: Hashable, order: Order) -> None:
        """Have a plan made ahead: Note: [Made ahead].

        Args:
            key: The shape's.
            order: What it is to be made for.
        """
        self._learner.worker.submit(
            Lane.PLAN, key, lambda: self._make_ahead(key, order)
        )

    def _make_ahead(self, key: Hashable, order: Order) -> None:
        model, before = self._learner.model, self.cache.peek(key)
        if before is not None and before.version >= order.after_version:
            return  # its step came first
        if doubt(model, order.facts):
            return
        try:
            made = self._maker.make(model, order)
        except InfeasibleBudgetError:
            return  # its step says so, with the numbers of its day
        if order.exact_sizes != order.facts.sizes:
            exact = order.facts._replace(sizes=order.exact_sizes)
            at_sizes(model, exact, made, order.memory)
        with self._lock:
            self._ready[key] = made
            self._ready.move_to_end(key)
            if len(self._ready) > _MOST_READY:
                self._ready.popitem(last=False)


def under(order: Order, spare_bytes: float) -> Order:
    """Return an order that leaves a little more free: for a step that is to come.

    Args:
        order: For what is held now.
        spare_bytes: By so much what is held may differ by then.
    """
    memory = order.memory
    less = memory._replace(budget_bytes=memory.budget_bytes - spare_bytes)
    usable = order.usable_bytes - spare_bytes
    return replace(order, memory=less, usable_bytes=usable)
