"""Deciding what a step does: which phase, which plan, or the safest one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mimose.estimator import Context, Estimator, StepFacts, actions_by_unit
from mimose.exceptions import InfeasibleBudgetError
from mimose.plan_cache import CachedPlan, Growth, PlanCache
from mimose.planners import (
    InfeasibleBudgetError as _Infeasible,
)
from mimose.planners import (
    Plan,
    Planner,
    PlanningProblem,
    Static,
    lay_out,
    safest_plan,
)
from mimose.predictors import Margin
from mimose.records import Phase
from mimose.series import Sizes
from mimose.shapes import SizeTable, round_up

_STAGES = (0.35, 0.7)
"""Shares of the way from the safest plan to the whole budget, each checked by a step
before a context is planned freely."""


class Memory(NamedTuple):
    """What is held when a step begins, and what is known to come."""

    budget_bytes: float
    start_bytes: float
    released_bytes: float
    """Outputs of the last step that go before the backward."""
    optimizer_excess_bytes: float

    @property
    def headroom_bytes(self) -> float:
        """What the step may grow by."""
        return self.budget_bytes - self.start_bytes


@dataclass(slots=True)
class Decision:
    """What a step does."""

    phase: Phase
    chosen: CachedPlan | None
    """None: everything is recomputed, and measured."""
    growth_bytes: float | None = None
    """Predicted, at the exact sizes."""
    flops: int = 0
    uncounted: frozenset[tuple[int, Sizes]] = frozenset()
    """Recomputations (family, own sizes) whose FLOPs are still to be counted."""
    cache_hit: bool = False
    reason: str = ""


class Policy:
    """Chooses a phase and a plan for each step.

    Args:
        estimator: What has been learned.
        planner: Makes the plans.
        margin: Kept free over every prediction.
        round_to: How sizes are rounded up to buckets.
        cache_size: The most plans kept.
        warns: Whether a budget that no plan keeps gets the least plan, not an error.
    """

    def __init__(
        self,
        estimator: Estimator,
        planner: Planner,
        margin: Margin,
        round_to: int | Mapping[str, int],
        cache_size: int,
        *,
        warns: bool,
    ) -> None:
        self._estimator = estimator
        self._planner = planner
        self._round_to = round_to
        self._stages: dict[Context, int] = {}
        self.margin = margin
        self.cache = PlanCache(cache_size)
        self._warns = warns
        self._static_is_made = False

    def forget(self, context: Context) -> None:
        """Distrust a context whose steps turned out to run other events."""
        self._estimator.forget(context)
        self._stages.pop(context, None)
        self.cache.clear()

    def decide(self, facts: StepFacts, table: SizeTable, memory: Memory) -> Decision:
        """Choose what a step of this shape does.

        Args:
            facts: Its context and exact sizes.
            table: Names its sizes.
            memory: What is held, and the budget.

        Raises:
            InfeasibleBudgetError: A trusted prediction says that no plan fits.
        """
        bucket = round_up(table.names, facts.sizes, self._round_to)
        key = (facts.context, facts.has_gradients, bucket)
        found = self.cache.get(key, lambda cached: self._is_good(cached, memory))
        if found is not None:
            return self._decision(facts, found, memory, cache_hit=True)
        upper = StepFacts(facts.context, bucket, facts.has_gradients)
        doubt = self._estimator.doubt(upper)
        stage = self._stages.get(facts.context)
        if doubt:
            return Decision(
                "collect" if stage is None else "fallback", None, reason=doubt
            )
        stage = self._stages.setdefault(facts.context, 0)
        self._make_static(upper, table, memory)
        made = self._make(upper, memory, stage)
        decision = self._decision(facts, made, memory, cache_hit=False)
        if stage < len(_STAGES):
            decision.phase = "step_down"
        else:
            self.cache.put(key, made)
        return decision

    def checked(self, context: Context, *, is_within: bool, kept_some: bool) -> None:
        """Take note of a step down whose observed peak is known."""
        stage = self._stages.get(context)
        if stage is not None and stage < len(_STAGES) and is_within and kept_some:
            self._stages[context] = stage + 1

    def problem(
        self, facts: StepFacts, memory: Memory, budget_bytes: float | None = None
    ) -> PlanningProblem:
        """Fill the planning problem of exact sizes.

        Args:
            facts: The step's context and sizes.
            memory: What is held, and the budget.
            budget_bytes: Another budget, such as one with the margin taken off.
        """
        return self._estimator.problem(
            facts,
            start_bytes=memory.start_bytes,
            budget_bytes=memory.budget_bytes if budget_bytes is None else budget_bytes,
            released_bytes=memory.released_bytes,
            step_excess_bytes=memory.optimizer_excess_bytes,
        )

    # ------------------------------------------------------------------ making plans

    def _is_good(self, cached: CachedPlan, memory: Memory) -> bool:
        """Whether a cached plan fits today, and leaves no more unused than it must."""
        growth = cached.growth.bytes(memory.released_bytes)
        if growth + self.margin.bytes(growth) > memory.headroom_bytes:
            return False
        spare = memory.headroom_bytes - cached.headroom_bytes
        return cached.keeps_all or spare <= max(0.01 * growth, self.margin.noise_bytes)

    def _usable_budget(self, memory: Memory) -> float:
        """Take the margin, which is a share of the growth, off the budget."""
        room = memory.headroom_bytes - self.margin.noise_bytes
        return memory.start_bytes + max(0.0, room) / (1.0 + self.margin.fraction)

    def _make(self, facts: StepFacts, memory: Memory, stage: int) -> CachedPlan:
        problem = self.problem(facts, memory, self._usable_budget(memory))
        if stage < len(_STAGES):
            problem = self._tightened(problem, _STAGES[stage])
        plan = self._plan(problem, memory)
        return self._cached(facts, problem, plan, memory)

    def _tightened(self, problem: PlanningProblem, share: float) -> PlanningProblem:
        least = safest_plan(problem).peak_bytes
        everything = lay_out(
            problem, np.zeros(len(problem.events), dtype=np.intp)
        ).peak_bytes
        top = min(problem.budget_bytes, everything)
        budget = least + share * max(0.0, top - least)
        return replace(problem, budget_bytes=max(budget, least * (1 + 1e-12)))

    def _plan(self, problem: PlanningProblem, memory: Memory) -> Plan:
        try:
            return self._planner.plan(problem)
        except _Infeasible as error:
            least = safest_plan(problem)
            noise = self.margin.noise_bytes
            if least.peak_bytes - noise <= memory.budget_bytes or self._warns:
                return least  # it fits, if without all of the margin
            raise InfeasibleBudgetError(
                memory.budget_bytes, least.peak_bytes, error.holders
            ) from None

    def _make_static(self, facts: StepFacts, table: SizeTable, memory: Memory) -> None:
        """Show a static planner the shape that its one plan is for."""
        if self._static_is_made or not isinstance(self._planner, Static):
            return
        sizes = table.fill(self._planner.shape, facts.sizes)
        longest = StepFacts(facts.context, sizes, facts.has_gradients)
        self._planner.plan(self.problem(longest, memory, self._usable_budget(memory)))
        self._static_is_made = True

    def _cached(
        self, facts: StepFacts, problem: PlanningProblem, plan: Plan, memory: Memory
    ) -> CachedPlan:
        pattern = self._estimator.pattern(facts.context)
        assert pattern is not None
        return CachedPlan(
            plan,
            actions_by_unit(pattern, plan.actions),
            pattern.calls,
            self._growth(facts, problem, plan.actions, memory),
            memory.headroom_bytes,
        )

    # ------------------------------------------------------------------ exact sizes

    def _growth(
        self,
        facts: StepFacts,
        problem: PlanningProblem,
        actions: tuple[str, ...],
        memory: Memory,
    ) -> Growth:
        """Judge a plan at the problem's sizes, before and after the release."""
        choice = np.array([problem.actions.index(a) for a in actions], dtype=np.intp)
        laid_out = lay_out(problem, choice)
        n_events = len(actions)
        levels = laid_out.level_bytes - problem.start_bytes
        peaks = laid_out.peak_bytes_by_segment - problem.start_bytes
        first, second = self._estimator.head_peaks(facts)
        before = max([0.0, levels[2 * n_events] + first, *peaks[: 2 * n_events]])
        # The optimizer's step is not part of what is observed in a step.
        behind = [*(peaks[2 * n_events + 1 : -1] + memory.released_bytes)]
        return Growth(
            float(before), float(max([levels[2 * n_events] + second, *behind]))
        )

    def _decision(
        self, facts: StepFacts, chosen: CachedPlan, memory: Memory, *, cache_hit: bool
    ) -> Decision:
        exact = chosen.exact.get(facts.sizes)
        if exact is None:
            problem = self.problem(facts, memory)
            growth = self._growth(facts, problem, chosen.plan.actions, memory)
            flops, unknown = self._estimator.recomputed_flops(
                facts, chosen.plan.actions
            )
            exact = growth, flops, frozenset(unknown)
            chosen.exact[facts.sizes] = exact
        growth, flops, uncounted = exact
        return Decision(
            "plan",
            chosen,
            growth.bytes(memory.released_bytes),
            flops,
            uncounted,
            cache_hit,
        )
