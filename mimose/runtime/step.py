"""A step: one forward of the model and its backward, as a state machine.

Note: [A step's stages]
A step begins in its forward. After the forward it waits for a backward, which may never
run. With the first gradient it is in its backward. When the autograd engine has
finished, or when no backward can follow, it is closed, and its outcome is made once.

Note: [The end of backward]
A hook on the model's outputs asks the autograd engine for a callback when the whole
backward is done and every gradient is accumulated. This also works if the loss is
computed outside the model. Only the graph of the outputs refers to the hook, so once it
is gone no backward of the step can follow. A backward that avoids the outputs (of an
auxiliary loss on an inner tensor only) is not seen: its step closes without an observed
peak.

Note: [A window]
The forwards before one backward are one step for memory, because each holds its memory
until then. Each forward is a `Step` with its own record; plans, predictions,
measurements and learning are the window's. The first backward that ends closes the
window. A later one through the same graphs only raises the recorded peaks, and the next
window that begins in the same way recomputes everything.
"""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import torch

from mimose.cost.measured import MeasuredStep
from mimose.cost.problem import Memory
from mimose.exactness.findings import Findings
from mimose.measure.samples import analyse
from mimose.measure.trace import Trace
from mimose.memory.meters import Meter
from mimose.policy.decision import Decision, Ending, StepOutcome
from mimose.policy.windows import LATELY, OTHER_SIZES, OTHERS, SEVERAL_BACKWARDS, joined
from mimose.records import Peaks, StepRecord
from mimose.runtime.budget import SessionBudget
from mimose.runtime.learning import Learning
from mimose.runtime.unplanned import NO_GRADIENT, Unplanned
from mimose.tensors import tensors_in
from mimose.torch_private import (
    NO_GRAPH_TASK,
    current_graph_task,
    queue_callback,
    storage_key,
)
from mimose.types import StepInput

_Retained: TypeAlias = Mapping[int, tuple[Callable[[], object], int]]
"""By storage of an output of the last step: a function that returns it while the user
holds it, and its bytes. It is part of the next step's start, and is usually freed when
the new outputs replace it: after that forward, before its backward."""

_LEAST_OUTPUT_BYTES = 65536
"""Smaller outputs are ignored."""
_NOT_ALL = "the backward did not go through all forwards before it"
_TWO_BACKWARDS = "two backwards"
_NO_END = (
    "no backward followed, or it did not run to its end or not through the outputs"
)
_NO_GRADIENT = "the model's outputs need no gradient, so no backward was observed"
_NO_TENSOR = (
    "no tensors were found in the model's output ({}), so its backward was not observed"
)
_DETACHED = "detached before the backward"


class _Window:
    """The forwards before one backward: Note: [A window].

    Args:
        memory: What was held when the first began, and the budget.
        budget_bytes: The session's budget.
        carried: The outputs of the step before, which are held at its start.
        releases: Whether the user frees them before the next backward.
        left: The only forward, which another window's backward has left out.

    Attributes:
        carried_bytes: The bytes of these outputs that were held at its start.
        released_bytes: The bytes of these outputs that were freed before its backward.
        steps: Its forwards that have ended.
        trace: Records its boundaries; None if it is not measured.
        plan: The step input of the last plan, and its decision; None before.
        counts: How often each layer was called, at the end of each forward.
        reason: Why it is not an ordinary window; "" if it is.
        is_shared: Whether nothing can be learned from it as a step.
        is_left: Whether it is one forward that another window's backward left out.
        is_running: Whether its backward is running.
        peak_bytes: The highest level so far.
        began: When its first forward began.
        outcome: What it has shown; None before its backward has ended.
    """

    def __init__(
        self,
        memory: Memory,
        budget_bytes: int,
        carried: _Retained,
        *,
        releases: bool = False,
        left: Step | None = None,
    ) -> None:
        self.memory, self.budget_bytes = memory, budget_bytes
        self.carried, self.carried_bytes = carried, 0
        if carried:
            self.carried_bytes = _bytes_of(carried)
            if releases and self.carried_bytes:
                released = float(self.carried_bytes)
                self.memory = memory._replace(released_bytes=released)
        self.released_bytes = 0
        self.steps: list[Step] = [] if left is None else [left]
        self.trace: Trace | None = None
        self.plan: tuple[StepInput, Decision] | None = None
        self.counts: tuple[tuple[int, ...], ...] = ()
        self.reason = "" if left is None else _NOT_ALL
        self.is_left = self.is_shared = left is not None
        self.is_running = False
        self.peak_bytes = 0
        self.began: Any = None
        self.outcome: StepOutcome | None = None

    def reach(self, level_bytes: int) -> None:
        """Record a peak."""
        self.peak_bytes = max(self.peak_bytes, level_bytes)

    def abandon_plan(self, reason: str) -> None:
        """Run the rest under the safest plan, without a prediction."""
        self.reason = self.reason or reason

    def discard_readings(self, reason: str) -> None:
        """Learn nothing from it, because its readings are not those of one step."""
        self.reason, self.is_shared = reason, True
        self.stop_reading()

    def stop_reading(self) -> None:
        """Stop measuring."""
        if self.trace is not None:
            self.trace.stop()
            self.trace = None

    def start(self, meter: Meter, part: int, *, is_measured: bool) -> Trace | None:
        """Start a forward: a new peak for the first, and what measures it."""
        if part:
            if self.trace is not None:
                self.trace.join_forward()
            return self.trace
        self.trace = None
        if not is_measured:
            meter.reset_peak()
            return None
        start_bytes = float(meter.settled_bytes(0))
        self.memory = self.memory._replace(start_bytes=start_bytes)
        self.trace = Trace(meter, self.budget_bytes)
        self.trace.mark("start")
        return self.trace


class Begun(NamedTuple):
    """What a window says as its next forward begins."""

    memory: Memory
    """What was held when its first forward began, and the budget."""
    parts: Sequence[StepInput]
    """The inputs of its forwards so far."""
    plan: tuple[StepInput, Decision] | None
    """The expected window, and its decision; None before."""
    is_measured: bool
    """Whether its forwards so far are measured."""
    has_others: bool
    """Whether a backward of other forwards runs, or may still run."""
    reason: str
    """Why no plan is made for the rest; "" if one is."""


class Forward(NamedTuple):
    """One forward of the model, as it begins."""

    number: int
    """Its number among all of the session."""
    part: int
    """Its place in its window."""
    step_input: StepInput
    shape: Mapping[str, int]
    """The sizes that vary, by name."""
    counts: tuple[int, ...]
    """How often each layer was called in the window before; () for the first."""
    began: float
    plan_seconds: float


class Step:
    """A forward whose backward has not ended.

    Args:
        forward: The forward.
        decision: What it does.
        window: The forwards before the same backward.
        n_failed: How often it, or the step that it repeats, has failed.

    Attributes:
        forward: The argument.
        decision: What it does, as far as it is known to hold.
        retries: How often the forward runs again, or follows a step that has failed.
        trace: Measures it; None if it is not measured.
        actions: The actions of layer calls that are in no plan.
        flops: Estimated FLOPs of recomputations that are in no plan.
        graph: Alive as long as a backward can follow; None if none can be seen.
        has_gradient: Whether one of its outputs got a gradient, so that its backward
            has begun.
    """

    def __init__(
        self, forward: Forward, decision: Decision, window: _Window, n_failed: int = 0
    ) -> None:
        self.forward, self.decision = forward, decision
        self.window = window
        self.retries = n_failed
        self.trace: Trace | None = None
        self.actions: list[str] = []
        self.flops = 0
        self.graph: weakref.ref[Any] | None = None
        self.has_gradient = False

    # ------------------------------------------------------------------ forward

    @property
    def whole(self) -> StepInput:
        """The input of the expected window, or only its own."""
        plan = self.window.plan
        return self.forward.step_input if plan is None else plan[0]

    @property
    def is_safest(self) -> bool:
        """Whether it runs again, with everything recomputed.

        A step without a plan does that from the start: a fallback changes nothing.
        """
        return self.retries > 0 and self.decision.chosen is None

    def run_again(self, reason: str, *, changes_plan: bool = True) -> None:
        """Record that the forward runs again.

        Args:
            reason: Why.
            changes_plan: Whether to use the safest plan from now on.
        """
        self.retries += 1
        self.actions.clear()
        if changes_plan:
            self.window.abandon_plan(reason)
            self.decision = self.decision.safest(reason)
        else:
            reason = self.decision.reason or reason
            self.decision = replace(self.decision, reason=reason)

    def ran_unplanned(self, action: str) -> None:
        """Record the action of a layer call that is in no plan."""
        self.actions.append(action)

    def count_flops(self, n_flops: int) -> None:
        """Count FLOPs of a recomputation that is in no plan."""
        self.flops += n_flops

    def note_ran(self, decision: Decision | None) -> None:
        """Record which layer calls its forward ran.

        Args:
            decision: The decision for exactly these calls; None if other or more layers
                ran than planned.
        """
        own = self.decision
        if decision is not None:
            reason = own.reason or decision.reason
            self.decision = replace(decision, reason=reason)
            return
        what = "other" if own.chosen is not None and own.chosen.between else "more"
        reason = f"{what} layers ran than in measured steps with such inputs"
        self.decision = replace(own.withdrawn(reason), phase="fallback")
        self.window.abandon_plan(reason)

    def withdraw(self, reason: str) -> None:
        """Withdraw the prediction, for a reason."""
        self.decision = self.decision.withdrawn(reason)

    def backward_bytes(
        self, peak_bytes: int, held_bytes: int, allowed: Callable[[float], float]
    ) -> float | None:
        """Estimate, as its forward ends, up to which level its backward grows.

        Without a prediction each layer is taken to need twice as much as in its
        forward: its tensors once more, and as many gradients. (Without this, 10 of 720
        forwards with one huge block ran again in `benchmarks.proofs backward`, with it
        8.) None if more forwards follow.

        Args:
            peak_bytes: The highest level since the last reset.
            held_bytes: The level now.
            allowed: Returns what a predicted growth may become.
        """
        chosen, memory = self.decision.chosen, self.window.memory
        if chosen is not None:
            if self.forward.part < len(chosen.between):
                return None
            growth = allowed(chosen.growth.after_release_bytes)
            return memory.start_bytes + growth - memory.released_bytes
        if self.decision.growth_bytes is not None:
            return memory.start_bytes + self.decision.growth_bytes
        if self.trace is not None:
            peak_bytes = max(peak_bytes, self.trace.peak_bytes)
        return held_bytes + 2.0 * (peak_bytes - held_bytes)

    # ------------------------------------------------------------------ backward

    def part_with(self, window: _Window) -> None:
        """Become a window by itself, which a backward of its window has left out."""
        self.window = _Window(window.memory, window.budget_bytes, {}, left=self)

    @property
    def can_come(self) -> bool:
        """Whether its graph is still there."""
        return self.graph is not None and self.graph() is not None

    def record(
        self, reason: str, peaks: Peaks | None, seconds: float | None
    ) -> StepRecord:
        """Return its record.

        Args:
            reason: Why it is not an ordinary step; "" for its decision's reason.
            peaks: The readings of its window; None if not known.
            seconds: From its begin to the end of its backward; None without an end.
        """
        forward, decision, window = self.forward, self.decision, self.window
        number, part, _, shape, _, _, plan_seconds = forward
        actions, flops = tuple(self.actions), self.flops
        calls: tuple[str, ...] = ()
        if self.trace is not None:
            found = [call for call in self.trace.calls if call.part == part]
            actions = tuple([call.action for call in found])
            calls = tuple([call.name for call in found])
            flops = sum([call.flops for call in found])
        elif decision.chosen is not None:
            chosen = decision.chosen
            own = chosen.calls_of(part)
            actions, calls = chosen.plan.actions[own], chosen.calls[own]
            if seconds is not None:
                flops += sum(chosen.flops[own])
        start, growth = int(window.memory.start_bytes), decision.growth_bytes
        return StepRecord(
            step=number,
            shape=shape,
            phase=decision.phase,
            actions=actions,
            budget_bytes=window.budget_bytes,
            start_bytes=start,
            predicted_peak_bytes=None if growth is None else start + growth,
            observed_peak_bytes=peaks and peaks.level_bytes,
            cache_hit=decision.cache_hit,
            plan_seconds=plan_seconds,
            recomputed_flops=flops,
            retries=self.retries,
            reason=reason or decision.reason,
            events=calls,
            seconds=seconds,
            reserved_peak_bytes=peaks and peaks.reserved_bytes,
            alloc_retries=peaks and peaks.n_retries,
        )


class Steps:
    """Follows the steps whose backward may still run, each to its outcome.

    Args:
        budget: The session's budget, whose limit reads the peaks.
        meter: Measures steps.
        findings: Knows of checks that wait for the end of a step.
        unplanned: Counts forwards.
        learning: Gets the outcomes.

    Attributes:
        n_begun: Forwards begun so far.
        open: Steps between the end of their forward and the end of their backward.
        is_shared: Whether the current forward is part of a step that cannot be planned.
    """

    def __init__(
        self,
        budget: SessionBudget,
        meter: Meter,
        findings: Findings,
        unplanned: Unplanned,
        learning: Learning,
    ) -> None:
        self._budget, self._limit, self._meter = budget, budget.limit, meter
        self._findings, self._unplanned, self._learning = findings, unplanned, learning
        self._window: _Window | None = None
        """The window that the next forward joins; None if it begins one."""
        self._running: _Window | None = None
        """The window of the forward that begins or runs."""
        self._shared_until = -1
        self._wall_of: weakref.ref[Any] | None = None
        """The last forward's graph. If it is freed without a backward, the memory limit
        is lifted."""
        self.n_begun = 0
        self.open: list[Step] = []
        self._retained: _Retained = {}
        """The last step's outputs."""
        self._releases = False
        """Whether the user frees a step's outputs before the next backward."""
        self.is_shared = False
        self._is_finished = False

    # ------------------------------------------------------------------ forwards

    def settle(self) -> None:
        """Close the steps that get no backward any more.

        If user code runs the next forward inside a backward, steps whose backward has
        begun stay open.
        """
        if self._findings.deferred:  # of a step without a backward
            self._findings.read_deferred()
        if self.open:
            self._settle(is_inside=is_in_backward())

    def begin(self) -> Begun:
        """Begin a forward, once the others are settled.

        Returns:
            What the window says that the forward joins or begins.
        """
        self._wall_of = None
        is_inside = is_in_backward()
        self.is_shared = is_inside or self.n_begun < self._shared_until
        window = None if is_inside else self._window
        if window is None:
            memory, peaks = self._budget.window_begins()
            most, carried = self._limit.budget_bytes, self._retained
            window = _Window(memory, most, carried, releases=self._releases)
        else:
            peaks = self._limit.fold()
        if self.open:
            self.note_peak(peaks.level_bytes)
        self._running = window
        parts = [s.forward.step_input for s in window.steps] if window.steps else []
        has_others, is_measured = bool(self.open), window.trace is not None
        if has_others:
            has_others = self.has_window
        memory, plan, reason = window.memory, window.plan, window.reason
        return Begun(memory, parts, plan, is_measured, has_others, reason)

    def decide(
        self, plan: tuple[StepInput, Decision] | None, decision: Decision
    ) -> bool:
        """Record the decision for the forward that begins.

        Args:
            plan: The expected window with its decision; None if none was made.
            decision: The forward's.

        Returns:
            Whether the forward is measured.
        """
        window = self._running
        assert window is not None
        if plan is None:
            window.abandon_plan(decision.reason)
        else:
            window.plan = plan
        if decision.reason == SEVERAL_BACKWARDS:
            window.discard_readings(decision.reason)
        elif window.steps and decision.chosen is None:
            window.abandon_plan(decision.reason)
        if window.steps:  # like the first forward of the window
            return window.trace is not None
        return decision.is_measured and not window.is_shared

    def start(
        self,
        step_input: StepInput,
        shape: Mapping[str, int],
        decision: Decision,
        began: float,
        *,
        is_measured: bool,
        n_failed: int,
    ) -> Step:
        """Start the forward that begins.

        Args:
            step_input: Its context and sizes.
            shape: The sizes that vary, by name.
            decision: What it does.
            began: When the model was called.
            is_measured: Whether it is measured.
            n_failed: How often the step that it repeats has failed.
        """
        window, now = self._running, time.perf_counter()
        assert window is not None
        number, part = self.n_begun, len(window.steps)
        counts = window.counts[-1] if window.counts else ()
        forward = Forward(number, part, step_input, shape, counts, now, now - began)
        step = Step(forward, decision, window, n_failed)
        self.n_begun += 1
        step.trace = window.start(self._meter, part, is_measured=is_measured)
        if not part:
            window.began = self._learning.mark()
        return step

    def start_again(self, step: Step) -> None:
        """Start a forward that runs again."""
        window, part = step.window, step.forward.part
        if part:
            window.stop_reading()
        is_measured = step.decision.is_measured and not window.is_shared
        step.trace = window.start(self._meter, part, is_measured=is_measured)

    @property
    def has_window(self) -> bool:
        """Whether there are forwards whose backward runs or may still run."""
        return any([s.can_come and not s.window.is_left for s in self.open])

    def _settle(self, *, is_inside: bool) -> None:
        windows = {id(step.window): step.window for step in self.open}.values()
        for window in windows if not is_inside else ():
            if window.is_running:
                window.is_running = False
                window.outcome = self._close_unfinished(window.steps, _NO_END)
        self._close_dead()

    def _close_dead(self) -> None:
        """Close steps whose graph was freed, and remove them from their windows."""
        for step in [step for step in self.open if not step.can_come]:
            window = step.window
            if window.is_running:
                continue
            if len(window.steps) > 1:
                window.discard_readings(_NOT_ALL)
            self._close_unfinished([step], "" if step.graph is None else _NO_END)
            window.steps.remove(step)
            if window is self._window and not window.steps:
                self._window = None

    def _close_unfinished(self, steps: Sequence[Step], reason: str) -> StepOutcome:
        """Close steps of a window whose backward is not expected any more."""
        for step in steps:
            self.open.remove(step)
        return self._close(steps, "unclear", reason)

    def forward_ended(self, step: Step, output: Any, counts: tuple[int, ...]) -> None:
        """Prepare for the backward of a step.

        Args:
            step: The step.
            output: What the model returned.
            counts: How often each layer was called in its window.
        """
        window = step.window
        is_one = isinstance(output, torch.Tensor)
        tensors = [output] if is_one else list(tensors_in(output))
        # Only the outputs' graph refers to this hook: Note: [The end of backward].
        graph, is_waiting = partial(self._note_gradient, step), False
        retained = dict(self._retained) if step.forward.part else {}
        for tensor in tensors:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(graph)
                is_waiting = True
            if tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage.nbytes() >= _LEAST_OUTPUT_BYTES:
                    own = weakref.ref(storage), storage.nbytes()
                    retained[storage_key(storage)] = own
        self._retained = retained
        if is_waiting:
            step.graph = weakref.ref(graph)
        else:
            kind = type(output).__name__
            reason = _NO_GRADIENT if tensors else _NO_TENSOR.format(kind)
            step.decision = replace(step.decision, reason=reason)
        if tensors and not is_waiting:
            self._unplanned.note(NO_GRADIENT)
        else:
            self._unplanned.planned()
        limit = self._limit
        self._wall_of = weakref.ref(graph, lambda _: limit.drop_wall())
        window.steps.append(step)
        window.counts += (counts,)
        if step.trace is not None and step.trace.why_discarded:
            window.discard_readings(step.trace.why_discarded)
        self._window = window
        self.open.append(step)

    def abort(self, step: Step, error: BaseException) -> None:
        """Close a step whose forward has failed for good."""
        if self._is_finished:  # detached inside this forward
            return
        reason = f"forward raised {type(error).__name__}"
        if step.forward.part:
            step.window.discard_readings(reason)
        step.window.stop_reading()
        self._limit.drop_wall()
        self.note_peak(self._limit.fold().level_bytes)
        self._close([step], "unclear", reason)

    def abandon(self) -> None:
        """Begin a new window with the next forward, because the last step failed."""
        if self._is_finished:
            return
        self._settle(is_inside=False)
        self._window = None

    def finish(self) -> None:
        """Close everything, as the session ends."""
        self.note_peak(self._limit.fold().level_bytes)
        self._settle(is_inside=False)
        for step in list(self.open):
            self._close_unfinished([step], _DETACHED)
        self._is_finished = True
        # It knows the model. If that keeps its outputs, their hooks keep this object.
        vars(self).pop("_learning", None)

    def note_peak(self, level_bytes: int) -> None:
        """Record a peak for each open step."""
        for step in self.open:
            step.window.reach(level_bytes)

    # ------------------------------------------------------------------ backward

    def _note_gradient(self, step: Step, gradient: torch.Tensor) -> None:
        """Record that a forward's output, of an open or closed step, got a gradient."""
        window = step.window
        step.has_gradient = True
        if window.is_running or self._is_finished:
            return
        window.is_running = True
        if window.trace is not None and gradient.numel() == 1:
            window.trace.turn()
        if window.carried_bytes and window.outcome is None:
            window.released_bytes = window.carried_bytes - _bytes_of(window.carried)
        if self._window is window:
            self._window = None
        # An evaluation or an optimizer step since then may have lifted the limit.
        if self._limit.has_wall and self._budget.is_enforced(step.decision):
            self._limit.raise_wall(keeps_grace=True)
        # Queued twice, to run after callbacks queued since (FSDP2 reduces gradients).
        queue_callback(partial(queue_callback, partial(self._end_backward, window)))

    def _end_backward(self, window: _Window) -> None:
        """End a window's backward: read its peaks, and close it."""
        if not window.is_running:  # the session was detached meanwhile
            return
        window.is_running = False
        level = window.peak_bytes
        if window.trace is not None:
            window.trace.end()
            level = max(level, window.trace.peak_bytes)
        self._wall_of = None
        if self._limit.has_wall:
            self._limit.drop_wall()
        peaks = self._limit.fold(level)
        window.peak_bytes = peaks.level_bytes
        if len(self.open) > 1:
            self.note_peak(peaks.level_bytes)
        if self._findings.deferred:
            self._findings.read_deferred()
        observed = peaks if self._meter.reads_peak else None
        if window.outcome is not None:
            self._end_again(window, observed)
            return
        if window.carried_bytes:
            self._releases = window.released_bytes > window.carried_bytes // 2
        if len(window.steps) > 1:
            self._part_with_others(window)
        self._end_once(window, observed)

    def _part_with_others(self, window: _Window) -> None:
        """Remove forwards that the backward did not go through.

        If their graphs are still there, their backward may still run: then each becomes
        a window by itself.
        """
        others = [step for step in window.steps if not step.has_gradient]
        if others:
            window.discard_readings(_NOT_ALL)
        for step in others:
            window.steps.remove(step)
            step.part_with(window)
        self._close_dead()

    def _end_once(self, window: _Window, peaks: Peaks | None) -> None:
        steps, plan = window.steps, window.plan
        step_input = _joined(steps)
        if plan is not None and (window.reason or plan[0] != step_input):
            is_alike = plan[0].context == step_input.context
            reason = window.reason or (OTHER_SIZES if is_alike else OTHERS)
            for step in steps:
                step.withdraw(reason)
        growth = steps[-1].decision.growth_bytes  # predicted with all forwards known
        seconds = []
        for step in steps:
            self.open.remove(step)
            if step.decision.growth_bytes != growth:
                step.decision = replace(step.decision, growth_bytes=growth)
            seconds.append(time.perf_counter() - step.forward.began)
        if window.is_left:
            self._shared_until = self.n_begun + LATELY
        ended: Ending = "unclear" if window.is_left else "once"
        window.outcome = self._close(steps, ended, "", peaks, seconds, step_input)

    def _end_again(self, window: _Window, peaks: Peaks | None) -> None:
        """Record the peaks of another backward through a closed window.

        If another forward has begun since, it ran while this window held memory: such
        steps are not planned for a while.
        """
        assert window.outcome is not None
        is_mixed = self.n_begun > window.steps[-1].forward.number + 1
        if is_mixed:
            self._shared_until = self.n_begun + LATELY
        ended: Ending = "unclear" if is_mixed or window.is_left else "again"
        seconds = [record.seconds for record in window.outcome.records]
        self._close(window.steps, ended, _TWO_BACKWARDS, peaks, seconds)

    def _close(
        self,
        steps: Sequence[Step],
        ended: Ending,
        reason: str,
        peaks: Peaks | None = None,
        seconds: Sequence[float | None] = (),
        step_input: StepInput | None = None,
    ) -> StepOutcome:
        """Make the outcome of a window's forwards, and have it learned.

        Args:
            steps: The forwards.
            ended: How often their backward has run to its end.
            reason: Why they are no ordinary step; "" for their decisions' reasons.
            peaks: The readings; None if not known.
            seconds: Of each forward; empty without an end.
            step_input: Their inputs as one; None to join them.
        """
        window, decision = steps[-1].window, steps[-1].decision
        records = []
        for step, taken in zip_longest(steps, seconds):
            records.append(step.record(reason, peaks, taken))
        step_input, measured = step_input or _joined(steps), None
        if window.trace is not None and ended == "once":
            measured = self._measured(window, window.trace, step_input)
        outcome = StepOutcome(
            step_input,
            tuple(map(_INPUT, steps)) if len(steps) > 1 else (step_input,),
            decision,
            window.memory,
            ended,
            tuple(records),
            peaks,
            not window.is_shared,
            measured,
            window.began,
        )
        self._learning.absorb(outcome)
        return outcome

    def _measured(
        self, window: _Window, trace: Trace, step_input: StepInput
    ) -> MeasuredStep | None:
        """Return what a window has shown; None if nothing can be learned from it."""
        if trace.why_discarded or window.is_shared:
            return None
        calls, menu = trace.calls, self._learning.menu
        start = int(window.memory.start_bytes)
        growth = max(0, window.peak_bytes - start)
        # What a plan could grow by: all kept, or all the headroom.
        kept = sum(
            call.held_bytes[menu.first] - call.held_bytes[call.action]
            for call in calls
            if call.action != menu.first and call.held_bytes
        )
        headroom = window.memory.budget_bytes - start
        return MeasuredStep(
            step_input,
            calls,
            analyse(trace.marks, calls, menu),
            window.released_bytes,
            window.counts[-1],
            window.counts[:-1],
            max(growth, min(growth + kept, headroom)),
        )


_INPUT = operator.attrgetter("forward.step_input")


def _joined(steps: Sequence[Step]) -> StepInput:
    """Return the input of a window's forwards as one."""
    if len(steps) == 1:
        return steps[0].forward.step_input
    return joined(list(map(_INPUT, steps)))


def _bytes_of(outputs: _Retained) -> int:
    """Return how many bytes of some outputs are still held."""
    return sum([n for ref, n in outputs.values() if ref() is not None])


def is_in_backward() -> bool:
    """Whether this is called from within a backward."""
    return current_graph_task() != NO_GRAPH_TASK
