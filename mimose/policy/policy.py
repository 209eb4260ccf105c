"""Deciding what a step does: which phase, which plan, or the safest one."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mimose.budget import format_bytes
from mimose.cost.learner import Learner
from mimose.cost.model import CostModel
from mimose.cost.problem import (
    Memory,
    doubt,
    extrapolation_ratio,
    fill_problem,
    untold,
)
from mimose.exceptions import InfeasibleBudgetError
from mimose.inputs.sizes import Table
from mimose.planners import (
    OneShapePlanner,
    Plan,
    Planner,
    PlanningProblem,
    safest_plan,
)
from mimose.policy.decision import Decision
from mimose.policy.notices import Notices
from mimose.policy.plan_cache import CachedPlan
from mimose.policy.planning import Given, Order, PlanMaker, as_ran, at_sizes, imposed
from mimose.policy.plans import Plans, under
from mimose.policy.reserve import PredictedStep, Reserve
from mimose.policy.trying import Tries, trying, worth_trying
from mimose.predictors import REACH
from mimose.types import Context, Sizes, StepInput

_SPARE = 0.002
"""What is held may differ by so much of the headroom between now and a step to come."""
_MOST_WAITING = 2
"""Lessons; where more wait to be taken in, nothing is tried."""
_FEWEST_STEPS = 3
"""With fewer measured no fit is trusted: there is nothing to wait for."""


def _too_small(error: InfeasibleBudgetError, memory: Memory, margin: float) -> str:
    """Say what the least plan comes to, and what tensors may."""
    least, most = map(format_bytes, (error.least_peak_bytes, memory.budget_bytes))
    told = (
        f"no plan is predicted to keep the budget: the least peak is {least}, the "
        f"margin of {margin:.1%} left out, and tensors may hold {most}"
    )
    if memory.reserved_ratio == 1.0:
        return told
    ratio = f"{memory.reserved_ratio:.2f}"
    return f"{told}, as {ratio} bytes are reserved for each byte of growth"


class Policy:
    """Chooses a phase and a plan for each step.

    Args:
        learner: Holds what has been learned.
        planner: Makes the plans.
        reserve: What is kept free between prediction and budget.
        cache_size: The most plans kept.
        raises: Whether a prediction that no plan keeps the budget is an error. It need
            not be where steps are observed: then everything is recomputed, and what
            that is seen to take decides.
    """

    def __init__(
        self,
        learner: Learner,
        planner: Planner,
        reserve: Reserve,
        cache_size: int,
        *,
        raises: bool,
        refiner: Planner | None = None,
    ) -> None:
        self._learner = learner
        self._maker = PlanMaker(planner, reserve.noise_bytes)
        self.plans = Plans(learner, self._maker, cache_size, self._is_good, refiner)
        self.reserve = reserve
        self._raises = raises
        self._static_is_made = False
        self._notices = Notices()

    def forget(self, context: Context) -> None:
        """Distrust a context whose steps turned out to run other events."""
        self._learner.forget(context)
        self.reserve.forget(context)

    def as_ran(
        self,
        facts: StepInput,
        decision: Decision,
        calls: tuple[int, ...],
        part: int = 0,
    ) -> Decision | None:
        """Return a planned step's decision, now that it is known what has run.

        Where less ran than was planned for, predictions are made for what did. Where
        more ran, that is taken note of. Of several forwards before one backward each
        has to run what was planned: calls are counted on from one to the next, so that
        nobody can tell which a later one leaves out.

        Args:
            facts: The step's context and sizes.
            decision: With a plan.
            calls: How often each unit was called, up to the forward's end.
            part: Which forward of its window it is.

        Returns:
            None where more has run, or other layers.
        """
        chosen, model = decision.chosen, self._learner.model
        if chosen is None or calls == chosen.calls_until(part):
            return decision
        if chosen.between:
            self.forget(facts.context)
            return None
        facts = facts._replace(calls=calls)
        if any(map(operator.gt, calls, chosen.calls)):
            self._learner.miss(facts)
            return None
        if facts.context not in model.patterns:
            return replace(decision, growth_bytes=None)
        ran = as_ran(model, facts, chosen)
        why_not = doubt(model, facts)
        if chosen.version < model.valid_since or why_not:
            why_not = decision.reason or why_not
            return replace(decision, chosen=ran, growth_bytes=None, reason=why_not)
        memory = Memory(0.0, 0.0, decision.released_bytes, 0.0)
        told = self._decision(model, facts, ran, memory, cache_hit=decision.cache_hit)
        growth = None if decision.growth_bytes is None else told.growth_bytes
        return replace(
            decision,
            chosen=ran,
            growth_bytes=growth,
            raw_growth_bytes=told.raw_growth_bytes,
            flops=told.flops,
            uncounted=told.uncounted,
        )

    def distrust_plans(self) -> None:
        """Make every plan made so far invalid, as after a step over the budget."""
        self._learner.distrust_plans()

    def state_dict(self) -> dict[str, Any]:
        """Return what steps have taught, ready for JSON; plans are made anew."""
        return self.reserve.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another policy was taught.

        Args:
            state: What ``state_dict`` returned.
        """
        self.reserve.load_state_dict(state)
        self._learner.distrust_plans()

    def cached(
        self,
        facts: StepInput,
        table: Table,
        memory: Memory,
        ran: tuple[str, ...] = (),
    ) -> Decision | None:
        """Return the decision for a shape whose cached plan fits today, else None."""
        if memory.state_to_come_bytes:
            memory = memory.with_state
        key = self._key(facts, ran)
        found, model = self.plans.cached(key, memory), self._learner.model
        if found is None or found.version < model.valid_since:
            return None  # the latter, where a lesson was taken in just now
        if facts.context not in model.patterns:
            return None
        self._learner.use(facts.context)
        self._notices.doubted("")
        return self._decision(model, facts, found, memory, cache_hit=True)

    def decide(
        self,
        facts: StepInput,
        table: Table,
        memory: Memory,
        *,
        is_first: bool = False,
        ran: tuple[str, ...] = (),
    ) -> Decision:
        """Choose what a step of this shape does, whatever is cached.

        Args:
            facts: Its context and exact sizes.
            table: Names its sizes.
            memory: What is held, and the budget.
            is_first: Whether it is the process's first, which maps and imports things
                that stay: a plan, after what was learned elsewhere, leaves more free.
            ran: The actions of the events that have run already.

        Raises:
            InfeasibleBudgetError: A trusted prediction says that no plan fits, and
                predictions are all there is.
        """
        memory = memory.with_state
        key = self._key(facts, ran)
        ready = self.plans.ready(key, memory)
        if facts.context not in self._learner.model.patterns:
            ready = None
        if facts.context not in self._learner.model.patterns:
            self.reserve.forget(facts.context)
        is_known = self.reserve.knows(facts.context)
        if not is_known and self._learner.n_steps >= _FEWEST_STEPS:
            self._learner.worker.catch_up()  # there is nothing better to do
        model = self._learner.model
        if ready is not None and ready.version < model.valid_since:
            ready = None
        upper = facts._replace(sizes=key[2])
        self._learner.use(facts.context)
        why_not = "" if ready is not None else doubt(model, upper)
        if why_not and is_known:
            # A step that is measured takes longer than what waits to be learned.
            self._learner.worker.catch_up()
            model = self._learner.model
            why_not = doubt(model, upper)
        self._notices.doubted(why_not)
        if why_not:
            return Decision("fallback" if is_known else "collect", None, reason=why_not)
        self._show_first(upper, table, memory)
        share = self.reserve.stage_share(facts.context)
        beyond = extrapolation_ratio(model, facts) / (REACH - 1.0)
        ratio = 1.0 if is_first else beyond
        order = self._order(model, facts, upper, memory, share, ratio, ran)
        if ready is not None and share < 1.0:
            ready = None  # it goes all the way
        try:
            made = ready or self.plans.make(model, order)
        except InfeasibleBudgetError as error:
            if self._raises:
                raise
            reason = _too_small(error, memory, self.reserve.bound.margin())
            return Decision("fallback", None, reason=reason)
        self.plans.count(was_ready=ready is not None)
        # A planner that was shown its one problem makes no other plan of new samples.
        is_learning = self.reserve.is_learning(self._learner.n_steps)
        is_learning = is_learning and not self._static_is_made
        is_missing = model.patterns[facts.context].is_missing
        decision = replace(
            self._decision(model, facts, made, memory, cache_hit=False),
            phase="plan" if share == 1.0 else "step_down",
            is_measured=is_learning or is_missing or beyond > 0.0,
            cache_hit=ready is not None,
        )
        if share < 1.0:
            return decision
        tries: Tries = ()
        n_steps = self._learner.n_steps
        is_stale = self._learner.n_waiting > _MOST_WAITING  # it would try the same
        is_closed = is_stale or self._static_is_made or bool(ran)
        if self.reserve.is_open(n_steps) and not is_closed:
            tries = worth_trying(untold(model, upper), model.menu, made.plan)
        is_turn = not (decision.is_measured and n_steps % 2)
        tried = trying(model, facts, decision, tries) if is_turn else decision
        is_untold = any(tries) and decision.is_measured
        is_better_to_come = tried is not decision or is_untold
        if not (ratio or is_better_to_come or is_missing):
            self.plans.keep(key, made, order)
        return tried

    def imposed(
        self,
        facts: StepInput,
        decision: Decision,
        memory: Memory,
        actions: tuple[str, ...],
    ) -> Decision | None:
        """Return a decision with other actions, which other ranks asked for.

        Args:
            facts: What the plan is for.
            decision: This rank's own, with a plan.
            memory: What is held, and the budget.
            actions: One an event of that plan.

        Returns:
            None where what is known by now is of other events.
        """
        chosen, model, memory = decision.chosen, self._learner.model, memory.with_state
        if chosen is None or facts.context not in model.patterns:
            return None
        exact = facts._replace(calls=chosen.calls)
        upper = exact._replace(sizes=chosen.sizes)
        order = self._order(model, exact, upper, memory, 1.0, 0.0)
        made = imposed(self._maker, model, order, chosen, Given(actions))
        if made is None:
            return None
        told = self._decision(model, exact, made, memory, cache_hit=False)
        return replace(
            told,
            phase=decision.phase,
            cache_hit=decision.cache_hit,
            is_measured=decision.is_measured,
            reason=decision.reason,
        )

    def fits(self, decision: Decision, memory: Memory) -> bool:
        """Whether a planned decision is predicted to keep the budget.

        Args:
            decision: With a plan.
            memory: What is held, and the budget.
        """
        growth = self.reserve.allowed_growth(decision.raw_growth_bytes)
        return growth <= memory.with_state.headroom_bytes

    def least_peak_bytes(self, facts: StepInput, memory: Memory) -> float | None:
        """Return what a step is sure to reach under any plan; None if nothing is sure.

        The prediction of the safest plan, less the margin that predictions have.

        Args:
            facts: Its context and exact sizes.
            memory: What is held, as if it began now.
        """
        model, memory = self._learner.model, memory.with_state
        if doubt(model, facts) or model.varies(facts.context):  # it may run less
            return None
        least = safest_plan(fill_problem(model, facts, memory)).peak_bytes
        growth = (least - memory.start_bytes) * (1.0 - self.reserve.bound.margin())
        return memory.start_bytes + growth

    def prepare(self, facts: StepInput, table: Table, memory: Memory) -> bool:
        """Have a plan made for a step that is to come, if there is none for it.

        Args:
            facts: Its context and exact sizes.
            table: Names its sizes.
            memory: What is held as a step begins, and the budget.

        Returns:
            Whether there is one that fits.
        """
        memory = memory.with_state
        model, key = self._learner.model, self._key(facts, ())
        if self.plans.has(key, memory):
            return True
        is_staged = self.reserve.stage_share(facts.context) < 1.0
        if facts.context not in model.patterns or is_staged:
            return False
        upper = facts._replace(sizes=key[2])
        beyond = extrapolation_ratio(model, facts) / (REACH - 1.0)
        order = self._order(model, facts, upper, memory, 1.0, beyond)
        spare = max(self.reserve.noise_bytes, _SPARE * memory.headroom_bytes)
        self.plans.prepare(key, under(order, spare))
        return self.plans.has(key, memory)

    def _order(
        self,
        model: CostModel,
        facts: StepInput,
        upper: StepInput,
        memory: Memory,
        share: float,
        ratio: float,
        ran: tuple[str, ...] = (),
    ) -> Order:
        return Order(
            facts=upper,
            exact_sizes=facts.sizes,
            memory=memory,
            usable_bytes=self.reserve.usable_budget(memory, ratio),
            stage_share=share,
            after_version=model.version,
            ran=ran,
        )

    def _key(
        self, facts: StepInput, ran: tuple[str, ...]
    ) -> tuple[Context, bool, Sizes, tuple[str, ...]]:
        """Return what plans are cached by, and what has been done already."""
        return facts.context, facts.has_gradients, facts.sizes, ran

    def absorb(
        self,
        facts: StepInput,
        decision: Decision,
        observed_bytes: float | None,
        *,
        headroom_bytes: float,
        is_over: bool,
    ) -> None:
        """Take in how a planned step came out.

        Args:
            facts: The step's context and sizes.
            decision: With a prediction.
            observed_bytes: The growth; None where the meter tells no peak.
            headroom_bytes: What it might have grown by.
            is_over: Whether it passed the budget.
        """
        chosen, model = decision.chosen, self._learner.model
        if chosen is None or decision.growth_bytes is None:
            return
        step = PredictedStep(
            context=facts.context,
            predicted_bytes=decision.raw_growth_bytes,
            observed_bytes=observed_bytes,
            headroom_bytes=headroom_bytes,
            scale_bytes=model.scale,
            keeps_some=model.menu.first in chosen.plan.actions,
            is_over=is_over,
        )
        self.reserve.absorb(step)

    def explain(
        self, facts: StepInput, memory: Memory
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
        usable = self.reserve.usable_budget(memory)
        within = replace(problem, budget_bytes=usable)
        _, plan, _ = self._maker.filled(self._learner.model, facts, memory, within)
        why = f"planner {plan.planner}" + (" (proved optimal)" if plan.optimal else "")
        bound = self.reserve.bound
        if bound.correction:
            why += (
                f", predictions raised by {bound.correction:.1%} as recent steps were"
            )
        return problem, plan, f"{why}, with a margin of {bound.margin():.1%}"

    def problem(self, facts: StepInput, memory: Memory) -> PlanningProblem:
        """Fill the planning problem of exact sizes, nothing taken off the budget.

        Args:
            facts: The step's context and sizes.
            memory: What is held, and the budget.
        """
        return fill_problem(self._learner.model, facts, memory)

    # ------------------------------------------------------------------ making plans

    def _is_good(self, cached: CachedPlan, memory: Memory) -> bool:
        """Whether a cached plan fits today, and leaves no more unused than it must."""
        if cached.version < self._learner.model.valid_since:
            return False
        growth = cached.growth.bytes(memory.released_bytes)
        headroom = memory.headroom_bytes
        if self.reserve.allowed_growth(growth) > headroom:
            return False
        spare = headroom - cached.headroom_bytes
        return spare <= max(0.01 * growth, self.reserve.noise_bytes) or cached.keeps_all

    def _show_first(self, facts: StepInput, table: Table, memory: Memory) -> None:
        """Show a planner, whose one plan is for a shape of its own, that problem."""
        planner = self._maker.planner
        if self._static_is_made or not isinstance(planner, OneShapePlanner):
            return
        shape: object = planner.shape
        if not isinstance(shape, Mapping):
            return  # an attribute of that name, which means something else
        longest = facts._replace(sizes=table.fill(shape, facts.sizes))
        usable = self.reserve.usable_budget(memory)
        planner.plan(fill_problem(self._learner.model, longest, memory, usable))
        self._static_is_made = True

    def _decision(
        self,
        model: CostModel,
        facts: StepInput,
        chosen: CachedPlan,
        memory: Memory,
        *,
        cache_hit: bool,
    ) -> Decision:
        exact = at_sizes(model, facts, chosen, memory)
        raw = exact.growth.bytes(memory.released_bytes)
        corrected = self.reserve.bound.corrected(raw)
        known = chosen.decided.get(facts.sizes) if cache_hit else None
        if known is not None and known[0] is exact and isinstance(known[1], Decision):
            last = known[1]
            is_same = last.released_bytes == memory.released_bytes
            is_same = is_same and last.raw_growth_bytes == raw
            if is_same and last.growth_bytes == corrected:
                return last
        decision = Decision(
            "plan",
            chosen,
            corrected,
            raw,
            exact.flops,
            exact.uncounted,
            cache_hit,
            memory.released_bytes,
        )
        if cache_hit:
            chosen.decided[facts.sizes] = exact, decision
        return decision
