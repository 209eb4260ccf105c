"""Deciding what a step does: which phase, which plan, or the safest one."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
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
from mimose.planners import Plan, Planner, PlanningProblem, safest_plan
from mimose.policy.least_peaks import LeastPeaks
from mimose.policy.plans import CachedPlan, Decision, Plans
from mimose.policy.windows import OTHERS, Windows, covers, joined
from mimose.predictors import REACH, SafetyMargin
from mimose.records import TRIED
from mimose.types import MOST_CONTEXTS, Context, StepInput

_log = logging.getLogger(__name__)

_STAGES = (0.35, 0.7)
"""Shares of the way from the safest plan to the whole budget, each checked by a step
before a context is planned freely."""
_MEASURED_STEPS = 32
"""So many steps are measured, if their shape is new, under a plan or not."""
_MOST_TRIES = 32
"""Steps that show actions of which little is known."""
_LARGE = 0.5
"""Steps that grow by less of the headroom teach the margin nothing: noise is all."""
_OFF = 0.005
"""A prediction that a measured step showed to be off by more was of a model that has
learned better since: the plans made until then are made again."""
_PATIENCE = 50
"""Steps in a row that were measured and not planned; then that is worth a warning."""


class Policy:
    """Chooses a phase and a plan for each step.

    Args:
        learner: Holds what has been learned.
        planner: Makes the plans.
        noise_bytes: By so much a reading of the meter means nothing.
        cache_size: The most plans kept.
        raises: Whether a prediction that no plan keeps the budget is an error. It need
            not be where steps are observed: then everything is recomputed, and what
            that is seen to take decides.
        refiner: Makes better plans beside training; None for none.

    Attributes:
        margin: What is kept free between a prediction and the budget.
        plans: Those in use.
        windows: Which forwards make up a step.
        least_peaks: What steps with everything recomputed needed.
    """

    def __init__(
        self,
        learner: Learner,
        planner: Planner,
        noise_bytes: float,
        cache_size: int,
        *,
        raises: bool,
        refiner: Planner | None = None,
    ) -> None:
        self._learner = learner
        self._raises = raises
        self.margin = SafetyMargin(noise_bytes=5.0 * noise_bytes)
        self.plans = Plans(learner, planner, self.margin, cache_size, refiner)
        self.windows = Windows()
        self.least_peaks = LeastPeaks()
        self._stages: dict[Context, int] = {}
        """By context, how many of the stages are passed; none where no plan ran."""
        self._n_tries = 0
        self._n_unplanned = 0

    # ------------------------------------------------------------------ before a step

    def decide(
        self,
        parts: Sequence[StepInput],
        memory: Memory,
        before: tuple[StepInput, Decision] | None = None,
        *,
        is_first: bool = False,
    ) -> tuple[StepInput, Decision]:
        """Choose what a forward does: Note: [Windows].

        Args:
            parts: The forwards of its window so far, it the last.
            memory: What was held when the first began, and the budget.
            before: What this returned for the forward before it, if there is one.
            is_first: Whether it is the process's first, which maps and imports things
                that stay: a plan, after what was learned elsewhere, leaves more free.

        Returns:
            The window that is expected, and what all its forwards do.

        Raises:
            InfeasibleBudgetError: A trusted prediction says that no plan fits, and
                predictions are all there is.
        """
        if before is not None:
            whole, decision = before
            if decision.chosen is None or covers(whole, parts):
                return before
            return joined(parts), Decision("fallback", None, reason=OTHERS)
        facts = parts[0]
        if facts.context in self.windows.seen:
            expected = self.windows.expected(facts)
            if isinstance(expected, str):
                return facts, Decision("fallback", None, reason=expected)
            facts = expected
        found = self.plans.get(facts, memory)
        if found is None or facts.context not in self._learner.model.patterns:
            return facts, self._plan(facts, memory, is_first=is_first)
        self._learner.use(facts.context)
        known = found.decided.get(memory.released_bytes)
        if known is None:
            known = _decision(found, memory, cache_hit=True)
            found.decided.clear()
            found.decided[memory.released_bytes] = known
        return facts, known

    def _plan(self, facts: StepInput, memory: Memory, *, is_first: bool) -> Decision:
        """Make a plan where the costs are known well enough."""
        learner, context = self._learner, facts.context
        if context not in learner.model.patterns:
            self._stages.pop(context, None)
        is_known = context in self._stages
        if not is_known or doubt(learner.model, facts):
            learner.worker.catch_up()  # there is nothing better to do
        model = learner.model
        learner.use(context)
        why_not = doubt(model, facts)
        self._note(why_not)
        if why_not:
            return Decision("fallback" if is_known else "collect", None, reason=why_not)
        share = self._share(context)
        beyond = extrapolation_ratio(model, facts) / (REACH - 1.0)
        usable = self._usable(memory, 1.0 if is_first else beyond)
        try:
            made = self.plans.make(facts, memory, usable, share)
        except InfeasibleBudgetError as error:
            if self._raises:
                raise
            reason = self._too_small(error, memory)
            return Decision("fallback", None, reason=reason)
        is_new = learner.n_steps < _MEASURED_STEPS or beyond > 0.0
        decision = replace(_decision(made, memory), is_measured=is_new)
        if share < 1.0:
            return replace(decision, phase="step_down")
        tried = self._tried(model, facts, decision, made)
        if tried is not None:
            return tried
        if not (is_first or beyond > 0.0):
            self.plans.keep(facts, made, memory, usable)
        return decision

    def _tried(
        self, model: CostModel, facts: StepInput, decision: Decision, made: CachedPlan
    ) -> Decision | None:
        """Have a step show actions of which little is known; None where none is.

        Layer calls that the plan keeps run under them by turns. They hold no more than
        what they stand in for, so the budget is kept; but nothing is predicted of such
        a step. Lossy actions are not tried where all can be kept.
        """
        menu, planned = model.menu, made.plan.actions
        if self._n_tries >= _MOST_TRIES or self._learner.n_waiting > 1:
            return None
        is_exact = made.keeps_all
        actions, turns = list(planned), count()
        for at, unknown in enumerate(untold(model, facts)):
            names = [n for n in unknown if not (is_exact and n in menu.lossy)]
            if names and planned[at] == menu.first:
                actions[at] = names[next(turns) % len(names)]
        names = [n for n in menu.names if n in set(actions) - set(planned)]
        if actions == list(planned):
            return None
        self._n_tries += 1
        by_unit = model.pattern(facts).by_unit(actions, otherwise=menu.first)
        plan = replace(made.plan, actions=tuple(actions))
        return replace(
            decision,
            chosen=replace(made, plan=plan, by_unit=by_unit),
            is_measured=True,
            growth_bytes=None,
            reason=f"{', '.join(names)} {TRIED}",
        )

    def prepare(self, facts: StepInput, memory: Memory) -> None:
        """Have a plan made beside training for a step that is to come.

        Args:
            facts: Its context and sizes.
            memory: What is held as a step begins, and the budget.
        """
        model, context = self._learner.model, facts.context
        if self._learner.n_steps < _MEASURED_STEPS or self._share(context) < 1.0:
            return  # its step is to be measured
        if context in model.patterns and extrapolation_ratio(model, facts) <= 0.0:
            self.plans.prepare(facts, memory)

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
            actions: One a layer call of that plan.

        Returns:
            None where what is known by now is of other layer calls.
        """
        chosen, model = decision.chosen, self._learner.model
        if chosen is None or facts.context not in model.patterns:
            return None
        names = tuple(event.name for event in model.pattern(facts).events)
        if names != chosen.events:
            return None
        made = _decision(self.plans.imposed(facts, memory, actions), memory)
        return replace(
            decision,
            chosen=made.chosen,
            growth_bytes=made.growth_bytes,
            flops=made.flops,
        )

    # ------------------------------------------------------------------ after a step

    def as_ran(
        self,
        facts: StepInput,
        decision: Decision,
        calls: tuple[int, ...],
        part: int = 0,
    ) -> Decision | None:
        """Return a planned forward's decision, now that it is known what has run.

        Where less ran than was planned for, nothing is predicted. Where more ran, that
        is taken note of. Of several forwards before one backward each has to run what
        was planned: calls are counted on from one to the next, so that nobody can tell
        which a later one leaves out.

        Args:
            facts: The window's context and sizes.
            decision: With a plan.
            calls: How often each layer was called, up to the forward's end.
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
        names = {event.name for event in model.pattern(facts).events}
        ran = [at for at, name in enumerate(chosen.events) if name in names]
        flops = tuple(decision.flops[at] for at in ran)
        plan = replace(
            chosen.plan, actions=tuple(chosen.plan.actions[at] for at in ran)
        )
        events = tuple(chosen.events[at] for at in ran)
        ran_as = replace(chosen, plan=plan, events=events, calls=calls, flops=flops)
        return replace(decision, chosen=ran_as, growth_bytes=None, flops=flops)

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
        chosen, predicted = decision.chosen, decision.growth_bytes
        if chosen is None:
            return
        is_within = not is_over
        if predicted is not None and observed_bytes is not None:
            is_within = observed_bytes <= self.margin.allowed(predicted)
            if is_over or predicted >= _LARGE * headroom_bytes:
                self.margin.observe(predicted, observed_bytes)
            if decision.is_measured and abs(observed_bytes / predicted - 1) > _OFF:
                self.distrust_plans()  # the model has just learned better
        self._pass_stage(facts.context, chosen, is_within=is_within)

    def _pass_stage(
        self, context: Context, chosen: CachedPlan, *, is_within: bool
    ) -> None:
        """Go on to the next stage, if it was checked; the oldest contexts go."""
        stage = self._stages.pop(context, 0)
        if stage < len(_STAGES) and is_within:
            stage += self._learner.model.menu.first in chosen.plan.actions
        self._stages[context] = stage
        if len(self._stages) > MOST_CONTEXTS:
            del self._stages[next(iter(self._stages))]

    def forget(self, context: Context) -> None:
        """Distrust a context whose steps turned out to run other layers."""
        self._learner.forget(context)
        self._stages.pop(context, None)

    def distrust_plans(self) -> None:
        """Make every plan made so far invalid, as after a step over the budget."""
        self._learner.distrust_plans()

    # ------------------------------------------------------------------ telling

    def least_peak_bytes(self, facts: StepInput, memory: Memory) -> float | None:
        """Return what a step is sure to reach under any plan; None if nothing is sure.

        The prediction of the safest plan, less the margin that predictions have.

        Args:
            facts: Its context and exact sizes.
            memory: What is held, as if it began now.
        """
        model = self._learner.model
        if doubt(model, facts) or model.varies(facts.context):  # it may run less
            return None
        least = safest_plan(fill_problem(model, facts, memory)).peak_bytes
        growth = (least - memory.start_bytes) * (1.0 - self.margin.share)
        return memory.start_bytes + growth

    def explain(
        self, facts: StepInput, memory: Memory
    ) -> tuple[PlanningProblem, Plan, str]:
        """Return the exact problem of a shape, the plan it gets, and why.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        model, problem = self._learner.model, self.problem(facts, memory)
        why_not = doubt(model, facts)
        if why_not:
            return problem, safest_plan(problem), f"the safest plan, for {why_not}"
        plan = self.plans.make(facts, memory, self._usable(memory)).plan
        why = f"planner {plan.planner}" + (" (proved optimal)" if plan.optimal else "")
        return problem, plan, f"{why}, with a margin of {self.margin.share:.1%}"

    def problem(self, facts: StepInput, memory: Memory) -> PlanningProblem:
        """Fill the planning problem of exact sizes, nothing taken off the budget.

        Args:
            facts: The step's context and sizes.
            memory: What is held, and the budget.
        """
        return fill_problem(self._learner.model, facts, memory)

    def state_dict(self) -> dict[str, Any]:
        """Return what steps have taught, ready for JSON; plans are made anew."""
        return {
            "stages": dict(self._stages),
            "margin": self.margin.state_dict(),
            "windows": self.windows.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another policy was taught.

        Args:
            state: What ``state_dict`` returned.
        """
        self._stages = {str(key): int(stage) for key, stage in state["stages"].items()}
        self.margin.load_state_dict(state["margin"])
        self.windows.load_state_dict(state["windows"])
        self._learner.distrust_plans()

    # ------------------------------------------------------------------ the margin

    def _share(self, context: Context) -> float:
        """Return the share of the way to the whole budget that a plan may go."""
        stage = self._stages.get(context, 0)
        return _STAGES[stage] if stage < len(_STAGES) else 1.0

    def _usable(self, memory: Memory, beyond: float = 0.0) -> float:
        """Return the level that predictions may reach.

        Args:
            memory: What is held, and the budget.
            beyond: How far beyond the sizes measured the step lies, as a share of how
                far a fit is trusted.
        """
        return memory.start_bytes + self.margin.largest(memory.headroom_bytes, beyond)

    def _too_small(self, error: InfeasibleBudgetError, memory: Memory) -> str:
        """Say what the least plan comes to, and what tensors may."""
        least, most = map(format_bytes, (error.least_peak_bytes, memory.budget_bytes))
        margin = f"{self.margin.share:.1%}"
        told = (
            f"no plan is predicted to keep the budget: the least peak is {least}, the "
            f"margin of {margin} left out, and tensors may hold {most}"
        )
        if memory.reserved_ratio == 1.0:
            return told
        ratio = f"{memory.reserved_ratio:.2f}"
        return f"{told}, as {ratio} bytes are reserved for each byte of growth"

    def _note(self, why_not: str) -> None:
        """Count steps without a plan, and warn once where there is no end of them."""
        self._n_unplanned = self._n_unplanned + 1 if why_not else 0
        if self._n_unplanned == _PATIENCE:
            _log.warning(
                "mimose: the last %d steps were all measured, with everything "
                "recomputed, and none was planned; the last reason: %s. Where inputs "
                "differ in more than their sizes (texts, identifiers, numbers of "
                "tensors), keep that out of the model's arguments. Where nothing "
                "helps, planner='full' recomputes everything without measuring.",
                _PATIENCE,
                why_not,
            )


def _decision(made: CachedPlan, memory: Memory, *, cache_hit: bool = False) -> Decision:
    return Decision(
        "plan",
        made,
        made.growth.bytes(memory.released_bytes),
        made.flops,
        cache_hit,
    )
