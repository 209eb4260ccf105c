"""Makes plans within the safety margin, and caches them by shape.

Note: [Plans]
The worker thread makes plans for expected shapes, for a little less memory than is free
now.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from cachetools import LRUCache

from mimose.cost.learner import Learner
from mimose.cost.model import CostModel
from mimose.cost.problem import Growth, Memory, extra_flops, fill_problem, plan_growth
from mimose.cost.trust import extrapolation_ratio, why_unknown
from mimose.exceptions import InfeasibleBudgetError
from mimose.planners import InfeasibleBudgetError as _Infeasible
from mimose.planners import Plan, Planner, PlanningProblem, lay_out, safest_plan
from mimose.predictors import REACH, SafetyMargin
from mimose.types import Context, Sizes, StepInput

_SPARE_SHARE = 0.01
"""The share of a step's headroom that is not worth another plan."""
_LEAST_USABLE, _LEAST_TRIED = 0.9, 0.95
"""A backward is given room for 1.1 bytes for each byte of its growth. With so much of
the room a step may stop to free all cached blocks."""
PlanKey: TypeAlias = tuple[Context, Sizes, bool]
"""The first fields of a `StepInput`, which identify a plan."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedPlan:
    """A plan for one shape, with everything that a cache hit needs."""

    plan: Plan
    calls: tuple[str, ...]
    """The names of the layer calls, in order."""
    by_layer: tuple[tuple[str, ...], ...]
    """The actions of each layer's calls."""
    counts: tuple[int, ...]
    """How often each layer is called."""
    growth: Growth
    flops: tuple[int, ...]
    """The FLOPs that each layer call recomputes, as far as known."""
    headroom_bytes: float
    """The headroom for which it was made."""
    version: int
    """The version of the cost model from which it was made."""
    between: tuple[tuple[int, ...], ...] = ()
    """For the end of each forward but the last, how often each layer was called."""
    ends: tuple[int, ...] = ()
    """For the end of each forward but the last, how many layer calls have run."""

    def counts_until(self, part: int) -> tuple[int, ...]:
        """Return how often each layer is called up to the end of a forward."""
        return self.between[part] if part < len(self.between) else self.counts

    def calls_of(self, part: int) -> slice:
        """Return where the layer calls of a forward stand among all."""
        ends = (0, *self.ends, len(self.calls))
        return slice(*ends[part : part + 2]) if part < len(ends) - 1 else slice(0)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is recomputed."""
        return self.plan.extra_cost == 0


def _tightened(problem: PlanningProblem, share: float) -> PlanningProblem:
    """Lower a problem's budget to a share of the way from the safest plan to it."""
    least = safest_plan(problem).peak_bytes
    keep_all = np.zeros(len(problem.calls), dtype=np.intp)
    top = min(problem.budget_bytes, lay_out(problem, keep_all).peak_bytes)
    if least >= top:
        return problem
    return replace(problem, budget_bytes=least + share * (top - least))


def cached_plan(
    model: CostModel,
    step_input: StepInput,
    memory: Memory,
    problem: PlanningProblem,
    plan: Plan,
) -> CachedPlan:
    """Return a plan with its predictions."""
    pattern, actions = model.pattern(step_input), plan.actions
    return CachedPlan(
        plan,
        problem.calls,
        pattern.by_layer(actions, otherwise=model.menu.first),
        pattern.counts,
        plan_growth(model, step_input, problem, actions, memory.released_bytes),
        extra_flops(model, step_input, actions),
        memory.headroom_bytes,
        model.version,
        pattern.between,
        tuple(pattern.calls_until(part) for part in range(len(pattern.between))),
    )


class Plans:
    """Makes plans within the safety margin, and caches them by shape.

    A shape has several plans if the budget moves, or what is held before its steps:
    each plan is for one headroom. The least recently used are dropped first.

    Args:
        learner: Holds what was learned.
        planner: Makes the plans.
        noise_bytes: The noise of a reading of the meter.
        cache_size: The most plans in the cache.

    Attributes:
        learner: The argument.
        margin: The safety margin.
    """

    def __init__(
        self, learner: Learner, planner: Planner, noise_bytes: float, cache_size: int
    ) -> None:
        self.learner = learner
        self.margin = SafetyMargin(noise_bytes=5.0 * noise_bytes)
        self._planner = planner
        self._cache: LRUCache[PlanKey, tuple[CachedPlan, ...]]
        self._cache = LRUCache(cache_size, getsizeof=len)
        self._lock = threading.RLock()
        self._usable: LRUCache[PlanKey, tuple[float, float]] = LRUCache(cache_size)
        """By shape, a headroom, and its share with which backwards have room."""

    def peek(self, step_input: StepInput, memory: Memory) -> CachedPlan | None:
        """Return the plan that a step would find, and change nothing.

        If several plans are good, it is the cheapest.

        Args:
            step_input: The step.
            memory: What is held, and the budget.
        """
        with self._lock:
            plans = self._cache.get(step_input[:3], ())
        valid, best = self.learner.model.valid_since, None
        headroom = memory.budget_bytes - memory.start_bytes
        for cached in plans:
            growth = cached.growth.bytes(memory.released_bytes)
            allowed = self.margin.allowed(growth)
            if cached.version < valid or allowed > headroom:
                continue
            # It must not leave much unused.
            most = max(_SPARE_SHARE * growth, self.margin.noise_bytes)
            if headroom - cached.headroom_bytes > most and not cached.keeps_all:
                continue
            if best is None or cached.plan.extra_cost < best.plan.extra_cost:
                best = cached
        return best

    def put(self, step_input: StepInput, made: CachedPlan) -> None:
        """Store a plan beside the other plans of its shape."""
        valid, others = self.learner.model.valid_since, []
        with self._lock:
            for other in self._cache.get(step_input[:3], ()):
                if other.version < valid:
                    continue
                if other.plan.actions != made.plan.actions:
                    others.append(other)
                elif other.headroom_bytes > made.headroom_bytes:
                    made = replace(made, headroom_bytes=other.headroom_bytes)
            most = int(self._cache.maxsize)
            self._cache[step_input[:3]] = (made, *others)[:most]

    def make(
        self,
        step_input: StepInput,
        memory: Memory,
        usable_bytes: float,
        share: float = 1.0,
    ) -> CachedPlan:
        """Make a plan.

        Args:
            step_input: The step.
            memory: What is held, and the budget.
            usable_bytes: The highest level that predictions may reach, which is below
                the budget by the margin.
            share: The share of the way from the safest plan to that level.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        model = self.learner.model
        problem = fill_problem(model, step_input, memory, usable_bytes)
        if share < 1.0:
            problem = _tightened(problem, share)
        made = self._made(model, step_input, memory, problem)
        start, room = problem.start_bytes, problem.budget_bytes - problem.start_bytes
        reached = 0.0
        while True:  # each time with at least 1% more headroom
            # By this much the problem's peak is above the plan's prediction: it counts
            # autocast's copies for kept layers twice, a tenth of BERT-large's growth.
            growth = made.growth.bytes(memory.released_bytes)
            beyond = made.plan.peak_bytes - start - growth
            if made.keeps_all or beyond - reached < _SPARE_SHARE * room:
                return made
            wider = replace(problem, budget_bytes=problem.budget_bytes + beyond)
            other = self._made(model, step_input, memory, wider)
            is_dearer = other.plan.extra_cost > made.plan.extra_cost
            is_same = other.plan.actions == made.plan.actions
            if is_same or is_dearer or other.growth.bytes(memory.released_bytes) > room:
                return made
            made, reached = other, beyond

    def _made(
        self,
        model: CostModel,
        step_input: StepInput,
        memory: Memory,
        problem: PlanningProblem,
    ) -> CachedPlan:
        """Choose the actions; the safest ones if the margin does not fit."""
        try:
            plan = self._planner.plan(problem)
        except _Infeasible as error:
            plan = safest_plan(problem)
            if plan.peak_bytes - self.margin.noise_bytes > memory.budget_bytes:
                raise InfeasibleBudgetError(
                    memory.budget_bytes, plan.peak_bytes, error.holders
                ) from None
        return cached_plan(model, step_input, memory, problem, plan)

    def least_plan(
        self, step_input: StepInput, memory: Memory, usable_bytes: float
    ) -> CachedPlan:
        """Return the plan with the lowest peak; the arguments are those of `make`."""
        model = self.learner.model
        problem = fill_problem(model, step_input, memory, usable_bytes)
        return cached_plan(model, step_input, memory, problem, safest_plan(problem))

    def make_ahead(self, step_input: StepInput, memory: Memory) -> None:
        """Make and cache the plan of an expected step, if it can be predicted."""
        most = memory.headroom_bytes - self.margin.noise_bytes
        share = self._share_with_room(step_input, memory) or 1.0
        usable = memory.start_bytes + self.margin.largest(most) * share
        if why_unknown(self.learner.model, step_input):
            return
        try:
            made = self.make(step_input, memory, usable)
        except InfeasibleBudgetError:
            return  # its step raises this with its own numbers
        with self._lock:
            if self.peek(step_input, memory) is None:
                self.put(step_input, made)

    def forget_shares(self) -> None:
        """Forget which backwards had too little room."""
        with self._lock:
            self._usable.clear()

    def least_peak_bytes(self, step_input: StepInput, memory: Memory) -> float | None:
        """Return a lower bound of a step's peak under any plan; None if not known.

        It is the prediction of the safest plan, minus the margin.

        Args:
            step_input: Its context and exact sizes.
            memory: What is held, as if the step began now.
        """
        model = self.learner.model
        if why_unknown(model, step_input) or model.pattern(step_input).may_vary:
            return None  # it may run less
        least = safest_plan(fill_problem(model, step_input, memory)).peak_bytes
        growth = (least - memory.start_bytes) * (1.0 - self.margin.share)
        return memory.start_bytes + growth

    def usable_bytes(
        self, step_input: StepInput, memory: Memory, *, is_first: bool = False
    ) -> float:
        """Return the highest level that the prediction of a step may reach.

        Args:
            step_input: The step, of a known context.
            memory: What is held, and the budget.
            is_first: As for `decide`.
        """
        beyond = extrapolation_ratio(self.learner.model, step_input) / (REACH - 1.0)
        headroom = memory.headroom_bytes
        most = self.margin.largest(headroom, 1.0 if is_first else beyond)
        share = self._share_with_room(step_input, memory) or 1.0
        return memory.start_bytes + most * share

    def _share_with_room(self, step_input: StepInput, memory: Memory) -> float | None:
        """Return it as found with as much headroom: another budget shows it anew."""
        with self._lock:
            own, share = self._usable.get(step_input[:3], (0.0, 1.0))
        is_same = abs(memory.headroom_bytes - own) <= _SPARE_SHARE * own
        return share if is_same else None

    def lacked_room(
        self, step_input: StepInput, memory: Memory, *, gives_up: bool = False
    ) -> None:
        """Plan a shape for less, because its plan left its backward too little room.

        Otherwise the next step would plan the same. (A plan that rebuilds holds little
        as its forward ends, so most of its growth is the backward's.)

        Args:
            step_input: The step.
            memory: What was held, and the budget.
            gives_up: Whether all is planned for again if the least is not enough: then
                the step only frees its cached blocks. (MobileNet-v2 at a third frees
                them in each step, a tenth of its time, but not with 2% less. U-Net at a
                half does in any case.)
        """
        found = self._share_with_room(step_input, memory)
        if gives_up and found == 1.0:
            return  # it was in vain
        share = (found or 1.0) - _SPARE_SHARE
        if share < (_LEAST_TRIED if gives_up else _LEAST_USABLE):
            share = 1.0 if gives_up else _LEAST_USABLE
        with self._lock:
            self._usable[step_input[:3]] = memory.headroom_bytes, share
            self._cache.pop(step_input[:3], None)

    def explain(
        self, step_input: StepInput, memory: Memory
    ) -> tuple[PlanningProblem, Plan, str]:
        """Return the exact problem of a shape, the plan it gets, and why.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        model = self.learner.model
        problem = fill_problem(model, step_input, memory)
        why_not = why_unknown(model, step_input)
        if why_not:
            return problem, safest_plan(problem), f"the safest plan, because {why_not}"
        usable = self.usable_bytes(step_input, memory)
        plan = self.make(step_input, memory, usable).plan
        why = f"planner {plan.planner}" + (" (proved optimal)" if plan.optimal else "")
        return problem, plan, f"{why}, with a margin of {self.margin.share:.1%}"
