"""How a step came out: plain data, made once, and who learns of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mimose.budget import format_bytes
from mimose.cost.measured import ran_least
from mimose.memory.marks import without_readings
from mimose.policy.plans import Decision
from mimose.records import StepRecord
from mimose.types import Measured, StepInput, StepSample

if TYPE_CHECKING:
    from mimose.runtime.engine import Engine

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
    headroom_bytes: float
    """Between what was held as it began and the budget."""
    calls: tuple[int, ...]
    """How often each layer was called."""
    between: tuple[tuple[int, ...], ...]
    """The same where each forward but the last has ended."""
    released_bytes: float
    """Outputs of an earlier step that went before the first gradient."""
    is_shared: bool
    """Whether forwards ran before its backward that were no part of it."""


def learn(engine: Engine, outcome: StepOutcome) -> None:
    """Tell the cost model, the policy and the records how a step came out.

    Nobody else changes what is known.

    Args:
        engine: The session's parts.
        outcome: Of a step whose backward has run to its end.
    """
    for record in outcome.records:
        engine.records.close(record)
    if outcome.is_shared:
        return
    record = outcome.records[-1]
    observed, highest = record.observed_peak_bytes, record.highest_bytes
    growth = None if observed is None else observed - record.start_bytes
    is_over = highest is not None and highest > record.budget_bytes
    if outcome.sample is not None:
        _teach(engine, outcome, outcome.sample)
    if growth is not None:
        engine.footprint.observe()
    if is_over and engine.plans:
        _note_over(engine, record)
    engine.policy.absorb(
        outcome.facts,
        outcome.decision,
        growth,
        headroom_bytes=outcome.headroom_bytes,
        is_over=is_over,
    )


def _note_over(engine: Engine, record: StepRecord) -> None:
    engine.policy.distrust_plans()
    _log.warning(
        "mimose: step %d reached %s, over the budget of %s (phase %s, %s)",
        record.step,
        format_bytes(record.highest_bytes or 0),
        format_bytes(record.budget_bytes),
        record.phase,
        dict(record.shape),
    )


def _teach(engine: Engine, outcome: StepOutcome, sample: StepSample) -> None:
    """Let the cost model learn from a measured step."""
    events, learner = outcome.events, engine.learner
    if learner.n_steps == 0:
        sample = without_readings(sample)
    growth = max(0, outcome.peak_bytes - outcome.records[-1].start_bytes)
    # What a plan could grow by: all kept, or all the headroom.
    keep = learner.model.menu.first
    kept = sum(
        event.held_bytes[keep] - event.held_bytes[event.action]
        for event in events
        if event.action != keep and event.held_bytes
    )
    learner.absorb(
        outcome.facts,
        events,
        sample,
        outcome.released_bytes,
        outcome.calls,
        outcome.between,
        growth_bytes=max(growth, min(growth + kept, outcome.headroom_bytes)),
    )
    if engine.meter.reads_peak and ran_least(learner.model, events):
        state = float(engine.optimizers.state_bytes)
        peak = outcome.peak_bytes
        engine.policy.least_peaks.add(outcome.facts, peak, growth, state)
