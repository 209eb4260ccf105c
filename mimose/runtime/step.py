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

import enum
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from mimose.budget import format_bytes
from mimose.cost.measured import ran_least
from mimose.cost.problem import Memory
from mimose.exceptions import MimoseError
from mimose.memory.marks import Trace, analyse, without_readings
from mimose.memory.meters import Meter
from mimose.policy import LATELY, OTHERS, Decision, joined
from mimose.records import Peaks, StepRecord
from mimose.runtime.seconds import Mark
from mimose.tensors import tensors_in
from mimose.torch_private import (
    NO_GRAPH_TASK,
    current_graph_task,
    queue_callback,
    storage_key,
)
from mimose.types import Measured, StepInput, StepSample

if TYPE_CHECKING:
    from mimose.runtime.engine import Engine

_log = logging.getLogger(__name__)

# ------------------------------------------------------------ outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """Everything that the cost model, the policy and the records learn of a step."""

    step_input: StepInput
    """What was known before it ran."""
    decision: Decision
    """The decision before it ran."""
    records: tuple[StepRecord, ...]
    """A record for each forward."""
    calls: tuple[Measured, ...]
    """The measurements of each layer call, in the order in which they ran."""
    sample: StepSample | None
    """The samples of all segments; None if the step was not measured."""
    peak_bytes: int
    """The highest level."""
    headroom_bytes: float
    """The budget minus what was held when it began."""
    counts: tuple[int, ...]
    """How often each layer was called."""
    between: tuple[tuple[int, ...], ...]
    """The same at the end of each forward but the last."""
    released_bytes: float
    """Outputs of an earlier step that were freed before the first gradient."""
    is_shared: bool
    """Whether forwards ran before its backward that did not belong to it."""


def learn(engine: Engine, outcome: StepOutcome) -> None:
    """Give a step's outcome to the cost model, the policy and the records.

    Only they change what is known.

    Args:
        engine: The session's parts.
        outcome: The outcome of a step whose backward has ended.
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
    engine.policy.absorb(
        outcome.step_input,
        outcome.decision,
        growth,
        headroom_bytes=outcome.headroom_bytes,
        is_over=is_over,
    )


def _note_over(engine: Engine, record: StepRecord) -> None:
    engine.policy.distrust_plans()
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


def _teach(engine: Engine, outcome: StepOutcome, sample: StepSample) -> None:
    """Let the cost model learn from a measured step."""
    calls, learner = outcome.calls, engine.learner
    if learner.n_steps == 0:
        sample = without_readings(sample)
    growth = max(0, outcome.peak_bytes - outcome.records[-1].start_bytes)
    # What a plan could grow by: all kept, or all the headroom.
    keep = learner.model.menu.first
    kept = sum(
        call.held_bytes[keep] - call.held_bytes[call.action]
        for call in calls
        if call.action != keep and call.held_bytes
    )
    known = learner.model.patterns.get(outcome.step_input.context)
    if known is not None and [e.place for e in known.calls] == [
        (call.layer, call.number) for call in calls
    ]:
        pairs = zip(known.calls, calls, strict=True)
        if any(own.family != call.family for own, call in pairs):
            engine.describer.waits_for_masks = True
    learner.absorb(
        outcome.step_input,
        calls,
        sample,
        outcome.released_bytes,
        outcome.counts,
        outcome.between,
        growth_bytes=max(growth, min(growth + kept, outcome.headroom_bytes)),
    )
    if engine.meter.reads_peak and ran_least(learner.model, calls):
        state = float(engine.optimizers.state_bytes)
        peak = outcome.peak_bytes
        engine.policy.least_peaks.add(outcome.step_input, peak, growth, state)


# ------------------------------------------------------------ step

Retained: TypeAlias = Mapping[int, tuple[Callable[[], object], int]]
"""By storage of an output of the last step: a function that returns it while the user
holds it, and its bytes. It is part of the next step's start, and is usually freed when
the new outputs replace it: after that forward, before its backward."""

_LEAST_OUTPUT_BYTES = 65536
"""Smaller outputs are ignored."""
_NOT_ALL = "the backward did not go through all forwards before it"
_TWO_BACKWARDS = "two backwards"
_NO_END = "the backward did not run to its end, or not through the outputs"
_NO_GRADIENT = "the model's outputs need no gradient, so no backward was observed"
_NO_BACKWARD = "no backward followed"
_DETACHED = "detached before the backward"


class Stage(enum.Enum):
    """The stage of a step: Note: [A step's stages]."""

    FORWARD = enum.auto()
    WAITING = enum.auto()
    BACKWARD = enum.auto()
    CLOSED = enum.auto()


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
        parts: Their step inputs.
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
        self.parts: list[StepInput] = []
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

    @property
    def before(self) -> tuple[StepInput, Decision] | None:
        """The decision for the forward before this one; None for the first."""
        if not self.steps or self.planned is None or self.decision is None:
            return None
        return self.planned, self.decision

    def add(self, step: Step, counts: tuple[int, ...]) -> None:
        """Add a forward that has ended."""
        if self.steps:
            self.between = (*self.between, self.counts)
        self.steps.append(step)
        self.parts.append(step.step_input)
        self.counts = counts

    def remove(self, step: Step) -> None:
        """Remove a forward that does not belong to the backward."""
        del self.parts[self.steps.index(step)]
        self.steps.remove(step)

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
            self.trace.close()
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
        self.stage = Stage.FORWARD
        self.retries = 0
        self.flops = 0
        """FLOPs counted in recomputations whose plan does not know them."""
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

    def run_again(self, reason: str) -> None:
        """Use the safest plan from now on, because this step or the last has failed."""
        self.retries += 1
        self.window.give_up(reason)
        self._action_at = None
        self._unplanned.clear()
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
        if self.growth_bytes is not None:
            # Trying other actions does not change the prediction.
            window.trace.predicted_bytes = self.start_bytes + self.growth_bytes

    def next_action(self) -> str:
        """Return the action of a layer call that is in no plan.

        Raises:
            MimoseError: A baseline planner returned an action that is not in use.
        """
        at, action = len(self._unplanned), self.menu.least
        if self._action_at is not None:
            action = self._action_at(at)
            if action not in self.menu.names:
                msg = (
                    f"the planner's action_at({at}) returned {action!r}, which is not "
                    f"one of the actions in use: {', '.join(self.menu.names)}"
                )
                raise MimoseError(msg)
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

    @property
    def why_dead(self) -> str:
        """Why no end of a backward was seen."""
        calls = self._calls or ()
        if self.stage is Stage.BACKWARD or any(e.has_gradient for e in calls):
            return self.unseen or _NO_END
        return self.unseen or _NO_BACKWARD

    def close(self, reason: str = "", *, has_ended: bool) -> StepRecord:
        """Close the step, and return its record.

        Args:
            reason: Why it is not an ordinary step; "" keeps an earlier reason.
            has_ended: Whether its backward has run to its end.
        """
        self.stage = Stage.CLOSED
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
                flops += sum(self.decision.flops[own])
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
            allocated_peak_bytes=peaks and peaks.allocated_bytes,
            alloc_retries=peaks and peaks.n_retries,
            is_optimal=chosen is not None and chosen.plan.optimal,
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
        self._device_checks = engine.device_checks
        self._window: Window | None = None
        self._shared_until = -1
        self._wall_of: weakref.ref[Any] | None = None
        """The last forward's graph. If it is freed without a backward, the memory limit
        is lifted."""
        self._has_missed = False
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
        if self._device_checks.deferred:  # by a step without a backward
            self._device_checks.read()
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
            self._close_unlearned([step], step.why_dead)
            window.remove(step)
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
        step.stage, step.graph = Stage.WAITING, weakref.ref(graph)
        if not is_waiting:
            step.unseen = self._unseen(tensors, output)
        self._wall_of = weakref.ref(graph, self._graph_gone)
        window.add(step, counts)
        self._window = window
        self.open.append(step)

    def _graph_gone(self, _: object) -> None:
        self._memory_limit.drop_wall()

    def _unseen(self, tensors: Sequence[torch.Tensor], output: object) -> str:
        """Return why the backward of a step will not be seen."""
        if tensors:
            return _NO_GRADIENT
        kind = type(output).__name__
        what = f"no tensors were found in the model's output ({kind})"
        if not self._has_missed:
            self._has_missed = True
            _log.warning(
                "mimose: %s, so steps cannot be measured and every layer is "
                "recomputed. "
                "Let the model return a tensor, a tuple, a dict or a dataclass",
                what,
            )
        return f"{what}, so its backward was not observed"

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
        if step.stage is Stage.WAITING:
            step.stage = Stage.BACKWARD
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
            self._memory_limit.raise_wall()
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
        peaks = self._memory_limit.fold()
        if level > peaks.level_bytes:
            self._memory_limit.note_level(level)
            peaks = peaks._replace(level_bytes=level)
        window.peak_bytes = peaks.level_bytes
        if self._engine.meter.reads_peak:
            window.peaks = peaks
        if len(self.open) > len(window.steps):
            self.note_peak(peaks.level_bytes)
        if self._device_checks.deferred:
            self._device_checks.read()
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
        others = [step for step in window.steps if step.stage is Stage.WAITING]
        if others:
            window.spoil(_NOT_ALL)
        for step in others:
            window.remove(step)
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
            self._engine.policy.windows.absorb(window.parts, 1)
        if window.planned is not None and (
            window.reason or window.planned != step_input
        ):
            for step in window.steps:
                step.withdraw(window.reason or OTHERS)
        records: list[StepRecord] = []
        actions: list[str] = []
        n_retries = 0
        for step in window.steps:
            self.open.remove(step)
            step.growth_bytes = last.growth_bytes  # predicted with all forwards known
            record = step.close(has_ended=True)
            records.append(record)
            actions += record.actions
            n_retries += record.retries
        if window.began is not None and not n_retries:
            self._engine.seconds.step_ended(window.began, step_input, actions)
        trace, sample = window.trace, None
        if trace is not None:
            sample = analyse(trace.marks, trace.calls, last.menu)
        learn(
            self._engine,
            StepOutcome(
                step_input=step_input,
                decision=last.decision,
                records=tuple(records),
                calls=() if trace is None else tuple(trace.calls),
                sample=sample,
                peak_bytes=window.peak_bytes,
                headroom_bytes=window.memory.budget_bytes - last.start_bytes,
                counts=window.counts,
                between=window.between,
                released_bytes=window.released_bytes,
                is_shared=window.is_shared,
            ),
        )

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
