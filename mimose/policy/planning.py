"""Making plans, and telling what a plan comes to at exact sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mimose.cost.costs import extra_flops
from mimose.cost.growth import ExactShape, Growth, plan_growth
from mimose.cost.model import CostModel
from mimose.cost.problem import Memory, fill_problem
from mimose.exceptions import InfeasibleBudgetError
from mimose.planners import InfeasibleBudgetError as _Infeasible
from mimose.planners import (
    Plan,
    Planner,
    PlanningProblem,
    lay_out,
    safest_plan,
)
from mimose.planners.timeline import judge
from mimose.policy.headroom import headrooms
from mimose.policy.plan_cache import CachedPlan
from mimose.types import Sizes, StepInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a plan is to be made for; immutable, for any thread."""

    facts: StepInput
    """The step's context, and the sizes that the plan is for."""
    exact_sizes: Sizes
    """Those of the step itself, which may lie below."""
    memory: Memory
    """What is held, and the budget."""
    usable_bytes: float
    """The level that predictions may reach: the reserve is taken off."""
    stage_share: float = 1.0
    """How much of the way from the safest plan to the whole budget it may go."""
    after_version: int = 0
    """Of the cost model when it was placed."""
    ran: tuple[str, ...] = ()
    """The actions of the events that have run already."""


_MOST_FILLINGS = 3
_SPARE = 0.01
"""Of the room for a step: less is not worth another plan."""
_MOST_PARTS = 256
"""Sequences that a plan remembers."""
_MOST_IMPOSED = 4
"""Plans that ran in a plan's place, which it remembers."""


@dataclass(frozen=True, slots=True)
class Given:
    """A planner whose choice is made: by other ranks."""

    actions: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return what its plans are called by."""
        return "agreed"

    def plan(self, problem: PlanningProblem) -> Plan:
        """Return these actions, judged."""
        index = {name: i for i, name in enumerate(problem.actions)}
        choice = np.array([index[action] for action in self.actions], dtype=np.intp)
        return judge(problem, choice, planner=self.name)


class PlanMaker:
    """Makes plans within what the reserve leaves of the budget.

    Args:
        planner: Chooses the actions.
        noise_bytes: By so much a plan may pass the budget in its prediction.
    """

    def __init__(self, planner: Planner, noise_bytes: float) -> None:
        self.planner = planner
        self._noise_bytes = noise_bytes

    def make(
        self, model: CostModel, order: Order, planner: Planner | None = None
    ) -> CachedPlan:
        """Make a plan with all that a hit needs.

        Args:
            model: What is known of costs.
            order: What it is to be made for.
            planner: Another one than the usual.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        facts, memory = order.facts, order.memory
        problem = fill_problem(model, facts, memory, order.usable_bytes)
        if order.ran:
            problem = _settled(problem, order.ran)
        if order.stage_share < 1.0:
            problem = _tightened(problem, order.stage_share)
        problem, plan, growth = self.filled(model, facts, memory, problem, planner)
        pattern = model.pattern(facts)
        released = memory.released_bytes
        on_host = {spec.name for spec in model.menu.specs if spec.needs_host}
        free = headrooms(problem, plan, growth, released, on_host)
        made = CachedPlan(
            plan,
            problem.events,
            pattern.by_unit(plan.actions, otherwise=model.menu.first),
            pattern.calls,
            growth,
            memory.headroom_bytes,
            pattern.between,
            tuple(pattern.events_until(part) for part in range(len(pattern.between))),
            model.version,
            facts.sizes,
            {pattern.events[at].place: headroom for at, headroom in free.items()},
        )
        made.exact[facts.sizes] = _exact(model, facts, made.growth, plan.actions)
        return made

    def filled(
        self,
        model: CostModel,
        facts: StepInput,
        memory: Memory,
        problem: PlanningProblem,
        planner: Planner | None = None,
    ) -> tuple[PlanningProblem, Plan, Growth]:
        """Choose the actions; fill what the problem's safe side leaves of the budget.

        The problem counts copies of weights, for one, as held by whatever becomes of a
        layer, and a plan is predicted without. Of BERT-large under autocast that was a
        tenth of the growth, and three layers recomputed for nothing.

        Args:
            model: What is known of costs.
            facts: The step's context and exact sizes.
            memory: What is held, and the budget.
            problem: That these fill.
            planner: Another one than the usual.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        released, budget = memory.released_bytes, problem.budget_bytes
        room = budget - problem.start_bytes
        plan = self.plan(problem, memory, planner)
        growth = plan_growth(model, facts, problem, plan.actions, released)
        reached = 0.0
        for _ in range(_MOST_FILLINGS):
            # By so much the problem has the plan higher than it is predicted.
            beyond = plan.peak_bytes - problem.start_bytes - growth.bytes(released)
            keeps_all = set(plan.actions) <= {model.menu.first}
            if keeps_all or beyond - reached < _SPARE * room:
                break
            wider = replace(problem, budget_bytes=budget + beyond)
            other = self.plan(wider, memory, planner)
            if other.actions == plan.actions or other.extra_cost > plan.extra_cost:
                break
            fuller = plan_growth(model, facts, wider, other.actions, released)
            if fuller.bytes(released) > room:
                break
            problem, plan, growth, reached = wider, other, fuller, beyond
        return problem, plan, growth

    def plan(
        self, problem: PlanningProblem, memory: Memory, planner: Planner | None = None
    ) -> Plan:
        """Choose the actions; where the reserve does not fit, the safest ones.

        Raises:
            InfeasibleBudgetError: Not even these keep the budget.
        """
        try:
            return (planner or self.planner).plan(problem)
        except _Infeasible as error:
            least = safest_plan(problem)
            if least.peak_bytes - self._noise_bytes <= memory.budget_bytes:
                return least
            raise InfeasibleBudgetError(
                memory.budget_bytes, least.peak_bytes, error.holders
            ) from None


def imposed(
    maker: PlanMaker, model: CostModel, order: Order, chosen: CachedPlan, given: Given
) -> CachedPlan | None:
    """Return the plan of given actions that runs in another one's place.

    Args:
        maker: Makes plans.
        model: What is known of costs.
        order: What the other was made for.
        chosen: The other, which remembers the answer.
        given: The actions.

    Returns:
        None where the model has come to know other events by now.
    """
    found = chosen.imposed.get(given.actions)
    if found is None:
        names = tuple(event.name for event in model.pattern(order.facts).events)
        if names != chosen.events:
            return None
        found = maker.make(model, order, given)
        if len(chosen.imposed) >= _MOST_IMPOSED:
            chosen.imposed.clear()
        chosen.imposed[given.actions] = found
    return found


def at_sizes(
    model: CostModel, facts: StepInput, chosen: CachedPlan, memory: Memory
) -> ExactShape:
    """Return what a cached plan comes to at exact sizes; it remembers the answer.

    Args:
        model: What is known of costs.
        facts: The step's context and exact sizes.
        chosen: The plan.
        memory: What is held, and the budget.
    """
    facts = facts._replace(calls=chosen.calls)  # of the bucket's upper end
    exact, actions = chosen.exact.get(facts.sizes), chosen.plan.actions
    if exact is not None and not exact.uncounted:
        return exact
    if exact is not None:  # counted since
        growth = exact.growth
    else:
        problem, released = fill_problem(model, facts, memory), memory.released_bytes
        growth = plan_growth(model, facts, problem, actions, released)
    exact = _exact(model, facts, growth, actions)
    chosen.exact[facts.sizes] = exact
    return exact


def as_ran(model: CostModel, facts: StepInput, chosen: CachedPlan) -> CachedPlan:
    """Return what a plan was to a step that ran only some of its events.

    Args:
        model: What is known of costs.
        facts: The step's, with what it called.
        chosen: Its plan, which remembers the answer.
    """
    found = chosen.parts.get(facts.calls)
    if found is None:
        names = {event.name for event in model.pattern(facts).events}
        pairs = zip(chosen.events, chosen.plan.actions, strict=True)
        ran = [(name, action) for name, action in pairs if name in names]
        actions = tuple(action for _, action in ran)
        found = replace(
            chosen,
            plan=replace(chosen.plan, actions=actions),
            events=tuple(name for name, _ in ran),
            calls=facts.calls,
            exact={},
            decided={},
            parts={},
        )
        if len(chosen.parts) >= _MOST_PARTS:
            chosen.parts.clear()
        chosen.parts[facts.calls] = found
    return found


def _exact(
    model: CostModel, facts: StepInput, growth: Growth, actions: Sequence[str]
) -> ExactShape:
    flops, uncounted = extra_flops(model, facts, actions)
    return ExactShape(growth, flops, uncounted)


def _settled(problem: PlanningProblem, ran: Sequence[str]) -> PlanningProblem:
    """Leave no choice about events that have run."""
    allowed = problem.allowed.copy()
    for index, action in enumerate(ran):
        allowed[index] = [name == action for name in problem.actions]
    return replace(problem, allowed=allowed)


def _tightened(problem: PlanningProblem, share: float) -> PlanningProblem:
    """Let a problem go only part of the way to its budget."""
    least = safest_plan(problem).peak_bytes
    keep_all = np.zeros(len(problem.events), dtype=np.intp)
    everything = lay_out(problem, keep_all).peak_bytes
    if least > problem.budget_bytes:
        return problem  # there is no way to go part of
    top = min(problem.budget_bytes, everything)
    budget = least + share * max(0.0, top - least)
    return replace(problem, budget_bytes=max(budget, least * (1 + 1e-12)))
