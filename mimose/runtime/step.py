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

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from mimose.budget import format_bytes
from mimose.cost.measured import MeasuredStep, ran_least
from mimose.cost.problem import Memory
from mimose.memory.marks import Trace, analyse, without_readings
from mimose.memory.meters import Meter
from mimose.policy import LATELY, OTHER_SIZES, OTHERS, Decision, joined
from mimose.predictors import SafetyMargin
from mimose.records import Peaks, StepRecord
from mimose.runtime.seconds import Mark
from mimose.runtime.unplanned import NO_GRADIENT
from mimose.tensors import tensors_in
from mimose.torch_private import (
    NO_GRAPH_TASK,
    current_graph_task,
    queue_callback,
    storage_key,
)
from mimose.types import Measured, StepInput

if TYPE_CHECKING:
    from mimose.exactness.layer import Layer
    from mimose.runtime.engine import Engine

_log = logging.getLogger(__name__)

# ------------------------------------------------------------ outcome


def _learn(
    engine: Engine, window: Window, step_input: StepInput, record: StepRecord
) -> None:
    """Give what a step has shown to the cost model, the policy and the memory limit.

    Args:
        engine: The session's parts.
        window: Its forwards; its backward has ended.
        step_input: What was known before it ran.
        record: The record of its last forward.
    """
    growth, is_over = record.observed_growth_bytes, record.is_over
    headroom = window.memory.budget_bytes - record.start_bytes
    if window.trace is not None and not window.trace.spoilt:
        _teach(engine, window, window.trace, step_input, record)
    if growth is not None:
        engine.memory_limit.observe()
    if is_over and engine.plans:
        _note_over(engine, record)
    if record.phase == "plan" and engine.plans and not engine.has_planned:
        engine.has_planned = True
        _log.info(
            "mimose: first plan, in step %d: %d of %d layer calls are recomputed (%s)",
            record.step,
            record.n_recomputed,
            len(record.actions),
            dict(record.shape),
        )
    decision = window.steps[-1].decision
    engine.policy.absorb(
        step_input, decision, growth, headroom_bytes=headroom, is_over=is_over
    )


def _note_over(engine: Engine, record: StepRecord) -> None:
    engine.learner.distrust_plans()
    engine.n_over += 1
    if engine.n_over & (engine.n_over - 1):
        return  # the 1st, 2nd, 4th, 8th … get a line
    reached = format_bytes(record.highest_bytes or 0)
    is_least = 0 < len(record.actions) == record.n_recomputed
    _log.warning(
        "mimose: step %d reached %s, over the budget of %s (phase %s, %s; steps over "
        "so far: %d)%s",
        record.step,
        reached,
        format_bytes(record.budget_bytes),
        record.phase,
        dict(record.shape),
        engine.n_over,
        f". Everything was recomputed: such a step needs a budget of {reached}"
        if is_least
        else "",
    )


def _teach(
    engine: Engine,
    window: Window,
    trace: Trace,
    step_input: StepInput,
    record: StepRecord,
) -> None:
    """Let the cost model learn from a measured step."""
    calls, learner, menu = trace.calls, engine.learner, window.steps[-1].menu
    sample = analyse(trace.marks, calls, menu)
    if learner.n_steps == 0:
        sample = without_readings(sample)
    growth = max(0, window.peak_bytes - record.start_bytes)
    headroom = window.memory.budget_bytes - record.start_bytes
    # What a plan could grow by: all kept, or all the headroom.
    keep = learner.model.menu.first
    kept = sum(
        call.held_bytes[keep] - call.held_bytes[call.action]
        for call in calls
        if call.action != keep and call.held_bytes
    )
    known = learner.model.patterns.get(step_input.context)
    families = {e.place: e.family for e in known.calls} if known is not None else {}
    ran = {(call.layer, call.number): call.family for call in calls}
    if [*families] == [*ran] and families != ran:
        engine.describer.waits_for_masks = True
    engine.calls.gauges.split_families(
        [e for e in calls if e.held_bytes and menu.spec(e.action).recomputes]
    )
    learner.absorb(
        MeasuredStep(
            step_input,
            calls,
            sample,
            window.released_bytes,
            window.counts,
            window.between,
            max(growth, min(growth + kept, headroom)),
        )
    )
    if engine.meter.reads_peak and ran_least(learner.model, calls):
        state = float(engine.optimizers.state_bytes)
        engine.policy.least_peaks.add(step_input, window.peak_bytes, growth, state)


# ------------------------------------------------------------ step

Retained: TypeAlias = Mapping[int, tuple[Callable[[], object], int]]
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


class Window:
    """The forwards before one backward: Note: [A window].

    Args:
        memory: What was held when the first began, and the budget.
        carried: The outputs of the step before, which are held at its start.

    Attributes:
        carried: The argument.
        carried_bytes: The bytes of these outputs that were held at its start.
        released_bytes: The bytes of these outputs that were freed before its backward.
        steps: Its forwards that have ended.
        trace: Records its boundaries; None if it is not measured.
        planned: The step input of the last plan; None before.
        decision: The last decision; None before.
        counts: How often each layer was called, at the end of the last forward.
        between: The same at the end of each forward but the last.
        reason: Why it is not an ordinary window; "" if it is.
        is_shared: Whether nothing can be learned from it as a step.
        is_left: Whether it is one forward that another window's backward left out.
        is_running: Whether its backward is running.
        is_closed: Whether its outcome was made.
        peak_bytes: The highest level so far.
        peaks: The readings at the end of its backward; None before.
        began: When its first forward began.
    """

    def __init__(self, memory: Memory, carried: Retained) -> None:
        self.memory = memory
        self.carried = carried
        self.carried_bytes = _alive(carried) if carried else 0
        self.released_bytes = 0
        self.steps: list[Step] = []
        self.trace: Trace | None = None
        self.planned: StepInput | None = None
        self.decision: Decision | None = None
        self.counts: tuple[int, ...] = ()
        self.between: tuple[tuple[int, ...], ...] = ()
        self.reason = ""
        self.is_shared = self.is_left = False
        self.is_running = self.is_closed = False
        self.peak_bytes = 0
        self.peaks: Peaks | None = None
        self.began: Mark | None = None

    def add(self, step: Step, counts: tuple[int, ...]) -> None:
        """Add a forward that has ended."""
        if self.steps:
            self.between = (*self.between, self.counts)
        self.steps.append(step)
        self.counts = counts

    @property
    def parts(self) -> list[StepInput]:
        """The step inputs of its forwards."""
        return [step.step_input for step in self.steps]

    def give_up(self, reason: str) -> None:
        """Run the rest under the safest plan, without a prediction."""
        self.reason = self.reason or reason

    def spoil(self, reason: str) -> None:
        """Learn nothing from it, because its readings are not those of one step."""
        self.reason, self.is_shared = reason, True
        self.stop_reading()

    def stop_reading(self) -> None:
        """Stop measuring."""
        if self.trace is not None:
            self.trace.is_closed = True
            self.trace = None


class Step:
    """One forward of the model, until its backward has ended.

    Args:
        engine: The session's parts.
        step_input: Its context and sizes.
        shape: The sizes that vary, by name.
        decision: Its decision.
        window: The forwards before the same backward.
    """

    def __init__(
        self,
        engine: Engine,
        step_input: StepInput,
        shape: Mapping[str, int],
        decision: Decision,
        window: Window,
    ) -> None:
        self.number = engine.steps.n_begun
        """The number of this forward."""
        self.step_input = step_input
        self.shape = shape
        self.window = window
        self.part = len(window.steps)
        """The index of this forward in its window."""
        self.counts_before = window.counts
        """How often each layer was called in the window before; () for the first."""
        self.has_gradient = False
        """Whether one of its outputs got a gradient, so that its backward has begun."""
        self.retries = 0
        self.flops = 0
        """Estimated FLOPs of recomputations that are in no plan."""
        self.has_wall = False
        """Whether the allocator enforces the budget during the step."""
        self.plan_seconds = 0.0
        self.menu = engine.learner.model.menu
        self._action_at = engine.action_at
        self._is_baseline = not engine.plans
        self._budget_bytes = engine.memory_limit.budget_bytes
        self._began = time.perf_counter()
        self._seconds: float | None = None
        self._unplanned: list[str] = []
        """The actions of layer calls that are in no plan."""
        self._calls: list[Measured] | None = None
        """The measurements of its layer calls; None if it was not measured."""
        self.graph: weakref.ref[Any] | None = None
        """Alive as long as a backward can follow."""
        self.unseen = ""
        """Why its backward cannot be seen; "" if it can."""
        self.start_bytes = int(window.memory.start_bytes)
        self._take(decision)

    # ------------------------------------------------------------------ forward

    def _take(self, decision: Decision) -> None:
        """Apply a decision, before any of the step's layers has run."""
        self.decision = decision
        self.phase = decision.phase
        self.reason = decision.reason
        self.growth_bytes = decision.growth_bytes
        is_planned = decision.chosen is not None and not decision.is_measured
        is_shared = self.window.is_shared  # nothing can be learned from it
        self.is_measured = not (self._is_baseline or is_planned or is_shared)
        """Whether the step is measured."""
        if self.part:  # like the first forward of the window
            self.is_measured = self.window.trace is not None

    @property
    def is_safest(self) -> bool:
        """Whether it runs again, with everything recomputed.

        A step without a plan does that from the start: a fallback changes nothing.
        """
        return self.retries > 0 and self.decision.chosen is None

    def keeps(self, layers: Sequence[Layer]) -> bool:
        """Whether its plan does less than to recompute every layer that can run again.

        Args:
            layers: The model's layers.
        """
        if self.decision.chosen is None:
            return False
        return any(
            not layer.is_kept and any(action != self.menu.least for action in actions)
            for layer, actions in zip(
                layers, self.decision.chosen.by_layer, strict=True
            )
        )

    def run_again(self, reason: str, *, changes_plan: bool = True) -> None:
        """Record that the forward runs again, or that the last step has failed.

        Args:
            reason: Why.
            changes_plan: Whether to use the safest plan from now on.
        """
        self.retries += 1
        self._unplanned.clear()
        if not changes_plan:
            self.reason = self.reason or reason
            return
        self.window.give_up(reason)
        self._action_at = None
        is_whole = self.decision.is_whole
        self._take(Decision("fallback", None, reason=reason, is_whole=is_whole))

    def start(self, meter: Meter) -> None:
        """Start a new peak, and begin to measure if the step is measured."""
        window = self.window
        if self.part:
            if self.retries:
                window.stop_reading()
            self.is_measured = window.trace is not None
            if window.trace is not None:
                window.trace.join_forward()
            return
        window.trace = None
        if not self.is_measured:
            meter.reset_peak()
            return
        self.start_bytes = meter.settled_bytes(0)
        window.memory = window.memory._replace(start_bytes=float(self.start_bytes))
        window.trace = Trace(meter, self._budget_bytes)
        window.trace.mark("start")

    def next_action(self) -> str:
        """Return the action of a layer call that is in no plan."""
        at = len(self._unplanned)
        action = self._action_at(at) if self._action_at else self.menu.least
        self._unplanned.append(action)
        return action

    def note_ran(self, decision: Decision | None) -> None:
        """Record which layer calls its forward ran.

        Args:
            decision: The decision for exactly these calls; None if other or more layers
                ran than planned.
        """
        if decision is not None:
            self.decision = decision
            self.growth_bytes = decision.growth_bytes
            self.reason = self.reason or decision.reason
            return
        chosen = self.decision.chosen
        what = "other" if chosen is not None and chosen.between else "more"
        self.phase = "fallback"
        self.withdraw(f"{what} layers ran than in measured steps with such inputs")

    def withdraw(self, reason: str) -> None:
        """Withdraw the prediction, for a reason."""
        self.growth_bytes, self.reason = None, reason
        self.decision = replace(self.decision, growth_bytes=None)

    def backward_bytes(
        self, peak_bytes: int, held_bytes: int, margin: SafetyMargin
    ) -> float | None:
        """Estimate, as its forward ends, up to which level its backward grows.

        Without a prediction each layer is taken to need twice as much as in its
        forward: its tensors once more, and as many gradients. (Without this, 10 of 720
        forwards with one huge block ran again in `benchmarks.proofs backward`, with it
        8.) None if more forwards follow.

        Args:
            peak_bytes: The highest level since the last reset.
            held_bytes: The level now.
            margin: By how much predictions may miss.
        """
        chosen, start = self.decision.chosen, self.window.memory.start_bytes
        if chosen is not None:
            growth = margin.allowed(chosen.growth.after_release_bytes)
            follows = self.part < len(chosen.between)
            return (
                None if follows else start + growth - self.window.memory.released_bytes
            )
        if self.decision.growth_bytes is not None:
            return start + self.decision.growth_bytes
        if self.window.trace is not None:
            peak_bytes = max(peak_bytes, self.window.trace.peak_bytes)
        return held_bytes + 2.0 * (peak_bytes - held_bytes)

    def keep_calls(self) -> None:
        """Record what was measured of its layer calls, as its forward ends."""
        trace = self.window.trace
        if trace is not None:
            self._calls = [e for e in trace.calls if e.part == self.part]

    # ------------------------------------------------------------------ backward

    @property
    def can_come(self) -> bool:
        """Whether its graph is still there."""
        return self.graph is not None and self.graph() is not None

    def close(self, reason: str = "", *, has_ended: bool) -> StepRecord:
        """Close the step, and return its record.

        Args:
            reason: Why it is not an ordinary step; "" keeps an earlier reason.
            has_ended: Whether its backward has run to its end.
        """
        self.reason = reason or self.reason
        if has_ended:
            self._seconds = time.perf_counter() - self._began
        return self.record()

    def record(self) -> StepRecord:
        """Return a record of what is known of the step now."""
        growth, peaks = self.growth_bytes, self.window.peaks
        chosen, found = self.decision.chosen, self._calls
        actions, flops = tuple(self._unplanned), self.flops
        calls: tuple[str, ...] = ()
        if found is not None:
            actions = tuple([call.action for call in found])
            calls = tuple([call.name for call in found])
            flops = sum([call.flops for call in found])
        elif chosen is not None:
            own = chosen.calls_of(self.part)
            actions, calls = chosen.plan.actions[own], chosen.calls[own]
            if self._seconds is not None:
                flops += sum(chosen.flops[own])
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
            plan_seconds=self.plan_seconds,
            recomputed_flops=flops,
            retries=self.retries,
            reason=self.reason,
            events=calls,
            seconds=self._seconds,
            reserved_peak_bytes=peaks and peaks.reserved_bytes,
            alloc_retries=peaks and peaks.n_retries,
        )


class Steps:
    """Follows the steps whose backward may still run, each to its outcome.

    Args:
        engine: The session's parts.

    Attributes:
        n_begun: Forwards begun so far.
        open: Steps between the end of their forward and the end of their backward.
        retained: The last step's outputs, by weak references.
        is_shared: Whether the current forward is part of a step that cannot be planned.
        releases: Whether the user frees a step's outputs before the next backward.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._memory_limit = engine.memory_limit
        self._window: Window | None = None
        self._shared_until = -1
        self._wall_of: weakref.ref[Any] | None = None
        """The last forward's graph. If it is freed without a backward, the memory limit
        is lifted."""
        self.n_begun = 0
        self.open: list[Step] = []
        self.retained: Retained = {}
        self.is_shared = self.releases = False
        self._is_finished = False

    # ------------------------------------------------------------------ forwards

    def begin(self) -> Window | None:
        """Close the steps that get no backward any more, as a forward begins.

        If user code runs the forward inside a backward, steps whose backward has begun
        stay open.

        Returns:
            The window that the forward joins; None if it begins one.
        """
        self._wall_of = None
        is_inside = current_graph_task() != NO_GRAPH_TASK
        self.is_shared = is_inside or self.n_begun < self._shared_until
        if self._engine.findings.deferred:  # of a step without a backward
            self._engine.findings.read_deferred()
        if self.open:
            self._settle(is_inside=is_inside)
        if is_inside or self._window is None:
            return None
        self.note_peak(self._memory_limit.fold().level_bytes)
        return self._window

    @property
    def has_window(self) -> bool:
        """Whether there are forwards whose backward runs or may still run."""
        return any(s.can_come and not s.window.is_left for s in self.open)

    def _settle(self, *, is_inside: bool) -> None:
        windows = {id(step.window): step.window for step in self.open}.values()
        for window in windows if not is_inside else ():
            if window.is_running:
                window.is_running, window.is_closed = False, True
                self._close_unlearned(window.steps, _NO_END)
        self._close_dead()

    def _close_dead(self) -> None:
        """Close steps whose graph was freed, and remove them from their windows."""
        for step in [step for step in self.open if not step.can_come]:
            window = step.window
            if window.is_running:
                continue
            if len(window.steps) > 1:
                window.spoil(_NOT_ALL)
            self._close_unlearned([step], step.unseen or _NO_END)
            window.steps.remove(step)
            if window is self._window and not window.steps:
                self._window = None

    def _close_unlearned(self, steps: Sequence[Step], reason: str) -> None:
        for step in list(steps):
            self.open.remove(step)
            self._engine.records.close(step.close(reason, has_ended=False))

    def forward_ended(self, step: Step, output: Any, counts: tuple[int, ...]) -> None:
        """Prepare for the backward of a step.

        Args:
            step: The step.
            output: What the model returned.
            counts: How often each layer was called in its window.
        """
        window = step.window
        if window.trace is not None:
            step.keep_calls()
        is_one = isinstance(output, torch.Tensor)
        tensors = [output] if is_one else list(tensors_in(output))
        # Only the outputs' graph refers to this hook: Note: [The end of backward].
        graph, is_waiting = partial(self._note_gradient, step), False
        retained = dict(self.retained) if step.part else {}
        for tensor in tensors:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(graph)
                is_waiting = True
            if tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage.nbytes() >= _LEAST_OUTPUT_BYTES:
                    own = weakref.ref(storage), storage.nbytes()
                    retained[storage_key(storage)] = own
        self.retained = retained
        step.graph = weakref.ref(graph)
        if not is_waiting:
            kind = type(output).__name__
            step.unseen = _NO_GRADIENT if tensors else _NO_TENSOR.format(kind)
        if tensors and not is_waiting:
            self._engine.unplanned.note(NO_GRADIENT)
        else:
            self._engine.unplanned.planned()
        limit = self._memory_limit
        self._wall_of = weakref.ref(graph, lambda _: limit.drop_wall())
        window.add(step, counts)
        self._window = window
        self.open.append(step)

    def abort(self, step: Step, error: BaseException) -> None:
        """Close a step whose forward has failed for good."""
        reason = f"forward raised {type(error).__name__}"
        step.keep_calls()
        if step.part:
            step.window.spoil(reason)
        step.window.stop_reading()
        self._memory_limit.drop_wall()
        self.note_peak(self._memory_limit.fold().level_bytes)
        self._engine.records.close(step.close(reason, has_ended=False))

    def abandon(self) -> None:
        """Begin a new window with the next forward, because the last step failed."""
        self._settle(is_inside=False)
        self._window = None

    def finish(self) -> None:
        """Close everything, as the session ends."""
        self.note_peak(self._memory_limit.fold().level_bytes)
        self._settle(is_inside=False)
        self._close_unlearned(self.open, _DETACHED)
        self._is_finished = True

    def note_peak(self, level_bytes: int) -> None:
        """Record a peak for each open step."""
        for step in self.open:
            step.window.peak_bytes = max(step.window.peak_bytes, level_bytes)

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
        if window.carried_bytes and not window.is_closed:
            window.released_bytes = window.carried_bytes - _alive(window.carried)
        if self._window is window:
            self._window = None
        if step.has_wall:
            # An evaluation or an optimizer step since then may have lifted the limit.
            self._memory_limit.raise_wall(keeps_grace=True)
        # Queued twice, to run after callbacks queued since (FSDP2 reduces gradients).
        queue_callback(partial(queue_callback, partial(self._end_backward, window)))

    def _end_backward(self, window: Window) -> None:
        """End a window's backward: read its peaks, and close it."""
        if not window.is_running:  # the session was detached meanwhile
            return
        window.is_running = False
        level = window.peak_bytes
        if window.trace is not None:
            window.trace.end()
            level = max(level, window.trace.peak_bytes)
        self._wall_of = None
        if self._memory_limit.has_wall:
            self._memory_limit.drop_wall()
        peaks = self._memory_limit.fold(level)
        window.peak_bytes = peaks.level_bytes
        if self._engine.meter.reads_peak:
            window.peaks = peaks
        if len(self.open) > 1:
            self.note_peak(peaks.level_bytes)
        if self._engine.findings.deferred:
            self._engine.findings.read_deferred()
        if window.is_closed:
            self._end_again(window)
            return
        window.is_closed = True
        if window.carried_bytes:
            self.releases = window.released_bytes > window.carried_bytes // 2
        if len(window.steps) > 1:
            self._part_with_others(window)
        self._close_window(window)

    def _part_with_others(self, window: Window) -> None:
        """Remove forwards that the backward did not go through.

        If their graphs are still there, their backward may still run: then each becomes
        a window by itself.
        """
        others = [step for step in window.steps if not step.has_gradient]
        if others:
            window.spoil(_NOT_ALL)
        for step in others:
            window.steps.remove(step)
            step.window = Window(window.memory, {})
            step.window.spoil(_NOT_ALL)
            step.window.add(step, window.counts)
            step.window.is_left = True
        self._close_dead()

    def _close_window(self, window: Window) -> None:
        last, parts = window.steps[-1], window.parts
        step_input = parts[0] if len(parts) == 1 else joined(parts)
        if window.is_left:
            self._shared_until = self.n_begun + LATELY
        elif self._engine.plans:
            self._engine.policy.windows.absorb(parts, 1)
        if window.planned is not None and (
            window.reason or window.planned != step_input
        ):
            is_alike = window.planned.context == step_input.context
            for step in window.steps:
                step.withdraw(window.reason or (OTHER_SIZES if is_alike else OTHERS))
        actions: list[str] = []
        n_retries = 0
        for step in window.steps:
            self.open.remove(step)
            step.growth_bytes = last.growth_bytes  # predicted with all forwards known
            record = step.close(has_ended=True)
            self._engine.records.close(record)
            actions += record.actions
            n_retries += record.retries
        if window.began is not None and not n_retries:
            self._engine.seconds.step_ended(window.began, step_input, actions)
        if not window.is_shared:
            _learn(self._engine, window, step_input, record)

    def _end_again(self, window: Window) -> None:
        """Record the peaks of another backward through a closed window.

        If another forward has begun since, it ran while this window held memory: such
        steps are not planned for a while.
        """
        if self.n_begun > window.steps[-1].number + 1:
            self._shared_until = self.n_begun + LATELY
        elif self._engine.plans and not window.is_left:
            self._engine.policy.windows.absorb(window.parts, 2)
            if not window.is_shared:
                self._engine.learner.take_back()
        for step in window.steps:
            step.reason = _TWO_BACKWARDS
            self._engine.records.close(step.record())


def _alive(outputs: Retained) -> int:
    """Return how many bytes of some outputs are still held."""
    return sum(n for ref, n in outputs.values() if ref() is not None)


def is_in_backward() -> bool:
    """Whether this is called from within a backward."""
    return current_graph_task() != NO_GRAPH_TASK
