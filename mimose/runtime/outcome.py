"""How a step came out: plain data, made once, when it can change no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mimose.memory.marks import Trace, analyse
from mimose.planners import Menu
from mimose.policy.decision import Decision
from mimose.records import StepRecord
from mimose.types import Measured, SegmentSample, StepInput, StepSample


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was read in a step, all boundaries from its start to its backward's end."""

    events: tuple[Measured, ...]
    """In the order in which they ran."""
    sample: StepSample
    peak_bytes: int
    """The highest level."""

    @classmethod
    def of(
        cls, trace: Trace, menu: Menu, released_bytes: Sequence[float] = ()
    ) -> Measurement:
        """Analyse a trace.

        Args:
            trace: Of a step whose backward has ended.
            menu: The actions in use.
            released_bytes: By forward but the first, what went of the outputs of an
                earlier step before it began.
        """
        sample = analyse(trace.marks, trace.events, menu)
        if any(released_bytes):
            sample = _without_release(sample, trace.events, released_bytes)
        events = tuple(trace.events)
        return cls(events, sample, trace.peak_bytes)


def _without_release(
    sample: StepSample, events: Sequence[Measured], released_bytes: Sequence[float]
) -> StepSample:
    """Put the gaps between forwards on the footing of a step in which nothing went."""
    gaps, part = list(sample.gaps), 0
    for at, event in enumerate(events):
        if event.part > part:
            net = gaps[at].net_bytes
            released = sum(released_bytes[part : event.part])
            gaps[at] = SegmentSample(
                None if net is None else net + released, gaps[at].excess_bytes
            )
            part = event.part
    return replace(sample, gaps=tuple(gaps))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """All that the cost model, the reserve and the records are told of a step."""

    facts: StepInput
    """What was known before it ran."""
    decision: Decision
    """What it was to do."""
    record: StepRecord
    measurement: Measurement | None
    """None where nothing was read, or what was read says nothing of one step."""
    calls: tuple[int, ...]
    """How often each unit was called."""
    between: tuple[tuple[int, ...], ...]
    """The same where each forward but the last has ended."""
    released_bytes: float
    """Outputs of an earlier step that went before the first gradient."""
    is_shared: bool
    """Whether forwards ran before its backward that were no part of it."""
    has_compiled: bool
    """Whether a compiler's memory was part of what it held."""
