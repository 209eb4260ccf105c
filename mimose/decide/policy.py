"""Deciding what a step does: which phase, which plan, or the safest one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mimose.budget import format_bytes
from mimose.decide.learning import Learning
from mimose.decide.plan_cache import CachedPlan, PlanCache
from mimose.exceptions import InfeasibleBudgetError
from mimose.learn.growth import ExactShape, Growth, plan_growth
from mimose.learn.learner import Learner
from mimose.learn.problem import Memory, doubt, extra_flops, fill_problem, stretch
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
from mimose.predictors import NOISY_STRETCH, Calibration, Margin
from mimose.records import Phase
from mimose.types import MOST_CONTEXTS, Context, Sizes, StepFacts, Uncounted
from mimose.watch.size_table import SizeTable, round_up

_log = logging.getLogger(__name__)

_STAGES = (0.35, 0.7)
"""Shares of the way from the safest plan to the whole budget, each checked by a step
before a context is planned freely."""

_LARGE = 0.5
"""Steps that grow by less of the largest growth calibrate nothing: noise is all."""
_BEYOND = 0.1
"""Kept free, besides the margin, over a prediction as far beyond the sizes measured as
a fit of readings is trusted, and in the first step; nearer to them less."""
_PATIENCE = 50
"""Steps in a row that were measured and not planned; then that is worth a warning."""


@dataclass(slots=True)
class Decision:
    """What a step does."""

    phase: Phase
    chosen: CachedPlan | None
    """None: everything is recomputed, and measured."""
    growth_bytes: float | None = None
    """Predicted, at the exact sizes."""
    raw_growth_bytes: float = 0.0
    """The same, before it was calibrated."""
    flops: int = 0
    uncounted: Uncounted = field(default_factory=dict)
    """Recomputations whose FLOPs are not known yet."""
    cache_hit: bool = False
    is_measured: bool = False
    """Whether the boundaries are read: without a plan, or where it is a stretch."""
    reason: str = ""


class Policy:
    """Chooses a phase and a plan for each step.

    Args:
        learner: Holds what has been learned.
        planner: Makes the plans.
        margin: Kept free over every prediction.
        round_to: How sizes are rounded up to buckets.
        cache_size: The most plans kept.
        raises: Whether a prediction that no plan keeps the budget is an error. It need
            not be where steps are observed: then everything is recomputed, and what
            that is seen to take decides.
    """

    def __init__(
        self,
        learner: Learner,
        planner: Planner,
        margin: Margin,
        round_to: int | Mapping[str, int],
        cache_size: int,
        *,
        raises: bool,
    ) -> None:
        self._learner = learner
        self._planner = planner
        self._round_to = round_to
        self._stages: dict[Context, int] = {}
        self.margin = margin
        self.calibration = Calibration()
        self.cache = PlanCache(cache_size)
        self._raises = raises
        self._static_is_made = False
        self._learning = Learning(margin.noise_bytes)
        self._n_doubted = 0
        self._has_warned = False
        self._knows_names = isinstance(round_to, int)

    def forget(self, context: Context) -> None:
        """Distrust a context whose steps turned out to run other events."""
        self._learner.forget(context)
        self._stages.pop(context, None)

    def state_dict(self) -> dict[str, Any]:
        """Return what steps have taught, ready for JSON; plans are made anew."""
        return {
            "stages": dict(self._stages),
            "margin": self.margin.state_dict(),
            "calibration": self.calibration.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another policy was taught.

        Args:
            state: What ``state_dict`` returned.
        """
        self._stages = {str(key): int(stage) for key, stage in state["stages"].items()}
        self.margin.load_state_dict(state["margin"])
        self.calibration.load_state_dict(state["calibration"])
        self._learner.distrust_plans()

    def cached(
        self, facts: StepFacts, table: SizeTable, memory: Memory
    ) -> Decision | None:
        """Return the decision for a shape whose cached plan fits today, else None."""
        memory = memory.with_state
        key = self._key(facts, table)
        found = self.cache.get(key, self._is_good, memory)
        if found is None or facts.context not in self._learner.model.patterns:
            return None
        self._learner.use(facts.context)
        self._n_doubted = 0
        return self._decision(facts, found, memory, cache_hit=True)

    def decide(
        self,
        facts: StepFacts,
        table: SizeTable,
        memory: Memory,
        *,
        is_first: bool = False,
    ) -> Decision:
        """Choose what a step of this shape does, whatever is cached.

        Args:
            facts: Its context and exact sizes.
            table: Names its sizes.
            memory: What is held, and the budget.
            is_first: Whether it is the process's first, which maps and imports things
                that stay: a plan, after what was learned elsewhere, leaves more free.

        Raises:
            InfeasibleBudgetError: A trusted prediction says that no plan fits, and
                predictions are all there is.
        """
        self._check_names(table)
        memory = memory.with_state
        model = self._learner.model
        key = self._key(facts, table)
        upper = facts._replace(sizes=key[2])
        if facts.context not in model.patterns:
            self._stages.pop(facts.context, None)
        self._learner.use(facts.context)
        why_not = doubt(model, upper)
        self._note_doubt(why_not)
        if why_not:
            phase: Phase = "fallback" if facts.context in self._stages else "collect"
            return Decision(phase, None, reason=why_not)
        stage = self._stage(facts.context)
        self._make_static(upper, table, memory)
        beyond = stretch(model, facts)
        try:
            share = 1.0 if is_first else min(1.0, beyond / (NOISY_STRETCH - 1.0))
            more = _BEYOND * share
            made = self._make(upper, memory, stage, more)
        except InfeasibleBudgetError as error:
            if self._raises:
                raise
            least = format_bytes(error.least_peak_bytes)
            reason = (
                f"no plan is predicted to keep the budget, the least peak is {least}"
            )
            return Decision("fallback", None, reason=reason)
        decision = self._decision(facts, made, memory, cache_hit=False)
        is_learning = self._learning.is_on(model.n_steps)
        is_learning = is_learning and not self._static_is_made  # it plans no more
        decision.is_measured = is_learning or beyond > 0.0
        if stage < len(_STAGES):
            decision.phase = "step_down"
        elif not more:  # once it was measured, there will be a better plan
            self.cache.put(key, made)
        return decision

    def _stage(self, context: Context) -> int:
        """Return how far a context has come; contexts forgotten elsewhere go."""
        stage = self._stages.setdefault(context, 0)
        if len(self._stages) > MOST_CONTEXTS:
            known = self._learner.model.patterns
            self._stages = {c: s for c, s in self._stages.items() if c in known}
        return stage

    def _note_doubt(self, doubt: str) -> None:
        """Count steps without a plan, and warn once where there is no end of them."""
        self._n_doubted = self._n_doubted + 1 if doubt else 0
        if self._n_doubted < _PATIENCE or self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "mimose: the last %d steps were all measured, with everything recomputed, "
            "and none was planned; the last reason: %s. Where inputs differ in more "
            "than their sizes (texts, identifiers, numbers of tensors), keep that out "
            "of the model's arguments. Where nothing helps, planner='full' recomputes "
            "everything without measuring.",
            self._n_doubted,
            doubt,
        )

    def _check_names(self, table: SizeTable) -> None:
        """Warn once if `round_to` speaks of sizes that the model does not have."""
        if self._knows_names or isinstance(self._round_to, int):
            return
        self._knows_names = True
        unknown = [name for name in self._round_to if not table.knows(name)]
        if unknown:
            _log.warning(
                "mimose: round_to: no size is called %s, so that rounds nothing; the "
                "sizes are %s",
                ", ".join(map(repr, unknown)),
                ", ".join(table.spoken_names()),
            )

    def _key(self, facts: StepFacts, table: SizeTable) -> tuple[Context, bool, Sizes]:
        """Return what plans are cached by: the context and the bucket's upper end."""
        bucket = round_up(table, facts.sizes, self._round_to)
        return facts.context, facts.has_gradients, bucket

    def checked(self, context: Context, *, is_within: bool, kept_some: bool) -> None:
        """Take note of a step down whose observed peak is known."""
        stage = self._stages.get(context)
        if stage is not None and stage < len(_STAGES) and is_within and kept_some:
            self._stages[context] = stage + 1

    def observe(
        self, decision: Decision, observed: float, *, is_relevant: bool
    ) -> None:
        """Take note of how a decision's prediction came out.

        Args:
            decision: With a prediction.
            observed: The growth.
            is_relevant: Whether it is near enough to the budget to tell the margin.
        """
        if decision.growth_bytes is None:
            return
        self._learn_from(decision, decision.growth_bytes, observed)
        if is_relevant:
            self.margin.observe(decision.growth_bytes, observed)
        if decision.raw_growth_bytes >= _LARGE * self._learner.model.scale:
            self.calibration.observe(decision.raw_growth_bytes, observed)

    def _learn_from(
        self, decision: Decision, predicted: float, observed: float
    ) -> None:
        """Tell how a prediction came out; a plan that was far off is not used again."""
        self._learning.observe(predicted, observed, self._learner.model.scale)
        chosen = decision.chosen
        if chosen is None or chosen.keeps_all:
            return
        model = self._learner.model
        if model.is_exact:  # a calibration is no cause to find
            predicted = decision.raw_growth_bytes
        is_off = self._learning.begin_again_if_off(predicted, observed, model.n_steps)
        if is_off and not decision.is_measured:  # else the next one knows better
            self.cache.drop(chosen)

    def explain(
        self, facts: StepFacts, memory: Memory
    ) -> tuple[PlanningProblem, Plan, str]:
        """Return the exact problem of a shape, the plan it gets, and why.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        memory = memory.with_state
        problem = self.problem(facts, memory)
        why_not = doubt(self._learner.model, facts)
        if why_not:
            return problem, safest_plan(problem), f"the safest plan, for {why_not}"
        tight = replace(problem, budget_bytes=self._usable_budget(memory))
        plan = self._plan(tight, memory)
        why = f"planner {plan.planner}" + (" (proved optimal)" if plan.optimal else "")
        above = self.calibration.factor - 1.0
        if above:
            why += f", predictions raised by {above:.1%} as recent steps were"
        return problem, plan, f"{why}, with a margin of {self.margin.fraction:.1%}"

    def problem(
        self, facts: StepFacts, memory: Memory, budget_bytes: float | None = None
    ) -> PlanningProblem:
        """Fill the planning problem of exact sizes.

        Args:
            facts: The step's context and sizes.
            memory: What is held, and the budget.
            budget_bytes: Another budget, such as one with the margin taken off.
        """
        return fill_problem(self._learner.model, facts, memory, budget_bytes)

    # ------------------------------------------------------------------ making plans

    def _is_good(self, cached: CachedPlan, memory: Memory) -> bool:
        """Whether a cached plan fits today, and leaves no more unused than it must."""
        if cached.version < self._learner.model.valid_since:
            return False
        growth = cached.growth.bytes(memory.released_bytes) * self.calibration.factor
        headroom = memory.headroom_bytes
        if growth + self.margin.bytes(growth) > headroom:
            return False
        spare = headroom - cached.headroom_bytes
        return spare <= max(0.01 * growth, self.margin.noise_bytes) or cached.keeps_all

    def _usable_budget(self, memory: Memory, more: float = 0.0) -> float:
        """Take the margin and more, both shares of the growth, off the budget."""
        room = memory.headroom_bytes - self.margin.noise_bytes
        share = (1.0 + self.margin.fraction + more) * self.calibration.factor
        return memory.start_bytes + max(0.0, room) / share

    def _make(
        self, facts: StepFacts, memory: Memory, stage: int, more: float
    ) -> CachedPlan:
        problem = self.problem(facts, memory, self._usable_budget(memory, more))
        if stage < len(_STAGES):
            problem = self._tightened(problem, _STAGES[stage])
        plan = self._plan(problem, memory)
        return self._cached(facts, problem, plan, memory)

    def _tightened(self, problem: PlanningProblem, share: float) -> PlanningProblem:
        least = safest_plan(problem).peak_bytes
        everything = lay_out(
            problem, np.zeros(len(problem.events), dtype=np.intp)
        ).peak_bytes
        if least > problem.budget_bytes:
            return problem  # there is no way to go part of
        top = min(problem.budget_bytes, everything)
        budget = least + share * max(0.0, top - least)
        return replace(problem, budget_bytes=max(budget, least * (1 + 1e-12)))

    def _plan(self, problem: PlanningProblem, memory: Memory) -> Plan:
        try:
            return self._planner.plan(problem)
        except _Infeasible as error:
            least = safest_plan(problem)
            noise = self.margin.noise_bytes
            if least.peak_bytes - noise <= memory.budget_bytes:
                return least  # it fits, if without all of the margin
            raise InfeasibleBudgetError(
                memory.budget_bytes, least.peak_bytes, error.holders
            ) from None

    def _make_static(self, facts: StepFacts, table: SizeTable, memory: Memory) -> None:
        """Show a static planner the shape that its one plan is for."""
        if self._static_is_made or not isinstance(self._planner, Static):
            return
        sizes = table.fill(self._planner.shape, facts.sizes)
        longest = facts._replace(sizes=sizes)
        self._planner.plan(self.problem(longest, memory, self._usable_budget(memory)))
        self._static_is_made = True

    def _cached(
        self, facts: StepFacts, problem: PlanningProblem, plan: Plan, memory: Memory
    ) -> CachedPlan:
        model = self._learner.model
        pattern = model.patterns[facts.context]
        made = CachedPlan(
            plan,
            problem.events,
            pattern.by_unit(plan.actions, otherwise=model.menu.first),
            pattern.calls,
            self._growth(facts, problem, plan, memory),
            memory.headroom_bytes,
            model.version,
        )
        made.exact[facts.sizes] = self._exact(facts, plan, made.growth)
        return made

    def _growth(
        self, facts: StepFacts, problem: PlanningProblem, plan: Plan, memory: Memory
    ) -> Growth:
        model, released = self._learner.model, memory.released_bytes
        return plan_growth(model, facts, problem, plan.actions, released)

    def _decision(
        self, facts: StepFacts, chosen: CachedPlan, memory: Memory, *, cache_hit: bool
    ) -> Decision:
        exact = chosen.exact.get(facts.sizes)
        if exact is None:
            problem = self.problem(facts, memory)
            growth = self._growth(facts, problem, chosen.plan, memory)
            exact = chosen.exact[facts.sizes] = self._exact(facts, chosen.plan, growth)
        elif exact.uncounted:  # counted since, most likely
            exact = self._exact(facts, chosen.plan, exact.growth)
            chosen.exact[facts.sizes] = exact
        growth, flops, uncounted = exact
        raw = growth.bytes(memory.released_bytes)
        return Decision(
            "plan",
            chosen,
            raw * self.calibration.factor,
            raw,
            flops,
            uncounted,
            cache_hit,
        )

    def _exact(self, facts: StepFacts, plan: Plan, growth: Growth) -> ExactShape:
        flops, unknown = extra_flops(self._learner.model, facts, plan.actions)
        return ExactShape(growth, flops, unknown)
