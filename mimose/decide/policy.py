"""Deciding what a step does: which phase, which plan, or the safest one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from mimose.budget import format_bytes
from mimose.decide.plan_cache import CachedPlan, ExactShape, Growth, PlanCache
from mimose.decide.reserve import PredictedStep, Reserve
from mimose.exceptions import InfeasibleBudgetError
from mimose.learn.estimator import Estimator
from mimose.learn.patterns import actions_by_unit
from mimose.learn.series import NOISY_STRETCH
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
from mimose.records import Phase
from mimose.types import KEEP, Context, Sizes, StepFacts, Uncounted
from mimose.watch.size_table import SizeTable, round_up

_log = logging.getLogger(__name__)

_PATIENCE = 50
"""Steps in a row that were measured and not planned; then that is worth a warning."""


class Memory(NamedTuple):
    """What is held when a step begins, and what is known to come."""

    budget_bytes: float
    start_bytes: float
    released_bytes: float
    """Outputs of the last step that go before the backward."""
    optimizer_excess_bytes: float
    state_to_come_bytes: float = 0.0
    """Optimizer state that is made after this step, and is there from then on."""

    @property
    def with_state(self) -> Memory:
        """The same once that state is there: what plans are made for, to be used on."""
        start = self.start_bytes + self.state_to_come_bytes
        return self._replace(start_bytes=start, state_to_come_bytes=0.0)

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
        estimator: What has been learned.
        planner: Makes the plans.
        reserve: What is kept free between prediction and budget.
        round_to: How sizes are rounded up to buckets.
        cache_size: The most plans kept.
        raises: Whether a prediction that no plan keeps the budget is an error. It need
            not be where steps are observed: then everything is recomputed, and what
            that is seen to take decides.
    """

    def __init__(
        self,
        estimator: Estimator,
        planner: Planner,
        reserve: Reserve,
        round_to: int | Mapping[str, int],
        cache_size: int,
        *,
        raises: bool,
    ) -> None:
        self._estimator = estimator
        self._planner = planner
        self._round_to = round_to
        self.reserve = reserve
        self.cache = PlanCache(cache_size)
        self._raises = raises
        self._static_is_made = False
        self._n_doubted = 0
        self._has_warned = False
        self._knows_names = isinstance(round_to, int)

    def forget(self, context: Context) -> None:
        """Distrust a context whose steps turned out to run other events."""
        self._estimator.forget(context)
        self.reserve.forget(context)
        self.cache.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what steps have taught, ready for JSON; plans are made anew."""
        return self.reserve.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another policy was taught.

        Args:
            state: What ``state_dict`` returned.
        """
        self.reserve.load_state_dict(state)
        self.cache.clear()

    def cached(
        self, facts: StepFacts, table: SizeTable, memory: Memory
    ) -> Decision | None:
        """Return the decision for a shape whose cached plan fits today, else None."""
        memory = memory.with_state
        found = self.cache.get(
            self._key(facts, table), lambda plan: self._is_good(plan, memory)
        )
        if found is None or not self._estimator.touch(facts.context):
            return None
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
        key = self._key(facts, table)
        upper = facts._replace(sizes=key[2])
        if not self._estimator.touch(facts.context):
            self.reserve.forget(facts.context)
        doubt = self._estimator.doubt(upper)
        self._note_doubt(doubt)
        if doubt:
            is_known = self.reserve.knows(facts.context)
            phase: Phase = "fallback" if is_known else "collect"
            return Decision(phase, None, reason=doubt)
        self._make_static(upper, table, memory)
        share = self.reserve.stage_share(facts.context)
        ratio = self._estimator.stretch(facts) / (NOISY_STRETCH - 1.0)
        extrapolation_ratio = 1.0 if is_first else ratio
        try:
            made = self._make(upper, memory, share, extrapolation_ratio)
        except InfeasibleBudgetError as error:
            if self._raises:
                raise
            least = format_bytes(error.least_peak_bytes)
            reason = (
                f"no plan is predicted to keep the budget, the least peak is {least}"
            )
            return Decision("fallback", None, reason=reason)
        decision = self._decision(facts, made, memory, cache_hit=False)
        is_learning = self.reserve.is_learning(self._estimator.n_steps)
        is_learning = is_learning and not self._static_is_made  # it plans no more
        decision.is_measured = is_learning or ratio > 0.0
        if share < 1.0:
            decision.phase = "step_down"
        elif (
            not extrapolation_ratio
        ):  # once it was measured, there will be a better plan
            self.cache.put(key, made)
        return decision

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

    def absorb(
        self,
        facts: StepFacts,
        decision: Decision,
        observed_bytes: float | None,
        *,
        headroom_bytes: float,
        is_over: bool,
    ) -> None:
        """Take in how a planned step came out; a plan far off is not used again.

        Args:
            facts: The step's context and sizes.
            decision: With a prediction.
            observed_bytes: The growth; None where the meter tells no peak.
            headroom_bytes: What it might have grown by.
            is_over: Whether it passed the budget.
        """
        chosen = decision.chosen
        if chosen is None or decision.growth_bytes is None:
            return
        outcome = PredictedStep(
            context=facts.context,
            predicted_bytes=decision.raw_growth_bytes,
            observed_bytes=observed_bytes,
            headroom_bytes=headroom_bytes,
            scale_bytes=self._estimator.scale,
            n_measured=self._estimator.n_steps,
            keeps_some=KEEP in chosen.plan.actions,
            recomputes_some=not chosen.keeps_all,
            is_over=is_over,
        )
        if self.reserve.absorb(outcome):
            chosen.is_off = not decision.is_measured  # else the next one knows better

    def explain(
        self, facts: StepFacts, memory: Memory
    ) -> tuple[PlanningProblem, Plan, str]:
        """Return the exact problem of a shape, the plan it gets, and why.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        memory = memory.with_state
        problem = self.problem(facts, memory)
        doubt = self._estimator.doubt(facts)
        if doubt:
            return problem, safest_plan(problem), f"the safest plan, for {doubt}"
        tight = replace(problem, budget_bytes=self.reserve.usable_budget(memory))
        plan = self._plan(tight, memory)
        why = f"planner {plan.planner}" + (" (proved optimal)" if plan.optimal else "")
        above = self.reserve.bound.correction
        if above:
            why += f", predictions raised by {above:.1%} as recent steps were"
        return (
            problem,
            plan,
            f"{why}, with a margin of {self.reserve.bound.margin():.1%}",
        )

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
            optimizer_state_bytes=memory.state_to_come_bytes,
            step_excess_bytes=memory.optimizer_excess_bytes,
        )

    # ------------------------------------------------------------------ making plans

    def _is_good(self, cached: CachedPlan, memory: Memory) -> bool:
        """Whether a cached plan fits today, and leaves no more unused than it must."""
        if cached.is_off:
            return False
        growth = cached.growth.bytes(memory.released_bytes)
        if self.reserve.allowed_growth(growth) > memory.headroom_bytes:
            return False
        spare = memory.headroom_bytes - cached.headroom_bytes
        return cached.keeps_all or spare <= max(0.01 * growth, self.reserve.noise_bytes)

    def _make(
        self,
        facts: StepFacts,
        memory: Memory,
        share: float,
        extrapolation_ratio: float,
    ) -> CachedPlan:
        usable = self.reserve.usable_budget(memory, extrapolation_ratio)
        problem = self.problem(facts, memory, usable)
        if share < 1.0:
            problem = self._tightened(problem, share)
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
            noise = self.reserve.noise_bytes
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
        self._planner.plan(
            self.problem(longest, memory, self.reserve.usable_budget(memory))
        )
        self._static_is_made = True

    def _cached(
        self, facts: StepFacts, problem: PlanningProblem, plan: Plan, memory: Memory
    ) -> CachedPlan:
        pattern = self._estimator.pattern(facts.context)
        assert pattern is not None
        made = CachedPlan(
            plan,
            problem.events,
            actions_by_unit(pattern, plan.actions),
            pattern.calls,
            self._growth(facts, problem, plan.actions, memory),
            memory.headroom_bytes,
        )
        made.exact[facts.sizes] = self._exact(facts, plan, made.growth)
        return made

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
        n_events = len(actions)
        laid_out = lay_out(problem, choice)
        levels = laid_out.level_bytes - problem.start_bytes
        peaks = laid_out.peak_bytes_by_segment - problem.start_bytes
        for side in self._estimator.side_tensors(facts):
            if all(actions[reader] == KEEP for reader in side.readers):
                span = slice(
                    2 * side.readers[-1] + 2, 3 * n_events - side.readers[0] + 1
                )
                levels[span] -= side.n_bytes
                peaks[span] -= side.n_bytes
        copied = self._estimator.copies(facts)
        counted_twice = 0.0  # until the context ends: Note: [Copies]
        for index, (action, n_bytes) in enumerate(zip(actions, copied, strict=True)):
            if action == KEEP and n_bytes:
                counted_twice += n_bytes
                levels[2 * index + 2 : 2 * n_events + 1] -= n_bytes
                peaks[2 * index + 2 : 2 * n_events + 1] -= n_bytes
        head = self._estimator.head(facts, actions[-1] if actions else KEEP)
        start = levels[2 * n_events]
        before = [0.0, start + head.before_release_bytes, *peaks[: 2 * n_events]]
        # In the problem the release is part of the head. The optimizer's step is not
        # part of what is observed in a step.
        behind = peaks[2 * n_events + 1 : -1] + memory.released_bytes
        copies_gone = start + counted_twice + head.after_copies_bytes
        after = [start + head.after_release_bytes, copies_gone, *behind]
        return Growth(float(max(before)), float(max(after)))

    def _decision(
        self, facts: StepFacts, chosen: CachedPlan, memory: Memory, *, cache_hit: bool
    ) -> Decision:
        exact = chosen.exact.get(facts.sizes)
        if exact is None:
            problem = self.problem(facts, memory)
            growth = self._growth(facts, problem, chosen.plan.actions, memory)
            exact = chosen.exact[facts.sizes] = self._exact(facts, chosen.plan, growth)
        elif exact.uncounted:  # counted since, most likely
            exact = self._exact(facts, chosen.plan, exact.growth)
            chosen.exact[facts.sizes] = exact
        growth, flops, uncounted = exact
        raw = growth.bytes(memory.released_bytes)
        return Decision(
            "plan",
            chosen,
            self.reserve.bound.corrected(raw),
            raw,
            flops,
            uncounted,
            cache_hit,
        )

    def _exact(self, facts: StepFacts, plan: Plan, growth: Growth) -> ExactShape:
        flops, unknown = self._estimator.recomputed_flops(facts, plan.actions)
        return ExactShape(growth, flops, unknown)
