"""Plans by input shape: made in a step or ahead of it, refined beside training.

A plan for a shape that is on its way is made in the worker thread, a little under what
is held now. Where the planner on the step's path has not proved that its plan is the
best, the thread solves the same problem to its end, and puts what comes out in the
plan's place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from cachetools import LRUCache

from mimose.cost.learner import Learner
from mimose.cost.model import CostModel
from mimose.cost.problem import (
    Growth,
    Memory,
    doubt,
    extra_flops,
    fill_problem,
    plan_growth,
)
from mimose.exceptions import InfeasibleBudgetError
from mimose.planners import InfeasibleBudgetError as _Infeasible
from mimose.planners import Plan, Planner, PlanningProblem, lay_out, safest_plan
from mimose.planners.timeline import judge
from mimose.predictors import SafetyMargin
from mimose.records import Phase
from mimose.types import Context, Sizes, StepInput
from mimose.worker import Lane, lock

_SPARE = 0.01
"""Of the room for a step: less is not worth another plan."""
_MOST_FILLINGS = 3
_AHEAD = 0.002
"""What is held may differ by so much of the headroom between now and a step to come."""

_Key = tuple[Context, bool, Sizes]


@dataclass(frozen=True, slots=True)
class Decision:
    """What a step does: plain data, made once."""

    phase: Phase
    chosen: CachedPlan | None
    """None: everything is recomputed, and measured."""
    growth_bytes: float | None = None
    """Predicted."""
    flops: tuple[int, ...] = ()
    """Recomputed by each layer call under the plan, as far as they are known."""
    cache_hit: bool = False
    is_measured: bool = False
    """Whether the boundaries are read although there is a plan."""
    is_whole: bool = False
    """Whether what is recomputed runs to its end, as it does on another rank."""
    reason: str = ""
    """Why it is not an ordinary step; "" if it is."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedPlan:
    """A plan for one shape, with all that a hit needs."""

    plan: Plan
    events: tuple[str, ...]
    """The names of the layer calls, in order."""
    by_unit: tuple[tuple[str, ...], ...]
    """The actions of each layer's calls."""
    calls: tuple[int, ...]
    """How often each layer is called."""
    growth: Growth
    flops: tuple[int, ...]
    """As in `Decision`."""
    headroom_bytes: float
    """What it was made for."""
    version: int
    """Of the cost model that it was made from."""
    between: tuple[tuple[int, ...], ...] = ()
    """How often each layer was called where each forward but the last ends."""
    ends: tuple[int, ...] = ()
    """How many layer calls have run there."""
    is_ahead: bool = False
    """Whether it was made before its shape came."""
    decided: dict[float, Decision] = field(default_factory=dict)
    """By what is released, the decisions of hits."""

    def calls_until(self, part: int) -> tuple[int, ...]:
        """Return how often each layer is called up to the end of a forward."""
        return self.between[part] if part < len(self.between) else self.calls

    def events_of(self, part: int) -> slice:
        """Return where the layer calls of a forward stand among all."""
        ends = (0, *self.ends, len(self.events))
        return slice(*ends[part : part + 2]) if part < len(ends) - 1 else slice(0)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is recomputed."""
        return self.plan.extra_cost == 0


class Plans:
    """Keeps plans by shape, the least recently used forgotten first.

    Args:
        learner: Holds what has been learned.
        planner: Chooses the actions.
        margin: Between a prediction and the budget.
        cache_size: The most plans kept.
        refiner: Solves a problem to its end; None where plans stay as they were made.

    Attributes:
        hits: Steps whose plan was there.
        misses: Those for which it was made.
        n_ready: Plans that were made ahead and used.
    """

    def __init__(
        self,
        learner: Learner,
        planner: Planner,
        margin: SafetyMargin,
        cache_size: int,
        refiner: Planner | None,
    ) -> None:
        self._learner = learner
        self._planner = planner
        self._margin = margin
        self._refiner = refiner
        self._cache: LRUCache[_Key, CachedPlan] = LRUCache(cache_size)
        self._lock = lock()
        self.hits = self.misses = self.n_ready = 0

    def get(self, facts: StepInput, memory: Memory) -> CachedPlan | None:
        """Return the plan of a step that is about to run, if it is good today.

        Args:
            facts: The step.
            memory: What is held, and the budget.
        """
        key = facts.context, facts.has_gradients, facts.sizes
        with self._lock:
            found = self._cache.get(key)
            if found is None or not self._is_good(found, memory):
                self._cache.pop(key, None)
                self.misses += 1
                return None
            if found.is_ahead and not found.decided:
                self.n_ready += 1
            self.hits += 1
            return found

    def _is_good(self, cached: CachedPlan, memory: Memory) -> bool:
        """Whether a plan fits today, and leaves no more unused than it must."""
        if cached.version < self._learner.model.valid_since:
            return False
        growth = cached.growth.bytes(memory.released_bytes)
        headroom = memory.budget_bytes - memory.start_bytes
        if self._margin.allowed(growth) > headroom:
            return False
        spare = headroom - cached.headroom_bytes
        most = max(_SPARE * growth, self._margin.noise_bytes)
        return spare <= most or cached.keeps_all

    def make(
        self,
        facts: StepInput,
        memory: Memory,
        usable_bytes: float,
        share: float = 1.0,
        planner: Planner | None = None,
    ) -> CachedPlan:
        """Make a plan.

        Args:
            facts: The step.
            memory: What is held, and the budget.
            usable_bytes: The level that predictions may reach: the margin is taken off.
            share: How much of the way from the safest plan to that it may go.
            planner: Another one than the usual.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        model, planner = self._learner.model, planner or self._planner
        problem = fill_problem(model, facts, memory, usable_bytes)
        if share < 1.0:
            problem = _tightened(problem, share)
        plan, growth = self._best(planner, model, facts, memory, problem)
        return _with_costs(model, facts, memory, plan, growth)

    def _best(
        self,
        planner: Planner,
        model: CostModel,
        facts: StepInput,
        memory: Memory,
        problem: PlanningProblem,
    ) -> tuple[Plan, Growth]:
        """Choose the actions; fill what the problem's safe side leaves of the budget.

        The problem has autocast's copies of kept layers twice, and a plan is predicted
        without. Of BERT-large that was a tenth of the growth, and three layers
        recomputed for nothing.
        """
        released = memory.released_bytes
        room = problem.budget_bytes - problem.start_bytes
        plan = self._plan(planner, problem, memory)
        growth = plan_growth(model, facts, problem, plan.actions, released)
        reached = 0.0
        for _ in range(_MOST_FILLINGS):
            # By so much the problem has the plan higher than it is predicted.
            beyond = plan.peak_bytes - problem.start_bytes - growth.bytes(released)
            keeps_all = set(plan.actions) <= {model.menu.first}
            if keeps_all or beyond - reached < _SPARE * room:
                break
            wider = replace(problem, budget_bytes=problem.budget_bytes + beyond)
            other = self._plan(planner, wider, memory)
            if other.actions == plan.actions or other.extra_cost > plan.extra_cost:
                break
            fuller = plan_growth(model, facts, wider, other.actions, released)
            if fuller.bytes(released) > room:
                break
            plan, growth, reached = other, fuller, beyond
        return plan, growth

    def _plan(self, planner: Planner, problem: PlanningProblem, memory: Memory) -> Plan:
        """Choose the actions; where the margin does not fit, the safest ones."""
        try:
            return planner.plan(problem)
        except _Infeasible as error:
            least = safest_plan(problem)
            if least.peak_bytes - self._margin.noise_bytes <= memory.budget_bytes:
                return least
            raise InfeasibleBudgetError(
                memory.budget_bytes, least.peak_bytes, error.holders
            ) from None

    def imposed(
        self, facts: StepInput, memory: Memory, actions: tuple[str, ...]
    ) -> CachedPlan:
        """Return the plan of given actions, which other ranks asked for.

        Args:
            facts: The step.
            memory: What is held, and the budget.
            actions: One a layer call.
        """
        model = self._learner.model
        problem = fill_problem(model, facts, memory)
        choice = np.array([problem.actions.index(a) for a in actions], dtype=np.intp)
        plan = judge(problem, choice, planner="agreed")
        growth = plan_growth(model, facts, problem, actions, memory.released_bytes)
        return _with_costs(model, facts, memory, plan, growth)

    def keep(
        self, facts: StepInput, made: CachedPlan, memory: Memory, usable_bytes: float
    ) -> None:
        """Keep a plan for the next time, and have it refined.

        Args:
            facts: What it was made for, as all others.
            made: The plan.
            memory: What was held, and the budget.
            usable_bytes: The level that predictions may reach.
        """
        with self._lock:
            self._cache.setdefault(_key(facts), made)
        if self._refiner is None or made.plan.optimal or made.keeps_all:
            return
        refine = partial(self._refine, facts, made, memory, usable_bytes)
        self._learner.worker.submit(Lane.REFINE, _key(facts), refine)

    def _refine(
        self, facts: StepInput, made: CachedPlan, memory: Memory, usable_bytes: float
    ) -> None:
        key, model = _key(facts), self._learner.model
        with self._lock:
            is_in_use = self._cache.get(key) is made
        if not is_in_use or doubt(model, facts):
            return
        try:
            refined = self.make(facts, memory, usable_bytes, planner=self._refiner)
        except InfeasibleBudgetError:
            return  # more was learned since, and the plan is not good any more
        is_dearer = refined.plan.extra_cost > made.plan.extra_cost
        if is_dearer and not refined.plan.optimal:
            return
        with self._lock:
            if self._cache.get(key) is made:
                self._cache[key] = refined

    def prepare(self, facts: StepInput, memory: Memory) -> None:
        """Have a plan made for a step that is to come, if there is none that fits.

        Args:
            facts: The step, of a context that is planned freely.
            memory: What is held as a step begins, and the budget.
        """
        key = _key(facts)
        with self._lock:
            found = self._cache.get(key)
        if found is None or not self._is_good(found, memory):
            ahead = partial(self._make_ahead, facts, memory)
            self._learner.worker.submit(Lane.PLAN, key, ahead)

    def _make_ahead(self, facts: StepInput, memory: Memory) -> None:
        headroom = memory.headroom_bytes
        spare = max(self._margin.noise_bytes, _AHEAD * headroom)
        usable = memory.start_bytes + self._margin.largest(headroom - spare)
        if doubt(self._learner.model, facts):
            return
        try:
            made = self.make(facts, memory, usable)
        except InfeasibleBudgetError:
            return  # its step says so, with the numbers of its day
        with self._lock:
            found = self._cache.get(_key(facts))
            if found is None or not self._is_good(found, memory):
                self._cache[_key(facts)] = replace(made, is_ahead=True)


def _tightened(problem: PlanningProblem, share: float) -> PlanningProblem:
    """Let a problem go only part of the way to its budget."""
    least = safest_plan(problem).peak_bytes
    keep_all = np.zeros(len(problem.events), dtype=np.intp)
    top = min(problem.budget_bytes, lay_out(problem, keep_all).peak_bytes)
    if least >= top:
        return problem  # there is no way to go part of
    return replace(problem, budget_bytes=least + share * (top - least))


def _with_costs(
    model: CostModel, facts: StepInput, memory: Memory, plan: Plan, growth: Growth
) -> CachedPlan:
    pattern = model.pattern(facts)
    return CachedPlan(
        plan,
        tuple(event.name for event in pattern.events),
        pattern.by_unit(plan.actions, otherwise=model.menu.first),
        pattern.calls,
        growth,
        extra_flops(model, facts, plan.actions),
        memory.headroom_bytes,
        model.version,
        pattern.between,
        tuple(pattern.events_until(part) for part in range(len(pattern.between))),
    )


def _key(facts: StepInput) -> _Key:
    return facts.context, facts.has_gradients, facts.sizes
