"""How a step came out: plain data, made once, when it can change no more."""

from __future__ import annotations

from dataclasses import dataclass

from mimose.decide.decision import Decision
from mimose.measure.analysis import analyse
from mimose.measure.trace import Trace
from mimose.planners import Menu
from mimose.records import StepRecord
from mimose.run.timing import Timing
from mimose.types import Measured, StepInput, StepSample


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was read in a step, all boundaries from its start to its backward's end."""

    events: tuple[Measured, ...]
    """In the order in which they ran."""
    sample: StepSample
    peak_bytes: int
    """The highest level."""
    file_growth_bytes: int
    """Of files mapped during the step."""

    @classmethod
    def of(cls, trace: Trace, menu: Menu) -> Measurement:
        """Analyse a trace.

        Args:
            trace: Of a step whose backward has ended.
            menu: The actions in use.
        """
        sample = analyse(trace.marks, trace.events, menu)
        events = tuple(trace.events)
        return cls(events, sample, trace.peak_bytes, trace.file_growth_bytes)


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
    released_bytes: int
    """Outputs of an earlier step that went before the first gradient."""
    is_shared: bool
    """Whether several forwards ran before its backward."""
    has_compiled: bool
    """Whether a compiler's memory was part of what it held."""
    timing: Timing
    """How long what its plan did took."""
