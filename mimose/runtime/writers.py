"""The writers: all that is learned of a step, learned once, when it has ended."""

from __future__ import annotations

import logging

from mimose.budget import format_bytes
from mimose.cost.learner import Learner
from mimose.cost.measured_step import ran_least
from mimose.memory.marks import without_readings
from mimose.memory.meters import Meter
from mimose.memory.optimizer import OptimizerWatch
from mimose.memory.wall import Footprint
from mimose.policy.policy import Policy
from mimose.records import Records
from mimose.runtime.outcome import Measurement, StepOutcome
from mimose.runtime.refusals import Refusals

_log = logging.getLogger(__name__)


class Writers:
    """Tells the cost model, the reserve and the records how each step came out.

    Args:
        learner: The cost model.
        policy: Keeps the reserve.
        footprint: What is held of the device.
        refusals: Remembers what steps needed at the least.
        optimizers: Knows what the optimizer holds.
        records: Takes the records.
        meter: Whether it reads peaks matters.
        plans: Whether plans are made; else nothing is learned.
    """

    def __init__(
        self,
        *,
        learner: Learner,
        policy: Policy,
        footprint: Footprint,
        refusals: Refusals,
        optimizers: OptimizerWatch,
        records: Records,
        meter: Meter,
        plans: bool,
    ) -> None:
        self._learner = learner
        self._policy = policy
        self._footprint = footprint
        self._refusals = refusals
        self._optimizers = optimizers
        self._records = records
        self._reads_peak = meter.reads_peak
        self.plans = plans

    def absorb(self, outcome: StepOutcome, *, has_ended: bool) -> None:
        """Take in a step.

        Args:
            outcome: How it came out.
            has_ended: Whether its backward has run to its end.
        """
        if has_ended and not outcome.is_shared:
            if outcome.measurement is not None:
                self._learn(outcome, outcome.measurement)
            self._observe(outcome)
        self._records.close(outcome.record)

    def take_back(self) -> None:
        """Forget what the last step has taught: it was only a part of one."""
        self._learner.take_back()

    def _learn(self, outcome: StepOutcome, read: Measurement) -> None:
        sample = read.sample
        if self._learner.n_steps == 0 or outcome.has_compiled:
            sample = without_readings(sample)
        growth = read.peak_bytes - outcome.record.start_bytes
        self._learner.absorb(
            outcome.facts,
            read.events,
            sample,
            outcome.released_bytes,
            outcome.calls,
            outcome.between,
            growth_bytes=self._growth_to_come(outcome, growth, read),
        )
        if self._reads_peak and ran_least(self._learner.model, read.events):
            state = float(self._optimizers.state_bytes)
            self._refusals.absorb(outcome, state)

    def _growth_to_come(
        self, outcome: StepOutcome, growth: int, read: Measurement
    ) -> float:
        """Return what a plan could grow by: all kept, or all the headroom."""
        first = self._learner.model.menu.first
        kept = sum(
            event.held_bytes[first] - event.held_bytes[event.action]
            for event in read.events
            if event.action != first and event.held_bytes
        )
        return max(growth, min(growth + kept, self._headroom_bytes(outcome)))

    def _headroom_bytes(self, outcome: StepOutcome) -> float:
        start = outcome.record.start_bytes
        return self._footprint.level_budget(start) - start

    def _observe(self, outcome: StepOutcome) -> None:
        """Let the footprint, and the reserve, know of a step's growth."""
        record, is_over = outcome.record, outcome.record.is_over
        observed = record.observed_growth_bytes
        if observed is not None:
            self._footprint.observe()
            if is_over and self.plans:
                self._note_over(outcome)
            if outcome.has_compiled:
                return
        self._policy.absorb(
            outcome.facts,
            outcome.decision,
            observed,
            headroom_bytes=self._headroom_bytes(outcome),
            is_over=is_over,
        )

    def _note_over(self, outcome: StepOutcome) -> None:
        record = outcome.record
        self._policy.distrust_plans()
        _log.warning(
            "mimose: step %d reached %s, over the budget of %s (phase %s, %s)",
            record.step,
            format_bytes(record.highest_bytes or 0),
            format_bytes(record.budget_bytes),
            record.phase,
            dict(record.shape),
        )
