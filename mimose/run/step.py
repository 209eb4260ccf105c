"""One step: a forward of the root, until its backward has ended.

Note: [A step's stages]
A step begins in its forward. When that has ended it waits for a backward, which may
never come; with its first gradient it is in backward, and when the engine is done, or
no backward can come any more, it is closed: its outcome is made then, once. A graph
that was retained can be run backward again, which a closed step takes note of.
"""

from __future__ import annotations

import enum
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mimose.decide.policy import Decision
from mimose.measure.meters import Meter
from mimose.measure.retained import RetainedOutputs
from mimose.measure.trace import Trace
from mimose.records import Peaks, Phase, StepRecord
from mimose.run.events import FirstCallSeen
from mimose.run.outcome import Measurement, StepOutcome
from mimose.types import KEEP, RECOMPUTE, StepFacts, Uncounted

_SHARED = "several forwards run before one backward"


class Stage(enum.Enum):
    """Where a step is: Note: [A step's stages]."""

    FORWARD = enum.auto()
    WAITING = enum.auto()
    BACKWARD = enum.auto()
    CLOSED = enum.auto()
    AGAIN = enum.auto()
    """In another backward, after it was closed."""


class Step:
    """One forward of the root, until its backward has ended.

    Args:
        number: Counts the root's forwards.
        facts: Its context and sizes.
        shape: The sizes that vary, by name.
        decision: What it is to do.
        start_bytes: The level that it starts from.
        budget_bytes: The budget.
        carried_bytes: What it begins with of the outputs of the step before.
        n_graphs: Compiled before it.
        began: When the root was entered, by `time.perf_counter`.
        action_at: A baseline's, by position; None where plans are made.
    """

    def __init__(
        self,
        number: int,
        facts: StepFacts,
        shape: Mapping[str, int],
        decision: Decision,
        *,
        start_bytes: int,
        budget_bytes: int,
        carried_bytes: int,
        n_graphs: int,
        began: float,
        action_at: Callable[[int], str] | None,
    ) -> None:
        self.number = number
        self.facts = facts
        self.start_bytes = start_bytes
        self.stage = Stage.FORWARD
        self.retries = 0
        self.unseen = ""
        self.is_shared = False
        """Whether its backward is that of several forwards."""
        self.n_graphs = n_graphs
        self.trace: Trace | None = None
        """What is read at its boundaries; None if nothing is."""
        self.uncounted: Uncounted | None = None
        self.knows_flops = False
        self.on_first_call: FirstCallSeen | None = None
        self.carried_bytes = carried_bytes
        self.peak_bytes = 0
        self.shape = shape
        self._spare: Trace | None = None
        """A trace that has its start, for a step that may yet be one to measure."""
        self._budget_bytes = budget_bytes
        self._is_baseline = action_at is not None
        self._action_at = action_at
        self._began = began
        self._plan_seconds = 0.0
        self._seconds: float | None = None
        self._unplanned: list[str] = []
        self._calls: tuple[int, ...] = ()
        self._n_backwards = 0
        self._flops = 0
        self._peaks: Peaks | None = None
        self._retained: RetainedOutputs | None = None
        self.released_bytes = 0
        """Of those, what went before the first gradient."""
        self._graph: weakref.ref[Any] | None = None
        self._has_compiled = False
        self.take(decision)

    # ------------------------------------------------------------------ deciding

    def take(self, decision: Decision) -> None:
        """Do what was decided; none of the step's units has run."""
        self.decision = decision
        self.phase: Phase = decision.phase
        self.reason = decision.reason
        self.growth_bytes = decision.growth_bytes
        self.uncounted = None if self._is_baseline else decision.uncounted
        self.knows_flops = not self._is_baseline and not decision.uncounted

    def make_safest(self, reason: str) -> None:
        """Recompute everything from now on."""
        self._action_at = None
        self._unplanned.clear()
        self.take(Decision("fallback", None, reason=reason))

    def run_after_failure(self) -> None:
        """Be the safest step: the one before has failed in its backward."""
        self.retries = 1
        self.make_safest("the step is run again")

    def run_again(self, error: BaseException) -> None:
        """Turn a step whose forward has failed into the safest one."""
        self.retries += 1
        self.make_safest(f"run again after {type(error).__name__} in forward")

    @property
    def is_measured(self) -> bool:
        """Whether its boundaries are to be read."""
        is_planned = self.decision.chosen is not None and not self.decision.is_measured
        return not self._is_baseline and not is_planned

    @property
    def can_be_safer(self) -> bool:
        """Whether its plan, or its baseline, keeps anything."""
        if self._action_at is not None:
            return KEEP in (self._action_at(0), self._action_at(1))
        return self.decision.chosen is not None

    def ask_first_call(self, on_first_call: FirstCallSeen) -> None:
        """Have the first unit's call seen, before it runs: the step may be another."""
        self.on_first_call = on_first_call

    def settle(self, facts: StepFacts, decision: Decision | None) -> bool:
        """Take note of the variant that runs.

        Args:
            facts: The step's.
            decision: What it is to do; None for what it does already.

        Returns:
            Whether something else is to be done.
        """
        self.on_first_call, self.facts = None, facts
        spare, self._spare = self._spare, None
        if decision is None:
            return False
        self.take(decision)
        self.trace = spare if self.is_measured else None
        return True

    # ------------------------------------------------------------------ forward

    def start(self, meter: Meter) -> None:
        """Start its peak, and read its boundaries if it is one to measure.

        Args:
            meter: Where they are read.
        """
        self.trace = self._spare = None
        if self.is_measured:
            self.start_bytes = meter.settled_bytes(0)
        elif self.on_first_call is None:
            meter.reset_peak()
            return
        self._spare = Trace(meter)
        self._spare.mark("start")
        self.trace = self._spare if self.is_measured else None

    def planned(self, seconds: float) -> None:
        """Count the time that it took until the forward may begin."""
        self._plan_seconds += seconds

    def action(self, index: int) -> str:
        """Return the action of an event that no plan speaks of: a baseline's own."""
        action = RECOMPUTE if self._action_at is None else self._action_at(index)
        self._unplanned.append(action)
        return action

    def add_flops(self, flops: int) -> None:
        """Take in the FLOPs of a recomputation."""
        self._flops += flops

    def forward_ended(
        self, calls: tuple[int, ...], graph: Any, retained: RetainedOutputs
    ) -> bool:
        """Wait for a backward; return whether the events were those of the plan.

        Args:
            calls: How often each unit was called.
            graph: Lives as long as a backward can come.
            retained: The outputs of the step before.
        """
        self._retained = retained
        self.stage = Stage.WAITING
        self._calls = calls
        self._graph = weakref.ref(graph)
        chosen = self.decision.chosen
        if chosen is None or calls == chosen.calls:
            return True
        self.phase, self.growth_bytes = "fallback", None
        self.reason = "other layers ran than in the steps measured at such inputs"
        self.decision = replace(self.decision, growth_bytes=None)
        return False

    def _ran(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the events' actions, and their names where they are known."""
        chosen = self.decision.chosen
        if self.trace is not None:
            events = self.trace.events
            return tuple(e.action for e in events), tuple(e.name for e in events)
        if chosen is not None:
            return chosen.plan.actions, chosen.events
        return tuple(self._unplanned), ()

    # ------------------------------------------------------------------ backward

    def begin_backward(self) -> bool:
        """Take note of a gradient; return whether it is a backward's first."""
        if self.stage in (Stage.BACKWARD, Stage.AGAIN):
            return False
        is_closed = self.stage is Stage.CLOSED
        self.stage = Stage.AGAIN if is_closed else Stage.BACKWARD
        if self.carried_bytes and self._retained is not None:
            self.released_bytes = self.carried_bytes - self._retained.live_bytes()
        return True

    def end_backward(self) -> bool:
        """Take note that a backward has ended; return whether it counts.

        It does not where the session was detached before it.
        """
        if self.stage is Stage.AGAIN:
            self.stage = Stage.CLOSED
            if not self._n_backwards:
                return False
        self._n_backwards += 1
        self._seconds = time.perf_counter() - self._began
        return True

    def end_again(self) -> None:
        """Take note that it was another backward of the same graph."""
        self.reason = "two backwards"

    def miss_backward(self, why: str) -> None:
        """Take note that no backward of it can be seen, and why."""
        self.unseen = why

    def raise_peak(self, level_bytes: int) -> int:
        """Take in a peak within it; return the highest so far."""
        self.peak_bytes = max(self.peak_bytes, level_bytes)
        return self.peak_bytes

    def note_peaks(self, peaks: Peaks) -> None:
        """Take in what was read as the backward ended."""
        self._peaks = peaks

    def note_compiled(self) -> None:
        """Take note that a compiler's memory was part of what it held."""
        self._has_compiled = True

    def join(self) -> None:
        """Take note that another forward has begun before its backward."""
        self.is_shared = True

    def share(self) -> None:
        """Take note that several forwards have run before one backward."""
        self.is_shared = True
        self.growth_bytes = None
        self.reason = _SHARED

    @property
    def has_graph(self) -> bool:
        """Whether a backward can still come."""
        return self._graph is not None and self._graph() is not None

    @property
    def saw_gradient(self) -> bool:
        """Whether a backward began."""
        events = self.trace.events if self.trace is not None else ()
        return self.stage is Stage.BACKWARD or any(e.has_gradient for e in events)

    # ------------------------------------------------------------------ the outcome

    def close(self, *, had_backward: bool, reason: str | None = None) -> StepOutcome:
        """End the step, and return how it came out.

        Args:
            had_backward: Whether a backward has run, if not to its end.
            reason: Why it is not an ordinary step; None leaves what was known before.
        """
        self.stage = Stage.CLOSED
        if reason is not None:
            self.reason = reason
        if self.trace is not None:
            self._flops = sum(event.flops for event in self.trace.events)
        elif had_backward:
            self._flops += self.decision.flops
        if self._has_compiled and self._peaks is not None:
            self.reason = self.reason or "code was compiled in this step"
        return StepOutcome(
            facts=self.facts,
            decision=self.decision,
            record=self.record(),
            measurement=self._measurement(),
            calls=self._calls,
            released_bytes=self.released_bytes,
            is_shared=self.is_shared,
            has_compiled=self._has_compiled,
        )

    def _measurement(self) -> Measurement | None:
        if self.trace is None or self.is_shared or not self._n_backwards:
            return None
        return Measurement.of(self.trace)

    def record(self) -> StepRecord:
        """Return what can be told of the step by now."""
        growth, peaks = self.growth_bytes, self._peaks
        actions, events = self._ran()
        return StepRecord(
            step=self.number,
            shape=self.shape,
            phase=self.phase,
            actions=actions,
            budget_bytes=self._budget_bytes,
            start_bytes=self.start_bytes,
            predicted_peak_bytes=None if growth is None else self.start_bytes + growth,
            observed_peak_bytes=peaks and peaks.level_bytes,
            cache_hit=self.decision.cache_hit,
            plan_seconds=self._plan_seconds,
            recomputed_flops=self._flops,
            retries=self.retries,
            reason=self.reason,
            events=events,
            seconds=self._seconds,
            reserved_peak_bytes=peaks and peaks.reserved_bytes,
            allocated_peak_bytes=peaks and peaks.allocated_bytes,
            alloc_retries=peaks and peaks.n_retries,
        )
