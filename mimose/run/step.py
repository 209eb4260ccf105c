"""One step: a forward of the root, until its backward has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mimose.decide.decision import Decision
from mimose.measure.meters import Meter
from mimose.measure.retained import RetainedOutputs
from mimose.measure.stopwatch import Stopwatch
from mimose.measure.trace import Trace
from mimose.planners import Menu
from mimose.records import Phase, StepRecord
from mimose.run.backward import Backward, Stage
from mimose.run.baseline import ActionAt, Unplanned
from mimose.run.events import FirstCallSeen
from mimose.run.outcome import Measurement, StepOutcome
from mimose.run.timing import Clock
from mimose.types import StepInput, Uncounted

_SHARED = "several forwards run before one backward"


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
        menu: The actions in use.
        action_at: A baseline's, by position; None where plans are made.
        clock: Times calls that are not kept.
    """

    def __init__(
        self,
        number: int,
        facts: StepInput,
        shape: Mapping[str, int],
        decision: Decision,
        *,
        start_bytes: int,
        budget_bytes: int,
        carried_bytes: int,
        n_graphs: int,
        began: float,
        menu: Menu,
        action_at: ActionAt | None,
        clock: Clock,
    ) -> None:
        self.number = number
        self.facts = facts
        self.start_bytes = start_bytes
        self.backward = Backward(carried_bytes)
        self.retries = 0
        self.n_graphs = n_graphs
        self.trace: Trace | None = None
        """What is read at its boundaries; None if nothing is."""
        self.uncounted: Uncounted | None = None
        self.knows_flops = False
        self.on_first_call: FirstCallSeen | None = None
        self.shape = shape
        self._spare: Trace | None = None
        """A trace that has its start, for a step that may yet be one to measure."""
        self._budget_bytes = budget_bytes
        self._is_baseline = action_at is not None
        self._menu = menu
        self._unplanned = Unplanned(menu, action_at)
        self._clock = clock
        self._timing = clock.timing(number)
        self._began = began
        self._plan_seconds = 0.0
        self._seconds: float | None = None
        self._calls: tuple[int, ...] = ()
        self._flops = 0
        self.take(decision)

    # ------------------------------------------------------------------ deciding

    def take(self, decision: Decision) -> None:
        """Do what was decided; none of the step's units has run."""
        self.decision = decision
        self.phase: Phase = decision.phase
        self.reason = decision.reason
        self.growth_bytes = decision.growth_bytes
        self.extra_seconds = decision.extra_seconds
        self.uncounted = None if self._is_baseline else decision.uncounted
        self.knows_flops = not self._is_baseline and not decision.uncounted
        is_planned = decision.chosen is not None and not decision.is_measured
        self.is_measured = not self._is_baseline and not is_planned
        """Whether its boundaries are to be read."""

    def run_again(self, reason: str) -> None:
        """Be the safest step from now on: it, or the one before, has failed."""
        self.retries += 1
        self._unplanned.make_safest()
        self.take(Decision("fallback", None, reason=reason))

    @property
    def can_be_safer(self) -> bool:
        """Whether its plan, or its baseline, keeps anything."""
        return self.decision.chosen is not None or self._unplanned.keeps_some

    def ask_first_call(self, on_first_call: FirstCallSeen) -> None:
        """Have the first unit's call seen, before it runs: the step may be another."""
        self.on_first_call = on_first_call

    def settle(self, facts: StepInput, decision: Decision | None) -> bool:
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
        self._timing = self._clock.timing(self.number)
        if self.is_measured:
            self.start_bytes = meter.settled_bytes(0)
        elif self.on_first_call is None:
            meter.reset_peak()
            return
        self._spare = Trace(meter, self._budget_bytes)
        self._spare.mark("start")
        self.trace = self._spare if self.is_measured else None

    def planned(self, seconds: float) -> None:
        """Count the time that it took until the forward may begin."""
        self._plan_seconds += seconds

    def action(self, index: int) -> str:
        """Return the action of an event that no plan speaks of: a baseline's own."""
        return self._unplanned.next(index)

    def add_flops(self, flops: int) -> None:
        """Take in the FLOPs of a recomputation."""
        self._flops += flops

    def stopwatch(self, unit: int, call: int, action: str) -> Stopwatch:
        """Return what times a call that is not kept."""
        return self._timing.stopwatch(unit, call, action)

    def ran(self, calls: tuple[int, ...], decision: Decision | None) -> None:
        """Take note of what its forward has run.

        Args:
            calls: How often each unit was called.
            decision: For just that; None where it ran more than was planned for.
        """
        self._calls = calls
        if decision is not None:
            self.decision = decision
            self.growth_bytes = decision.growth_bytes
            self.extra_seconds = decision.extra_seconds
            return
        self.phase, self.growth_bytes, self.extra_seconds = "fallback", None, None
        self.reason = "more layers ran than in the steps measured at such inputs"
        self.decision = replace(self.decision, growth_bytes=None)

    def forward_ended(self, graph: Any, retained: RetainedOutputs) -> None:
        """Wait for a backward.

        Args:
            graph: Lives as long as a backward can come.
            retained: The outputs of the step before.
        """
        self.backward.wait(graph, retained)

    def _ran(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the events' actions, and their names where they are known."""
        chosen = self.decision.chosen
        if self.trace is not None:
            events = self.trace.events
            return tuple(e.action for e in events), tuple(e.name for e in events)
        if chosen is not None:
            return chosen.plan.actions, chosen.events
        return tuple(self._unplanned.actions), ()

    # ------------------------------------------------------------------ backward

    def backward_ended(self) -> bool:
        """Take note that a backward has ended; return whether it counts."""
        if not self.backward.end():
            return False
        self._seconds = time.perf_counter() - self._began
        if self.trace is not None:
            self.trace.end()
            self.backward.raise_peak(self.trace.peak_bytes)
        return True

    def end_again(self) -> None:
        """Take note that it was another backward of the same graph."""
        self.reason = "two backwards"

    def share(self) -> None:
        """Take note that several forwards have run before one backward."""
        self.backward.join()
        self.growth_bytes = None
        self.reason = _SHARED

    @property
    def saw_gradient(self) -> bool:
        """Whether a backward began."""
        events = self.trace.events if self.trace is not None else ()
        is_in = self.backward.stage is Stage.BACKWARD
        return is_in or any(event.has_gradient for event in events)

    # ------------------------------------------------------------------ the outcome

    def close(
        self,
        *,
        had_backward: bool,
        reason: str | None = None,
        has_compiled: bool = False,
    ) -> StepOutcome:
        """End the step, and return how it came out.

        Args:
            had_backward: Whether a backward has run, if not to its end.
            reason: Why it is not an ordinary step; None leaves what was known before.
            has_compiled: Whether a compiler's memory was part of what it held.
        """
        self.backward.close()
        if reason is not None:
            self.reason = reason
        if self.trace is not None:
            self._flops = sum(event.flops for event in self.trace.events)
        elif had_backward:
            self._flops += self.decision.flops
        if has_compiled and self.backward.peaks is not None:
            self.reason = self.reason or "code was compiled in this step"
        return StepOutcome(
            facts=self.facts,
            decision=self.decision,
            record=self.record(),
            measurement=None if self.trace is None else self._measured(self.trace),
            calls=self._calls,
            released_bytes=self.backward.released_bytes,
            is_shared=self.backward.is_shared,
            has_compiled=has_compiled,
            timing=self._timing,
        )

    def _measured(self, trace: Trace) -> Measurement | None:
        if self.backward.is_shared or not self.backward.n_ended:
            return None
        return Measurement.of(trace, self._menu)

    def _extra_seconds(self) -> float | None:
        """Return what its plan added; None where other things took time as well."""
        if self.trace is not None or self.retries or not self.backward.n_ended:
            return None
        times = self._timing.read()
        return times and times.extra_seconds

    def record(self) -> StepRecord:
        """Return what can be told of the step by now."""
        growth, peaks = self.growth_bytes, self.backward.peaks
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
            predicted_extra_seconds=self.extra_seconds,
            extra_seconds=self._extra_seconds(),
            reserved_peak_bytes=peaks and peaks.reserved_bytes,
            allocated_peak_bytes=peaks and peaks.allocated_bytes,
            alloc_retries=peaks and peaks.n_retries,
        )
