"""Making plans, and telling what a plan comes to at exact sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mimose.decide.plan_cache import CachedPlan
from mimose.decide.reserve import Reserve
from mimose.exceptions import InfeasibleBudgetError
from mimose.learn.costs import event_seconds, extra_flops
from mimose.learn.growth import ExactShape, Growth, plan_growth
from mimose.learn.model import CostModel
from mimose.learn.problem import Memory, fill_problem
from mimose.planners import InfeasibleBudgetError as _Infeasible
from mimose.planners import Plan, Planner, PlanningProblem, lay_out, safest_plan
from mimose.types import StepInput

_MOST_PARTS = 256
"""Sequences that a plan remembers."""


class PlanMaker:
    """Makes plans within what the reserve leaves of the budget.

    Args:
        planner: Chooses the actions.
        reserve: What is kept free between prediction and budget.
    """

    def __init__(self, planner: Planner, reserve: Reserve) -> None:
        self.planner = planner
        self._reserve = reserve

    def make(
        self,
        model: CostModel,
        facts: StepInput,
        memory: Memory,
        *,
        stage_share: float,
        extrapolation_ratio: float,
    ) -> CachedPlan:
        """Make a plan with all that a hit needs.

        Args:
            model: What is known of costs.
            facts: The step's context, and the sizes that the plan is for.
            memory: What is held, and the budget.
            stage_share: How much of the way from the safest plan to the whole budget
                the plan may go.
            extrapolation_ratio: How far beyond the sizes measured the step lies, as a
                share of how far a fit is trusted.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        usable = self._reserve.usable_budget(memory, extrapolation_ratio)
        problem = fill_problem(model, facts, memory, usable)
        if stage_share < 1.0:
            problem = _tightened(problem, stage_share)
        plan = self.plan(problem, memory)
        pattern = model.pattern(facts)
        made = CachedPlan(
            plan,
            problem.events,
            pattern.by_unit(plan.actions, otherwise=model.menu.first),
            pattern.calls,
            plan_growth(model, facts, problem, plan.actions, memory.released_bytes),
            memory.headroom_bytes,
            model.version,
        )
        made.exact[facts.sizes] = _exact(model, facts, made.growth, plan.actions)
        return made

    def plan(self, problem: PlanningProblem, memory: Memory) -> Plan:
        """Choose the actions; where the reserve does not fit, the safest ones.

        Raises:
            InfeasibleBudgetError: Not even these keep the budget.
        """
        try:
            return self.planner.plan(problem)
        except _Infeasible as error:
            least = safest_plan(problem)
            if least.peak_bytes - self._reserve.noise_bytes <= memory.budget_bytes:
                return least
            raise InfeasibleBudgetError(
                memory.budget_bytes, least.peak_bytes, error.holders
            ) from None


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
    exact, actions = chosen.exact.get(facts.sizes), chosen.plan.actions
    is_new = exact is not None and exact.rates is model.seconds
    if exact is not None and is_new and not exact.uncounted:
        return exact
    if exact is not None:  # counted since, or timed
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
    by_event = event_seconds(model, facts, actions)
    seconds = None if by_event is None else sum(by_event)
    return ExactShape(growth, flops, uncounted, seconds, model.seconds)


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
