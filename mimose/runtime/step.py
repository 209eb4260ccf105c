"""One step: a forward of the root, until its backward has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from mimose.memory.marks import RetainedOutputs, Trace
from mimose.memory.meters import Meter
from mimose.planners import Menu
from mimose.policy.decision import Decision
from mimose.records import Phase, StepRecord
from mimose.runtime.backward import Backward, Stage
from mimose.runtime.baseline import ActionAt, Unplanned
from mimose.runtime.events import FirstCallSeen
from mimose.runtime.outcome import Measurement, StepOutcome
from mimose.runtime.window import Window
from mimose.types import Measured, StepInput, Uncounted

SharesParts: TypeAlias = Callable[
    [Mapping[str, int], tuple[str, ...], tuple[str, ...]],
    tuple[Mapping[str, int], tuple[str, ...], tuple[str, ...]],
]


class Step:
    """One forward of the root, until its backward has ended.

    Args:
        number: Counts the root's forwards.
        facts: Its context and sizes.
        shape: The sizes that vary, by name.
        decision: What it is to do.
        window: The forwards that run before the same backward.
        budget_bytes: The budget.
        n_graphs: Compiled before it.
        began: When the root was entered, by `time.perf_counter`.
        menu: The actions in use.
        action_at: A baseline's, by position; None where plans are made.
    """

    def __init__(
        self,
        number: int,
        facts: StepInput,
        shape: Mapping[str, int],
        decision: Decision,
        *,
        window: Window,
        budget_bytes: int,
        n_graphs: int,
        began: float,
        menu: Menu,
        action_at: ActionAt | None,
    ) -> None:
        self.number = number
        self.facts = facts
        self.window = window
        self.part = len(window.steps)
        """Which forward of the window it is."""
        self.calls_before = window.calls
        """How often each unit was called in the window before; () for never."""
        self.backward = Backward(0 if self.part else window.carried_bytes)
        self.retries = 0
        self.n_graphs = n_graphs
        self.trace: Trace | None = None
        """What is read at its boundaries; None if nothing is."""
        self.uncounted: Uncounted | None = None
        self.knows_flops = False
        self.has_wall = False
        """Whether the allocator keeps the budget meanwhile."""
        self.loss_can_be_safer = False
        """Whether its loss could go by rows and does not."""
        self.on_first_call: FirstCallSeen | None = None
        self.shape = shape
        self._spare: Trace | None = None
        """A trace that has its start, for a step that may yet be one to measure."""
        self._budget_bytes = budget_bytes
        self._is_baseline = action_at is not None
        self._menu = menu
        self._unplanned = Unplanned(menu, action_at)
        self.start_bytes = int(window.memory.start_bytes)
        if window.steps:
            self.start_bytes = window.steps[0].start_bytes
        self._events: list[Measured] | None = None
        """What was read of its events; None where nothing was."""
        self._began = began
        self._plan_seconds = 0.0
        self._seconds: float | None = None
        self._flops = 0
        self._ran_as: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        """What `_ran` returns, where records hold it already."""
        self.take(decision)

    # ------------------------------------------------------------------ deciding

    def take(self, decision: Decision) -> None:
        """Do what was decided; none of the step's units has run."""
        self._ran_as = None
        self.decision = decision
        self.phase: Phase = decision.phase
        self.reason = decision.reason
        self.is_whole = decision.is_whole
        """Whether what is recomputed runs to its end: see `run.agreement`."""
        self.growth_bytes = decision.growth_bytes
        is_planned = decision.chosen is not None and not decision.is_measured
        self.is_measured = not self._is_baseline and not is_planned
        """Whether its boundaries are to be read."""
        if self.part:  # as those of the first were
            self.is_measured = self.window.trace is not None
        is_unplanned = decision.chosen is None and not self.is_measured
        self.uncounted = None if is_unplanned else decision.uncounted
        self.knows_flops = not (is_unplanned or decision.uncounted)

    def run_again(self, reason: str) -> None:
        """Be the safest step from now on: it, or the one before, has failed."""
        self.retries += 1
        self.loss_can_be_safer = False
        self.window.give_up(reason)
        self._unplanned.make_safest()
        again = Decision("fallback", None, reason=reason, is_whole=self.is_whole)
        self.take(again)

    @property
    def can_be_safer(self) -> bool:
        """Whether its plan, or its baseline, keeps anything, or its loss could do."""
        keeps_some = self.decision.chosen is not None or self._unplanned.keeps_some
        return keeps_some or self.loss_can_be_safer

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
        self._tell_prediction()
        return True

    # ------------------------------------------------------------------ forward

    def start(self, meter: Meter) -> None:
        """Start its peak, and read its boundaries if it is one to measure.

        Args:
            meter: Where they are read.
        """
        if self.part:
            self._go_on()
            return
        self.trace = self._spare = None
        if self.is_measured:
            self.start_bytes = meter.settled_bytes(0)
            self.window.begin_at(self.start_bytes)
        elif self.on_first_call is None:
            meter.reset_peak()
            return
        self._spare = Trace(meter, self._budget_bytes)
        self._spare.mark("start")
        self.trace = self._spare if self.is_measured else None
        self._tell_prediction()

    def _tell_prediction(self) -> None:
        """Have what is tried beside the plan leave the prediction as it is."""
        if self.trace is not None and self.growth_bytes is not None:
            self.trace.predicted_bytes = self.start_bytes + self.growth_bytes

    def _go_on(self) -> None:
        """Read on where the forward before has ended; not where this one failed."""
        if self.retries:
            self.window.stop_reading()
        self.trace = self._spare = self.window.trace
        if self.trace is not None:
            self.trace.join_forward()
        self.is_measured = self.trace is not None

    def planned(self, seconds: float) -> None:
        """Count the time that it took until the forward may begin."""
        self._plan_seconds += seconds

    def action(self, index: int) -> str:
        """Return the action of an event that no plan speaks of: a baseline's own."""
        return self._unplanned.next(index)

    def add_flops(self, flops: int) -> None:
        """Take in the FLOPs of a recomputation."""
        self._flops += flops

    def ran(self, decision: Decision | None) -> None:
        """Take note of what its forward has run.

        Args:
            decision: For just that; None where it ran other layers, or more, than were
                planned for.
        """
        self._ran_as = None
        if decision is not None:
            self.decision = decision
            self.growth_bytes = decision.growth_bytes
            self.reason = self.reason or decision.reason
            return
        chosen = self.decision.chosen
        is_one_of_several = chosen is not None and chosen.between
        what = "other" if is_one_of_several else "more"
        self.phase = "fallback"
        self.withdraw(f"{what} layers ran than in the steps measured at such inputs")

    def forward_ended(self, graph: Any, retained: RetainedOutputs) -> None:
        """Wait for a backward.

        Args:
            graph: Lives as long as a backward can come.
            retained: The outputs of the step before.
        """
        self.backward.wait(graph, retained)
        if self.trace is not None:
            self._events = [e for e in self.trace.events if e.part == self.part]

    def share_parts(self, share: SharesParts) -> None:
        """Tell of it, where it runs under a plan, by objects that records hold.

        Args:
            share: Returns equal ones, of its shape, its actions and its events' names.
        """
        if self.trace is None and self.decision.chosen is not None:
            self.shape, *ran = share(self.shape, *self._ran())
            self._ran_as = ran[0], ran[1]

    def withdraw(self, reason: str) -> None:
        """Predict nothing any more, for a reason."""
        self.growth_bytes = None
        self.reason = reason
        self.decision = replace(self.decision, growth_bytes=None)

    @property
    def actions(self) -> tuple[str, ...]:
        """The action of each event that it ran."""
        return self._ran()[0]

    def _ran(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the events' actions, and their names where they are known."""
        chosen = self.decision.chosen
        events = self._events
        if events is None and self.trace is not None:
            events = self.trace.events
        if events is not None:
            return tuple(e.action for e in events), tuple(e.name for e in events)
        if chosen is not None:
            own = chosen.events_of(self.part)
            return chosen.plan.actions[own], chosen.events[own]
        return tuple(self._unplanned.actions), ()

    # ------------------------------------------------------------------ backward

    def backward_ended(self) -> bool:
        """Take note that a backward has ended; return whether it counts."""
        if not self.backward.end():
            return False
        self._seconds = time.perf_counter() - self._began
        return True

    def predict_as(self, last: Step) -> None:
        """Predict what the last forward of the window did: it knew all of them."""
        self.growth_bytes = last.growth_bytes

    def be_alone(self) -> None:
        """Be no part of a window any more, for its backward went past this one."""
        self.window = self.window.left_by(self)

    def end_again(self) -> None:
        """Take note that it was another backward of the same graph."""
        self.reason = "two backwards"

    @property
    def saw_gradient(self) -> bool:
        """Whether a backward began."""
        events = self._events or ()
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
        window = self.window
        if reason is not None:
            self.reason = reason
        if self._events is not None:
            self._flops = sum(event.flops for event in self._events)
        elif had_backward and self.decision.chosen is not None:
            own = self.decision.chosen.events_of(self.part)
            n_backwards = max(1, window.n_backwards)
            self._flops += n_backwards * sum(self.decision.flops[own])
        if has_compiled and self.backward.peaks is not None:
            self.reason = self.reason or "code was compiled in this step"
        return StepOutcome(
            facts=window.facts if self in window.steps else self.facts,
            decision=self.decision,
            record=self.record(),
            measurement=self._measured(),
            calls=window.calls,
            between=window.between,
            released_bytes=self._released_bytes(),
            is_shared=window.is_shared,
            has_compiled=has_compiled,
        )

    def _released_bytes(self) -> float:
        """Return what went of the carried outputs behind the last forward."""
        first = self.window.steps[0] if self.window.steps else self
        return first.backward.released_bytes - sum(self.window.released_bytes)

    def _measured(self) -> Measurement | None:
        window, trace = self.window, self.window.trace
        if trace is None or window.is_shared or not self.backward.n_ended:
            return None
        return Measurement.of(trace, self._menu, window.released_bytes)

    def record(self) -> StepRecord:
        """Return what can be told of the step by now."""
        growth, peaks = self.growth_bytes, self.backward.peaks
        actions, events = self._ran_as or self._ran()
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
            is_optimal=self.decision.chosen is not None
            and self.decision.chosen.plan.optimal,
        )
