"""Decides what a step does: its phase and its plan, within the budget. No torch.

The input is a step's input and what is held; the output is a `Decision`.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from cachetools import LRUCache

from mimose.budget import format_bytes
from mimose.cost.model import CostModel
from mimose.cost.problem import Memory, fill_problem
from mimose.cost.trust import extrapolation_ratio, unknown_actions, why_unknown
from mimose.exceptions import InfeasibleBudgetError
from mimose.planners.timeline import judge
from mimose.policy.decision import Decision, StepOutcome, without_plan
from mimose.policy.plans import CachedPlan, PlanKey, Plans, cached_plan
from mimose.policy.windows import OTHER_SIZES, OTHERS, Windows, begins, covers, joined
from mimose.types import MOST_CONTEXTS, Context, StepInput, without_rows
from mimose.worker import JobKind

_log = logging.getLogger(__name__)

_LARGER = f"{OTHER_SIZES}, and the step does not fit under the plan that its first has"

_STAGES = (0.35, 0.7)
"""The ramp-up: shares of the way from the safest plan to the whole budget. A step
checks each before a context is planned freely. If such a plan keeps nothing, the whole
way is checked: it keeps a few layers. If it keeps none, there is nothing to check."""
_ALIKE = 1.1
"""Bytes of an action for each of another one that holds about as much."""
_MEASURED_STEPS = 32
"""At most this many steps with new plans are measured within the measured sizes. As
many steps measure actions of which little is known. As many steps in a row without a
plan log a warning."""
_RIGHT_IN_A_ROW = 4
"""After this many right predictions of new plans in a row, new plans run without
measurement within the measured sizes, until one is not right. Of 80 steps of four
layers of BERT-large 16 are measured, not 32, with the same FLOPs and errors."""
_LEAST_GROWTH_SHARE = 0.5
"""Steps with less growth, as a share of the headroom, do not change the margin, because
their readings are mostly noise."""
_LARGEST_RIGHT_ERROR = 0.005
"""A prediction with a larger error is not right. If the step was measured, the plans
made until then become invalid, because the model has learned since."""


class Policy:
    """Chooses a phase and a plan for each step.

    Args:
        plans: Makes and caches plans from what was learned.
        raises: Whether it is an error if no plan is predicted to keep the budget. It is
            not if steps are observed: then the step recomputes everything, and its
            measured peak decides.

    Attributes:
        plans: The argument.
        learner: Holds what was learned.
        windows: Predicts which forwards make up a step.
        n_hits: Steps whose plan was in the cache.
        n_misses: Steps whose plan was not.
    """

    def __init__(self, plans: Plans, *, raises: bool) -> None:
        self.plans, self.learner = plans, plans.learner
        self._raises = raises
        self.windows = Windows()
        self._stages: LRUCache[Context, int] = LRUCache(MOST_CONTEXTS)
        """By context, how many stages of the ramp-up are passed."""
        self.n_hits = self.n_misses = 0
        self._n_tries = self._n_unplanned = self._n_right = 0
        self._last: PlanKey | None = None
        """The last step, without what varies between equal ones."""

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
            parts: The forwards of its window so far, this one last.
            memory: What was held when the first began, and the budget.
            before: What this method returned for the forward before it, if any.
            is_first: Whether it is the first forward of the process, which loads
                libraries that stay: a plan then leaves more free.

        Returns:
            The expected window, and the decision for all its forwards.

        Raises:
            InfeasibleBudgetError: No plan is predicted to fit, and steps are not
                observed.
        """
        if before is not None:
            whole, decision = before
            if decision.chosen is None or covers(whole, parts):
                return before
            return self._decide_larger(whole, joined(parts), decision, memory)
        step_input = self.windows.expected(parts[0])
        if isinstance(step_input, str):
            return parts[0], without_plan(step_input)
        found = self.plans.peek(step_input, memory)
        if found is None or step_input.context not in self.learner.model.patterns:
            self.n_misses += 1
            return step_input, self._plan(step_input, memory, is_first=is_first)
        if step_input.context != next(reversed(self.learner.model.patterns), None):
            self.learner.use(step_input.context)
        self.n_hits += 1
        return step_input, _decision(found, memory, cache_hit=True)

    def _decide_larger(
        self, whole: StepInput, own: StepInput, decision: Decision, memory: Memory
    ) -> tuple[StepInput, Decision]:
        """Go on with a window's plan if it fits its forwards as they are.

        Args:
            whole: The expected window.
            own: Its forwards so far, which are other or larger ones.
            decision: The decision, with a plan.
            memory: What was held when the window began, and the budget.
        """
        if decision.chosen is None or not begins(whole, own):
            return own, without_plan(OTHERS)
        whole = whole._replace(sizes=own.sizes + whole.sizes[len(own.sizes) :])
        reason = why_unknown(self.learner.model, whole)
        if not reason and decision.growth_bytes is not None:
            actions = decision.chosen.plan.actions
            found = self.imposed(whole, decision, memory, actions)
            most = self.plans.usable_bytes(whole, memory) - memory.start_bytes
            if found is not None and (found.growth_bytes or 0.0) <= most:
                return whole, found
            reason = _LARGER
        return own, without_plan(reason or OTHER_SIZES)

    def _plan(
        self, step_input: StepInput, memory: Memory, *, is_first: bool
    ) -> Decision:
        """Make a plan if the step can be predicted; else decide to measure it."""
        learner, plans, context = self.learner, self.plans, step_input.context
        is_measured = context in learner.model.patterns
        is_known = is_measured and without_rows(context) in self._stages
        model, why_not = learner.model, ""
        if is_known:
            why_not = why_unknown(model, step_input)
        if not is_known or why_not:
            learner.worker.catch_up()  # what it learns may allow a plan
            model = learner.model
            why_not = why_unknown(model, step_input)
        learner.use(context)
        self._note(why_not)
        if why_not:
            return without_plan(why_not, "fallback" if is_known else "collect")
        share = self._share(context)
        beyond = extrapolation_ratio(model, step_input)
        usable = plans.usable_bytes(step_input, memory, is_first=is_first)
        try:
            made = plans.make(step_input, memory, usable, share)
            if share < 1.0 and model.menu.first not in made.plan.actions:
                made = plans.make(step_input, memory, usable)  # it keeps a few, or none
                share = share if model.menu.first in made.plan.actions else 1.0
        except InfeasibleBudgetError as error:
            if self._raises:
                raise
            least = format_bytes(error.least_peak_bytes)
            reason = (
                f"no plan is predicted to keep the budget: the lowest peak is {least} "
                f"without the margin of {plans.margin.share:.1%}, and tensors may hold "
                f"{format_bytes(memory.budget_bytes)}"
            )
            growth = error.least_peak_bytes - memory.start_bytes
            failed = without_plan(reason, growth_bytes=growth)
            return self._tried_for_less(model, step_input, memory) or failed
        is_measured = beyond > 0.0 or not self._knows_enough
        decision = replace(_decision(made, memory), is_measured=is_measured)
        if share < 1.0:
            return replace(decision, phase="step_down")
        tried = self._tried(model, step_input, decision, made)
        if tried is not None:
            return tried
        if not (is_first or beyond > 0.0):
            plans.put(step_input, made)
        return decision

    def _tried(
        self,
        model: CostModel,
        step_input: StepInput,
        decision: Decision,
        made: CachedPlan,
    ) -> Decision | None:
        """Let a step try actions that are hardly measured; None if there are none.

        Layer calls that the plan keeps run under these actions in turn. They hold no
        more than keeping does, so the step keeps the budget, but it is not predicted.
        Lossy actions are not tried if everything can be kept.
        """
        menu, planned = model.menu, made.plan.actions
        if self._n_tries >= _MEASURED_STEPS or len(self.learner.lessons) > 1:
            return None
        is_exact = made.keeps_all
        actions, turns = list(planned), count()
        for at, unknown in enumerate(unknown_actions(model, step_input)):
            names = [n for n in unknown if not (is_exact and n in menu.lossy)]
            if names and planned[at] == menu.first:
                actions[at] = names[next(turns) % len(names)]
        names = [n for n in menu.names if n in set(actions) - set(planned)]
        if actions == list(planned):
            return None
        self._n_tries += 1
        by_layer = model.pattern(step_input).by_layer(actions, otherwise=menu.first)
        plan = replace(made.plan, actions=tuple(actions))
        return replace(
            decision,
            chosen=replace(made, plan=plan, by_layer=by_layer),
            is_measured=True,
            growth_bytes=None,
            reason=f"{', '.join(names)} tried in place of what would be kept",
        )

    def _tried_for_less(
        self, model: CostModel, step_input: StepInput, memory: Memory
    ) -> Decision | None:
        """Let a step try what may need less than the least action; None if nothing may.

        What drops as much, and rebuilds each tensor just before it is needed, has no
        higher peak than what rebuilds all at once. How much lower it is must be seen.
        """
        if self._n_tries >= _MEASURED_STEPS or len(self.learner.lessons) > 1:
            return None
        menu, problem = model.menu, fill_problem(model, step_input, memory)
        actions, more = [menu.least] * len(problem.calls), 0.0
        for at, unknown in enumerate(unknown_actions(model, step_input)):
            held = dict(zip(menu.names, problem.held_bytes[at], strict=True))
            for name in [n for n in unknown if menu.spec(n).rebuilds][-1:]:
                if held[name] <= _ALIKE * held[menu.least]:
                    more += max(0.0, held[name] - held[menu.least])
                    actions[at] = name
        least = judge(problem, problem.least_choice(), planner="tried")
        room = memory.headroom_bytes * memory.reserved_ratio
        if {*actions} == {menu.least} or least.growth_bytes + more > room:
            return None
        self._n_tries += 1
        plan = judge(problem, problem.choice_of(actions), planner="tried")
        decision = _decision(
            cached_plan(model, step_input, memory, problem, plan), memory
        )
        names = ", ".join(sorted({*actions} - {menu.least}))
        return replace(
            decision,
            is_measured=True,
            growth_bytes=None,
            reason=f"{names} tried in place of what would be recomputed",
        )

    def prepare(self, step_input: StepInput, memory: Memory) -> None:
        """Have the worker thread make a plan for an expected step.

        Args:
            step_input: Its context and sizes.
            memory: What is held as a step begins, and the budget.
        """
        model, context = self.learner.model, step_input.context
        if context not in model.patterns or not self._knows_enough:
            return
        if self._share(context) < 1.0 or extrapolation_ratio(model, step_input) > 0.0:
            return  # its step will be measured
        if self.plans.peek(step_input, memory) is None:
            ahead = partial(self.plans.make_ahead, step_input, memory)
            self.learner.worker.submit(JobKind.PLAN, step_input[:3], ahead)

    def imposed(
        self,
        step_input: StepInput,
        decision: Decision,
        memory: Memory,
        actions: tuple[str, ...],
    ) -> Decision | None:
        """Return a decision with the actions on which ranks have agreed.

        Args:
            step_input: The step of the plan.
            decision: This rank's own decision, with a plan.
            memory: What is held, and the budget.
            actions: The action of each layer call of that plan.

        Returns:
            None if the cost model now has other layer calls.
        """
        chosen, model = decision.chosen, self.learner.model
        if chosen is None or step_input.context not in model.patterns:
            return None
        problem = fill_problem(model, step_input, memory)
        if problem.calls != chosen.calls:
            return None
        choice = np.array([problem.actions.index(a) for a in actions], dtype=np.intp)
        plan = judge(problem, choice, planner="agreed")
        made = cached_plan(model, step_input, memory, problem, plan)
        growth = made.growth.bytes(memory.released_bytes)
        return replace(decision, chosen=made, growth_bytes=growth)

    @property
    def _knows_enough(self) -> bool:
        """Whether new plans within the measured sizes run without measurement."""
        return (
            self._n_right >= _RIGHT_IN_A_ROW or self.learner.n_steps >= _MEASURED_STEPS
        )

    def as_ran(
        self,
        step_input: StepInput,
        decision: Decision,
        counts: tuple[int, ...],
        part: int = 0,
    ) -> Decision | None:
        """Return a planned forward's decision, adjusted to the layers that have run.

        If fewer layer calls ran than planned, the prediction is withdrawn. If more ran,
        that is recorded. In a window of several forwards each must run exactly what was
        planned: calls are counted over the whole window, so it is not known which calls
        a later forward leaves out.

        Args:
            step_input: The window's context and sizes.
            decision: The decision, with a plan.
            counts: How often each layer was called, up to the end of the forward.
            part: The index of the forward in its window.

        Returns:
            None if more layer calls or other layers have run.
        """
        chosen, model = decision.chosen, self.learner.model
        if chosen is None or counts == chosen.counts_until(part):
            return decision
        if chosen.between:
            self.forget(step_input.context)
            return None
        step_input = step_input._replace(counts=counts)
        if any(map(operator.gt, counts, chosen.counts)):
            self.learner.miss(step_input)
            return None
        if step_input.context not in model.patterns:
            return replace(decision, growth_bytes=None)
        names = {call.name for call in model.pattern(step_input).calls}
        ran = [at for at, name in enumerate(chosen.calls) if name in names]
        flops = tuple(chosen.flops[at] for at in ran)
        plan = replace(
            chosen.plan, actions=tuple(chosen.plan.actions[at] for at in ran)
        )
        calls = tuple(chosen.calls[at] for at in ran)
        ran_as = replace(chosen, plan=plan, calls=calls, counts=counts, flops=flops)
        return replace(decision, chosen=ran_as, growth_bytes=None)

    def absorb(self, outcome: StepOutcome) -> None:
        """Learn from the outcome of a step, or of another backward through it."""
        decision, peaks = outcome.decision, outcome.peaks
        chosen, predicted = decision.chosen, decision.growth_bytes
        is_baseline = chosen is None and not decision.is_measured
        if is_baseline or outcome.ended == "unclear":
            return
        is_again = outcome.ended == "again"
        self.windows.absorb(outcome.parts, 2 if is_again else 1)
        last, self._last = self._last, outcome.step_input[:3]
        if not outcome.is_one:
            return
        if is_again:
            self.learner.take_back()
            return
        is_over = peaks is not None and outcome.is_over
        if is_over:
            self.learner.distrust_plans()
        if chosen is None:
            return
        is_repeated = decision.cache_hit and last == self._last
        if is_repeated and peaks is not None and peaks.n_retries:
            # All blocks were there, so it was gaps for which they were freed.
            self.plans.lacked_room(outcome.step_input, outcome.memory, gives_up=True)
        is_within = not is_over
        if predicted is not None and peaks is not None:
            observed = peaks.level_bytes - int(outcome.memory.start_bytes)
            is_within = observed <= self.plans.margin.allowed(predicted)
            if is_over or predicted >= _LEAST_GROWTH_SHARE * outcome.headroom_bytes:
                self.plans.margin.observe(predicted, observed)
            is_off = abs(observed - predicted) > _LARGEST_RIGHT_ERROR * predicted
            if is_off:
                self._n_right = 0
            elif not decision.cache_hit:
                self._n_right += 1
            if decision.is_measured and is_off:
                self.learner.distrust_plans()  # it has just learned better
        # It goes on to the next stage, if this one was checked; the oldest contexts go.
        checked = without_rows(outcome.step_input.context)
        stage = self._stages.get(checked, 0)
        if stage < len(_STAGES) and is_within:
            stage += self.learner.model.menu.first in chosen.plan.actions
        self._stages[checked] = stage

    def forget(self, context: Context) -> None:
        """Forget a context whose steps have run other layers than expected."""
        self.learner.forget(context)
        self._stages.pop(without_rows(context), None)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned as plain JSON data, without plans."""
        return {
            "stages": dict(self._stages),
            "margin": self.plans.margin.state_dict(),
            "windows": self.windows.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what was learned.

        Args:
            state: What ``state_dict`` returned.
        """
        self._stages.clear()
        self._stages.update(state["stages"])
        if "margin" in state:  # a rehearsal leaves it to the card
            self.plans.margin.load_state_dict(state["margin"])
        self.windows.load_state_dict(state["windows"])
        self._n_right = 0
        self.plans.forget_shares()
        self.learner.distrust_plans()

    def _share(self, context: Context) -> float:
        """Return the share of the way to the whole budget that a plan may use."""
        stage = self._stages.get(without_rows(context), 0)
        return _STAGES[stage] if stage < len(_STAGES) else 1.0

    def _note(self, why_not: str) -> None:
        """Count steps without a plan, and warn after many in a row."""
        self._n_unplanned = self._n_unplanned + 1 if why_not else 0
        if self._n_unplanned == _MEASURED_STEPS:
            _log.warning(
                "mimose: the last %d steps all recomputed everything, because no plan "
                "can be made; the last reason: %s. If the model's arguments differ in "
                "more than their sizes (texts, identifiers, numbers of tensors), "
                "remove what differs. If nothing helps, planner='full' recomputes "
                "everything without the cost of measuring.",
                _MEASURED_STEPS,
                why_not,
            )


def _decision(made: CachedPlan, memory: Memory, *, cache_hit: bool = False) -> Decision:
    growth = made.growth.bytes(memory.released_bytes)
    return Decision("plan", made, growth, cache_hit)
