"""Gives the outcomes of steps to all that learns from them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from mimose.budget import format_bytes
from mimose.cost.measured import MeasuredStep, ran_least
from mimose.inputs.describe import Describer
from mimose.measure.gauges import Gauges
from mimose.measure.samples import without_readings
from mimose.planners import Menu
from mimose.policy.decision import StepOutcome
from mimose.policy.policy import Policy
from mimose.records import Records, StepRecord
from mimose.runtime.budget import SessionBudget
from mimose.runtime.seconds import Mark, StepSeconds

_log = logging.getLogger(__name__)


class Learning:
    """Has all learn from each outcome: records, seconds, cost model, budget, policy.

    Args:
        records: Takes the records.
        seconds: Learns what steps take.
        policy: Learns how far predictions were off; its learner, from measurements.
        budget: Learns what the least plans need.
        gauges: Learns which calls hold the same.
        describer: Learns whether masks matter.

    Attributes:
        menu: The actions in use.
        mark: Returns this moment, as `StepOutcome.began` has it.
    """

    def __init__(
        self,
        records: Records,
        seconds: StepSeconds,
        policy: Policy,
        budget: SessionBudget,
        gauges: Gauges,
        describer: Describer,
    ) -> None:
        self._records, self._seconds = records, seconds
        self._policy, self._budget = policy, budget
        self._gauges, self._describer = gauges, describer
        self.menu: Menu = policy.learner.model.menu
        self.mark: Callable[[], Mark] = seconds.mark
        self._n_over = 0
        """Number of steps over their budget."""
        self._has_planned = not budget.plans
        """Whether a step had a plan. The first one gets a line in the log."""

    def absorb(self, outcome: StepOutcome) -> None:
        """Learn from a step that has ended, or has had another backward."""
        actions: list[str] = []
        n_retries = 0
        for record in outcome.records:
            self._records.close(record)
            actions += record.actions
            n_retries += record.retries
        if outcome.ended == "once":
            if outcome.began is not None and not n_retries:
                self._seconds.step_ended(outcome.began, outcome.step_input, actions)
            if outcome.is_one:
                is_least = False
                if outcome.measured is not None:
                    is_least = self._teach(outcome.measured)
                if outcome.peaks is not None:
                    self._budget.observe(outcome, outcome.peaks, is_least=is_least)
                    self._say_over(record)
                if not self._has_planned:
                    self._say_planned(record)
        self._policy.absorb(outcome)

    def _say_planned(self, record: StepRecord) -> None:
        if record.phase == "plan":
            self._has_planned = True
            _log.info(
                "mimose: first plan, in step %d: %d of %d layer calls are recomputed "
                "(%s)",
                record.step,
                record.n_recomputed,
                len(record.actions),
                dict(record.shape),
            )

    def _say_over(self, record: StepRecord) -> None:
        if not (record.is_over and self._budget.plans):
            return
        self._n_over += 1
        if self._n_over & (self._n_over - 1):
            return  # the 1st, 2nd, 4th, 8th … get a line
        reached = format_bytes(record.highest_bytes or 0)
        is_least = 0 < len(record.actions) == record.n_recomputed
        _log.warning(
            "mimose: step %d reached %s, over the budget of %s (phase %s, %s; steps "
            "over so far: %d)%s",
            record.step,
            reached,
            format_bytes(record.budget_bytes),
            record.phase,
            dict(record.shape),
            self._n_over,
            f". Everything was recomputed: such a step needs a budget of {reached}"
            if is_least
            else "",
        )

    def _teach(self, step: MeasuredStep) -> bool:
        """Let the cost model learn; return whether the step ran the least plan."""
        calls, learner = step.calls, self._policy.learner
        if learner.n_steps == 0:
            step = replace(step, sample=without_readings(step.sample))
        known = learner.model.patterns.get(step.step_input.context)
        families = {e.place: e.family for e in known.calls} if known is not None else {}
        ran = {(call.layer, call.number): call.family for call in calls}
        if [*families] == [*ran] and families != ran:
            self._describer.wait_for_masks()
        self._gauges.split_families(
            [e for e in calls if e.held_bytes and self.menu.spec(e.action).recomputes]
        )
        learner.absorb(step)
        return ran_least(learner.model, calls)
