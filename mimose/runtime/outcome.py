"""How a step came out: plain data, made once, and who learns of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mimose.budget import format_bytes
from mimose.cost.learner import Learner
from mimose.cost.measured import ran_least
from mimose.memory.marks import without_readings
from mimose.memory.meters import Meter
from mimose.memory.optimizer import OptimizerWatch
from mimose.memory.wall import Footprint
from mimose.policy.plans import Decision
from mimose.policy.policy import Policy
from mimose.records import Records, StepRecord
from mimose.types import Measured, StepInput, StepSample

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """All that the cost model, the policy and the records are told of a step."""

    facts: StepInput
    """What was known before it ran."""
    decision: Decision
    """What it was to do."""
    records: tuple[StepRecord, ...]
    """One a forward."""
    events: tuple[Measured, ...]
    """What was read of each layer call, in the order in which they ran."""
    sample: StepSample | None
    """What was read of all segments; None where nothing was, or not of one step."""
    peak_bytes: int
    """The highest level."""
    calls: tuple[int, ...]
    """How often each layer was called."""
    between: tuple[tuple[int, ...], ...]
    """The same where each forward but the last has ended."""
    released_bytes: float
    """Outputs of an earlier step that went before the first gradient."""
    is_shared: bool
    """Whether forwards ran before its backward that were no part of it."""


class Writers:
    """Tells the cost model, the policy and the records how each step came out.

    Nobody else changes what is known.

    Args:
        learner: The cost model.
        policy: Keeps the margin.
        footprint: What is held of the device.
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
        optimizers: OptimizerWatch,
        records: Records,
        meter: Meter,
        plans: bool,
    ) -> None:
        self._learner = learner
        self._policy = policy
        self._footprint = footprint
        self._optimizers = optimizers
        self.records = records
        self._reads_peak = meter.reads_peak
        self.plans = plans

    def absorb(self, outcome: StepOutcome) -> None:
        """Take in a step whose backward has run to its end."""
        if not outcome.is_shared:
            if outcome.sample is not None:
                self._learn(outcome, outcome.sample)
            self._observe(outcome)
        for record in outcome.records:
            self.records.close(record)

    def take_back(self) -> None:
        """Forget what the last step has taught: it was only a part of one."""
        self._learner.take_back()

    def _learn(self, outcome: StepOutcome, sample: StepSample) -> None:
        events, model = outcome.events, self._learner.model
        if self._learner.n_steps == 0:
            sample = without_readings(sample)
        start = outcome.records[-1].start_bytes
        growth = outcome.peak_bytes - start
        # What a plan could grow by: all kept, or all the headroom.
        kept = sum(
            event.held_bytes[model.menu.first] - event.held_bytes[event.action]
            for event in events
            if event.action != model.menu.first and event.held_bytes
        )
        headroom = self._footprint.level_budget(start) - start
        self._learner.absorb(
            outcome.facts,
            events,
            sample,
            outcome.released_bytes,
            outcome.calls,
            outcome.between,
            growth_bytes=max(growth, min(growth + kept, headroom)),
        )
        if self._reads_peak and ran_least(self._learner.model, events):
            self._policy.least_peaks.add(
                outcome.facts,
                outcome.peak_bytes,
                max(0, growth),
                float(self._optimizers.state_bytes),
            )

    def _observe(self, outcome: StepOutcome) -> None:
        """Let the footprint, and the policy, know of a step's growth."""
        record = outcome.records[-1]
        is_over, growth = record.is_over, record.observed_growth_bytes
        if growth is not None:
            self._footprint.observe()
            if is_over and self.plans:
                self._note_over(record)
        start = record.start_bytes
        self._policy.absorb(
            outcome.facts,
            outcome.decision,
            growth,
            headroom_bytes=self._footprint.level_budget(start) - start,
            is_over=is_over,
        )

    def _note_over(self, record: StepRecord) -> None:
        self._policy.distrust_plans()
        _log.warning(
            "mimose: step %d reached %s, over the budget of %s (phase %s, %s)",
            record.step,
            format_bytes(record.highest_bytes or 0),
            format_bytes(record.budget_bytes),
            record.phase,
            dict(record.shape),
        )
