"""The life of each step: from the root's forward to the end of its backward.

Note: [The end of backward]
A hook on the root's outputs asks the autograd engine to call back when the whole
backward is done, every gradient accumulated; it works with a loss computed outside
the model. Nothing but the outputs' graph refers to that hook, so once it is gone no
backward of the step can follow. A backward that avoids the outputs (an auxiliary loss
on an inner tensor alone) is not seen: its step closes without an observed peak.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from mimose.budget import format_bytes
from mimose.decide.infeasible import LeastPeaks
from mimose.decide.policy import Decision, Memory, Policy
from mimose.exact.handed import autograd_clock
from mimose.exceptions import InfeasibleBudgetError, MimoseError
from mimose.learn.estimator import Estimator
from mimose.measure.analysis import analyse, without_readings
from mimose.measure.meters import Meter
from mimose.measure.out_of_memory import is_out_of_memory
from mimose.measure.retained import Carried
from mimose.measure.trace import Trace
from mimose.planners import EveryK, Full, NoPlan, Planner
from mimose.records import Peaks, Records, StepRecord
from mimose.run.device_checks import DeviceChecks
from mimose.run.events import EventRunner
from mimose.run.findings import Findings
from mimose.run.footprint import Footprint
from mimose.run.infeasible import held_already, infeasible
from mimose.run.optimizer_watch import OptimizerWatch
from mimose.run.recovery import release_memory
from mimose.run.rollback import Rollback
from mimose.run.step import Step
from mimose.run.unit import LateChangeError, NotRecomputableError
from mimose.tensors import tensors_in, version
from mimose.types import KEEP, RECOMPUTE, StepFacts
from mimose.watch.compiled import is_compiled, n_graphs
from mimose.watch.describe import FactsReader
from mimose.watch.patch import Patch
from mimose.watch.shapes import argument_tensors
from mimose.watch.size_table import SizeTable

_log = logging.getLogger(__name__)

_RELEVANT = 0.5
"""Steps that grow by less of the headroom say nothing of the margin: noise is all."""
_SLACK = 0.005
"""Freed memory that a step may start with, as a share of what steps grow by."""
_SMALL = 4096
"""Buffers of so many elements are saved each step, in case they begin to change."""
_NO_END = "the backward did not run to its end, or not through the outputs"
_REFUSED = "the budget is too small for the variant that was expected"
_TRANSFORMED = (
    "the model was called inside a transform of torch.func (grad, vmap, jvp, …), whose "
    "tensors have no memory of their own to plan: detach the session before, or call a "
    "copy of the model that none is attached to"
)
_SHARED_STEPS = 20
"""Forwards after which several forwards before one backward are forgotten."""


def is_transformed() -> bool:
    """Whether a transform of torch.func is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class _Waiting:
    """The hook that only the outputs' graph refers to: Note: [The end of backward]."""

    __slots__ = ("__weakref__", "driver", "step")

    def __init__(self, driver: Driver, step: Step) -> None:
        self.driver = driver
        self.step = step

    def __call__(self, _: torch.Tensor) -> None:
        self.driver.backward_begins(self.step)


class RootPatch(Patch):
    """The root's forward: a step, in training with grad enabled.

    `torch.compile` of the root does not trace into it: what a step does is decided
    anew each time.

    Args:
        model: The root.
        driver: Runs its steps.
    """

    def __init__(self, model: nn.Module, driver: Driver) -> None:
        super().__init__(model)
        self._driver = driver
        disabled: Any = torch.compiler.disable(driver.run)  # type: ignore[no-untyped-call]
        self._run = disabled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, or pass straight through."""
        if self.is_removed or not self._driver.is_idle:
            return self.original(*args, **kwargs)
        if self._driver.plans and is_transformed():
            raise MimoseError(_TRANSFORMED)
        return self._run(lambda: self.original(*args, **kwargs), args, kwargs)


class Driver:
    """Runs the root's forwards: decides, runs, observes, learns.

    Args:
        model: The model.
        device: Where it is.
        footprint: What is held of the device, and the budget for that.
        budget_bytes: The budget.
        planner: The planner.
        policy: Decides what each step does.
        estimator: Learns from measured steps.
        events: Runs the units' calls.
        meter: Reads the memory.
        optimizers: Watches the optimizer's steps.
        checks: Looks at the device's settings before each step.
        records: Takes the records.
        findings: Takes note of units that have to be kept.
        warns: Whether an impossible budget warns rather than raises.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        device: torch.device,
        footprint: Footprint,
        budget_bytes: int,
        planner: Planner,
        policy: Policy,
        estimator: Estimator,
        events: EventRunner,
        meter: Meter,
        optimizers: OptimizerWatch,
        checks: DeviceChecks,
        records: Records,
        findings: Findings,
        warns: bool,
    ) -> None:
        self._model = model
        self._device = device
        self._footprint = footprint
        self._budget_bytes = budget_bytes
        self._planner = planner
        self._is_fixed = isinstance(planner, (NoPlan, Full, EveryK))
        self._is_compiled = is_compiled(model)
        self._graphs_at_clean_up = -1
        self._policy = policy
        self._estimator = estimator
        self._events = events
        self._meter = meter
        self._optimizers = optimizers
        self._checks = checks
        self._records = records
        self._warns = warns
        self._has_warned = False
        self._has_missed = False
        layers = [unit.module for unit in events.units]
        self._facts = FactsReader(model, device, layers)
        self._least = LeastPeaks()
        self._findings = findings
        self.rollback = Rollback(model, events.units, events.answers)
        self._carried = Carried([])
        self._releases = False
        self._open: list[Step] = []
        self._shared_until = -1
        self._is_running = False
        self._safest_once = False
        self._n_steps = 0
        self._is_first = True
        """Whether the running step is the session's first."""

    # ------------------------------------------------------------------ forward

    @property
    def plans(self) -> bool:
        """Whether plans are made; a baseline does the same in every step."""
        return not self._is_fixed

    @property
    def is_idle(self) -> bool:
        """Whether a forward of the root would begin a step."""
        return not self._is_running and self._model.training and torch.is_grad_enabled()

    def run(
        self,
        forward: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run one forward of the root as a step.

        Args:
            forward: Runs it.
            args: What it is given.
            kwargs: What it is given by name.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget at this shape.
            MimoseError: The inputs, or a setting of the device, cannot be planned for.
        """
        self._checks.before_step()
        inputs = [tensor for _, tensor in argument_tensors(args, kwargs)]
        versions = [version(tensor) for tensor in inputs]
        step = self._begin(args, kwargs)
        step.clock = autograd_clock()
        output, error = self._attempt(step, forward)
        while error is not None and self._prepare_retry(
            step, error, versions, inputs, args, kwargs
        ):
            error = None  # its traceback pins the tensors of the failed forward
            release_memory(self._device)
            self.rollback.restore()
            self._start(step)
            output, error = self._attempt(step, forward)
        if error is not None:
            self._abort(step, error)
            try:
                raise error
            finally:
                del error  # it refers to this frame, and this frame to the output
        self._forward_ends(step, output)
        return output

    def _attempt(
        self, step: Step, forward: Callable[[], Any]
    ) -> tuple[Any, BaseException | None]:
        chosen = step.decision.chosen
        self._is_running = True
        self._events.begin(step, None if chosen is None else chosen.by_unit)
        try:
            output = forward()
            self._events.refuse_unrepeatable(self.rollback.learn())
            return output, None
        except BaseException as error:  # every one is raised again, or retried
            return None, error
        finally:
            self._events.end()
            self._is_running = False

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Step:
        began = time.perf_counter()
        self._is_first = self._n_steps == 0
        start = self._begin_level()
        self._close_dead()
        self._events.answers.read()  # of a step without a backward
        is_shared = bool(self._open) and self._settle()
        facts, table = self._facts.read(args, kwargs)
        self._events.set_mode(self._facts.mode)
        is_again, self._safest_once = self._safest_once, False
        carried = self._carried.live_bytes()
        memory = self._memory(start, carried)
        decide = partial(self._decide, table, memory, is_shared, is_again)
        decision = self._expect(facts, decide) if facts.base else decide(facts)
        growth = decision.growth_bytes
        record = StepRecord(
            step=self._n_steps,
            shape=table.named(facts.sizes),
            phase=decision.phase,
            actions=(),
            budget_bytes=self._budget_bytes,
            start_bytes=start,
            predicted_peak_bytes=None if growth is None else start + growth,
            cache_hit=decision.cache_hit,
            retries=int(is_again),
            reason=decision.reason,
        )
        self._n_steps += 1
        step = Step(record, facts, decision, self._planner)
        if facts.base and not self._is_fixed:
            step.on_first_call = partial(self._settle_variant, step, table, decide)
        step.began = began
        step.n_graphs = self._graphs_at_clean_up
        if is_again:
            step.make_safest()
        step.carried_bytes = carried
        for other in self._open:  # if they get a backward, this forward is in it
            other.is_shared = True
        self._records.append(record)
        self.rollback.take(is_planned=self._is_fixed or self._is_planned(decision))
        self._make_room(step)
        record.plan_seconds = time.perf_counter() - began
        self._start(step)
        return step

    @staticmethod
    def _expect(facts: StepFacts, decide: Callable[[StepFacts], Decision]) -> Decision:
        """Decide for the variant that is expected; if that is refused, another may run.

        See `mimose.watch.variants`.
        """
        try:
            return decide(facts)
        except InfeasibleBudgetError:
            return Decision("fallback", None, reason=_REFUSED)

    def _settle_variant(
        self,
        step: Step,
        table: SizeTable,
        decide: Callable[[StepFacts], Decision],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Put a step right, if it is of another variant than was expected.

        Its first layer is about to run. A step that is run again stays the safest.
        """
        step.on_first_call = None
        expected = step.facts.context
        step.facts = self._facts.settle(step.facts, table, args, kwargs)
        is_expected = step.facts.context == expected
        is_settled = is_expected and step.decision.reason != _REFUSED
        if not is_settled and not step.record.retries:
            began = time.perf_counter()
            self._change(step, decide(step.facts))
            step.record.plan_seconds += time.perf_counter() - began
        step.spare = None

    def _change(self, step: Step, decision: Decision) -> None:
        """Make another decision that of a step none of whose layers has run."""
        step.decision, record = decision, step.record
        growth, chosen = decision.growth_bytes, decision.chosen
        record.phase, record.reason = decision.phase, decision.reason
        record.cache_hit = decision.cache_hit
        record.predicted_peak_bytes = (
            None if growth is None else record.start_bytes + growth
        )
        self._make_room(step, has_begun=True)
        step.trace = step.spare if self._is_measured(step) else None
        if step.trace is None:
            self.rollback.narrow()
        self._events.plan(None if chosen is None else chosen.by_unit)

    def _begin_level(self) -> int:
        """Return the level that a step starts from; the peaks before it are noted."""
        if self._is_compiled:
            self._clean_up_after_compiler()
        slack = max(5 * self._meter.noise_bytes, _SLACK * self._estimator.scale)
        start, peaks = self._footprint.begin(slack)
        self._note_peaks(peaks)
        return start

    def _make_room(self, step: Step, *, has_begun: bool = False) -> None:
        if self._is_fixed:
            return  # a baseline does as it would by itself
        decision = step.decision
        growth = decision.growth_bytes
        if growth is not None:
            growth += self._policy.margin.bytes(growth)
        chosen = decision.chosen
        actions = None if chosen is None else chosen.plan.actions
        facts = step.facts
        key = facts.context, facts.sizes, actions
        self._footprint.make_room(growth, key, has_begun=has_begun)

    def _clean_up_after_compiler(self) -> None:
        self._events.refuse_replaced()
        if self._graphs_at_clean_up != n_graphs():
            self._graphs_at_clean_up = n_graphs()
            self._meter.clean_up()

    def _start(self, step: Step) -> None:
        """Make the step ready to run: measured, or under its plan; start its peak."""
        is_measured = self._is_measured(step)
        step.trace = Trace(self._meter) if is_measured else None
        if step.trace is not None:
            self._start_from(step, self._meter.settled_bytes(0))
        step.spare = step.trace
        if step.on_first_call is not None:  # it may yet turn out one to measure
            step.spare = step.trace or Trace(self._meter)
        if step.spare is not None:
            step.spare.mark("start")
        else:
            self._meter.reset_peak()

    def _is_measured(self, step: Step) -> bool:
        """Settle what is counted and read in a step, and return whether any is read."""
        step.uncounted = None if self._is_fixed else step.decision.uncounted
        step.knows_flops = step.uncounted is not None and not step.uncounted
        is_measured = step.decision.is_measured or step.decision.chosen is None
        return is_measured and not self._is_fixed

    @staticmethod
    def _is_planned(decision: Decision) -> bool:
        return decision.chosen is not None and not decision.is_measured

    @staticmethod
    def _start_from(step: Step, start_bytes: int) -> None:
        """Put a step's record and prediction on another start."""
        record = step.record
        record.start_bytes = start_bytes
        if record.predicted_peak_bytes is not None:
            record.predicted_peak_bytes = start_bytes + (
                step.decision.growth_bytes or 0
            )

    def _memory(self, start: int, carried: int) -> Memory:
        return Memory(
            self._footprint.level_budget(start),
            float(start),
            float(carried) if self._releases else 0.0,
            self._optimizers.excess_bytes,
            # Nothing is planned before the first step was measured.
            self._optimizers.state_to_come_bytes if self._estimator.n_steps else 0.0,
        )

    def _decide(
        self,
        table: SizeTable,
        memory: Memory,
        is_shared: bool,
        is_again: bool,
        facts: StepFacts,
    ) -> Decision:
        if self._is_fixed and not is_again:
            return Decision("plan", None)
        reason = ""
        if is_shared or self._n_steps < self._shared_until:
            reason = "several forwards or backwards make up a step"
        elif is_again:
            reason = "the step is run again"
        elif not facts.sizes:
            reason = "the inputs hold no tensors, so there is no shape to plan for"
        found = None if reason else self._policy.cached(facts, table, memory)
        if found is not None:
            return found
        self._refuse_infeasible(facts, memory.start_bytes)
        if reason:
            return Decision("fallback", None, reason=reason)
        is_first = self._is_first
        return self._policy.decide(facts, table, memory, is_first=is_first)

    def refuse_held(self) -> None:
        """Make sure that the budget is not less than what is held already.

        Raises:
            InfeasibleBudgetError: It is.
        """
        if self._is_fixed or not self._is_too_much(self._footprint.least_bytes()):
            return
        gc.collect()
        held = self._footprint.least_bytes()
        if not self._is_too_much(held):
            return
        error = held_already(self._model, self._budget_bytes, held)
        if not self._warns:
            raise error
        _log.warning("mimose: %s Training goes on with the least plan.", error)

    def _is_too_much(self, n_bytes: float) -> bool:
        return n_bytes > self._budget_bytes + 5 * self._meter.noise_bytes

    def _refuse_infeasible(self, facts: StepFacts, start_bytes: float) -> None:
        state = float(self._optimizers.state_bytes)
        after = self._footprint.after_bytes
        least = self._least.bound(facts, start_bytes, state, after)
        if not self._is_too_much(least):
            return
        error = infeasible(
            self._model, float(self._budget_bytes), least, start_bytes, state
        )
        if not self._warns:
            raise error
        if not self._has_warned:
            self._has_warned = True
            _log.warning("mimose: %s Training goes on with the least plan.", error)

    def _forward_ends(self, step: Step, output: Any) -> None:
        if step.trace is not None:
            step.trace.mark("root_exit")
        step.calls = tuple([unit.calls for unit in self._events.units])
        step.record.actions = step.actions()
        step.record.events = step.events()
        chosen = step.decision.chosen
        if chosen is not None and step.calls != chosen.calls:
            self._events_differ(step)
        tensors = list(tensors_in(output))
        step.carried = self._carried
        self._carried = Carried(tensors)
        if not tensors:
            self._miss_outputs(step, output)
        waiting = _Waiting(self, step)
        step.graph = weakref.ref(waiting)
        for tensor in tensors:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(waiting)  # type: ignore[no-untyped-call]
        self._open.append(step)

    def _miss_outputs(self, step: Step, output: Any) -> None:
        """Say that the backward of this step will not be seen."""
        what = f"no tensors were found in what the model returned ({_type(output)})"
        step.unseen = f"{what}, so its backward was not observed"
        if not self._has_missed:
            self._has_missed = True
            _log.warning(
                "mimose: %s: its steps teach nothing, and every layer is recomputed. "
                "Return a tensor, a tuple, a dict or a dataclass",
                what,
            )

    def _events_differ(self, step: Step) -> None:
        record = step.record
        record.phase = "fallback"
        record.reason = "other layers ran than in the steps measured at such inputs"
        record.predicted_peak_bytes = None
        step.decision.growth_bytes = None
        self._policy.forget(step.facts.context)

    # ------------------------------------------------------------------ failures

    def _prepare_retry(
        self,
        step: Step,
        error: BaseException,
        versions: Sequence[int],
        inputs: Sequence[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> bool:
        """Turn a failed step into the safest one, if that can help.

        A forward that has changed what the root was given cannot be run again.
        """
        if is_out_of_memory(error):
            self._footprint.ran_out()
        if isinstance(error, NotRecomputableError):
            for unit in error.units:
                self._findings.keep(unit, error.why)
        if versions != [version(tensor) for tensor in inputs]:
            return False
        if self._events.knowledge.may_have_changed(args, kwargs, step.clock):
            return False
        if isinstance(error, LateChangeError):
            if not self.rollback.covers(error.slots):
                self._events.forget_changes()  # others are likely to follow
                return False
        elif isinstance(error, NotRecomputableError):
            pass
        elif not is_out_of_memory(error) or not self._can_be_safer(step):
            return False
        record = step.record
        _log.warning(
            "mimose: the forward of step %d failed (%s, phase %s, shape %s) and is run "
            "again with everything recomputed",
            record.step,
            type(error).__name__,
            record.phase,
            dict(record.shape),
        )
        self._policy.cache.clear()
        record.retries += 1
        record.phase = "fallback"
        record.reason = f"run again after {type(error).__name__} in forward"
        record.predicted_peak_bytes = None
        step.make_safest()
        return True

    def _can_be_safer(self, step: Step) -> bool:
        if step.record.retries:
            return False
        return step.decision.chosen is not None or isinstance(
            self._planner, (NoPlan, EveryK)
        )

    def note_out_of_memory(self) -> None:
        """Take note that memory ran out in a backward, as long as all is held."""
        self._footprint.ran_out()

    def prepare_safest(self) -> None:
        """Run the next step with everything recomputed: the last one failed."""
        release_memory(self._device)
        self._settle()
        self._policy.cache.clear()
        self._safest_once = True

    def _abort(self, step: Step, error: BaseException) -> None:
        if step.trace is not None:
            step.trace.is_closed = True
        self._note_peaks(self._footprint.fold())
        step.record.actions = step.actions()
        step.record.reason = f"forward raised {type(error).__name__}"
        self._close(step, had_backward=False)

    # ------------------------------------------------------------------ backward

    def backward_begins(self, step: Step) -> None:
        """Take note of the first gradient at the root's outputs."""
        if step.in_backward:
            return
        step.in_backward = True
        if step.carried_bytes and step.carried is not None:
            step.released_bytes = step.carried_bytes - step.carried.live_bytes()
            self._releases = step.released_bytes > step.carried_bytes // 2
        Variable._execution_engine.queue_callback(lambda: self._backward_ends(step))

    def _backward_ends(self, step: Step) -> None:
        step.in_backward = False
        if step.is_closed and not step.saw_end:
            return  # the session was detached before this backward
        step.saw_end = True
        if step.trace is not None:
            step.trace.mark("end")
            step.trace.is_closed = True
            step.peak_bytes = max(step.peak_bytes, step.trace.peak_bytes)
        self._note_peaks(self._footprint.fold(), step)
        step.record.seconds = time.perf_counter() - step.began
        self._events.answers.read()
        if step.is_closed:
            if not step.is_shared:
                step.record.reason = "two backwards"
                self._shared_until = self._n_steps + _SHARED_STEPS
            return
        if step in self._open:
            self._open.remove(step)
        if step.is_shared or any(other.in_backward for other in self._open):
            self._note_shared(step)
        elif step.trace is not None:
            self._learn(step, step.trace)
        self._close(step, had_backward=True)
        self._observe(step)

    def _note_shared(self, step: Step) -> None:
        """Several forwards before one backward: nobody's samples, nobody's peak."""
        self._shared_until = self._n_steps + _SHARED_STEPS
        for shared in (step, *self._open):
            shared.is_shared = True
            shared.record.predicted_peak_bytes = None
            shared.record.reason = "several forwards run before one backward"

    def _learn(self, step: Step, trace: Trace) -> None:
        sample = analyse(trace.marks, trace.events)
        if self._estimator.n_steps == 0 or self._has_compiled(step):
            sample = without_readings(sample)
        growth = trace.peak_bytes - step.record.start_bytes
        self._estimator.note_growth(self._growth_to_come(step, growth, trace))
        self._estimator.learn(
            step.facts, trace.events, sample, step.released_bytes, step.calls
        )
        kept = {event.unit for event in trace.events if event.action == KEEP}
        is_safest = kept <= self._estimator.unrecomputable
        is_own = self._meter.reads_peak and not self._has_compiled(step)
        if is_own and is_safest:
            needed = self._footprint.needed_bytes(trace.peak_bytes)
            growth = trace.peak_bytes - step.record.start_bytes
            growth = max(0, growth - trace.file_growth_bytes)
            state = self._optimizers.state_bytes
            self._least.add(step.facts, trace.peak_bytes, growth, state, needed)

    def _has_compiled(self, step: Step) -> bool:
        """Whether a compiler's memory was part of what a step held."""
        return self._is_compiled and n_graphs() != step.n_graphs

    def _growth_to_come(self, step: Step, growth: int, trace: Trace) -> float:
        """Return what a plan of this step could grow by: all kept, or all the room."""
        kept = sum(
            event.held_bytes[KEEP] - event.held_bytes[RECOMPUTE]
            for event in trace.events
            if event.action == RECOMPUTE and event.held_bytes
        )
        start = step.record.start_bytes
        room = self._footprint.level_budget(start) - start
        return max(growth, min(growth + kept, room))

    def _observe(self, step: Step) -> None:
        """Compare with the prediction; let margin and stages know."""
        record = step.record
        observed, predicted = record.observed_growth_bytes, step.decision.growth_bytes
        if step.is_shared:
            return
        if observed is None or record.observed_peak_bytes is None:
            self._go_on_unchecked(step)
            return
        self._footprint.observe(observed)
        is_over = record.is_over and not self._is_fixed
        if is_over:
            self._policy.cache.clear()
            _log.warning(
                "mimose: step %d reached %s, over the budget of %s (phase %s, %s)",
                record.step,
                format_bytes(record.highest_bytes or 0),
                format_bytes(self._budget_bytes),
                record.phase,
                dict(record.shape),
            )
        if self._has_compiled(step):
            record.reason = record.reason or "code was compiled in this step"
            return
        if predicted is None:
            return
        allowed = predicted + self._policy.margin.bytes(predicted)
        start = record.start_bytes
        room = self._footprint.level_budget(start) - start
        is_relevant = record.is_over or predicted >= _RELEVANT * room
        self._policy.observe(step.decision, observed, is_relevant=is_relevant)
        self._policy.checked(
            step.facts.context,
            is_within=observed <= allowed,
            kept_some=KEEP in record.actions,
        )

    def _go_on_unchecked(self, step: Step) -> None:
        """Step down without a peak to check by: the meter tells none."""
        self._policy.checked(
            step.facts.context,
            is_within=step.decision.growth_bytes is not None,
            kept_some=KEEP in step.record.actions,
        )

    # ------------------------------------------------------------------ closing

    def _settle(self) -> bool:
        """Close the steps whose graph is gone; return whether any is left."""
        for step in list(self._open):
            if step.graph is not None and step.graph() is not None:
                continue
            self._open.remove(step)
            had_backward = step.saw_gradient
            step.record.reason = step.unseen or (
                _NO_END if had_backward else "no backward followed"
            )
            self._close(step, had_backward=had_backward)
        return bool(self._open)

    def _close_dead(self) -> None:
        """Close the steps whose backward an error has ended.

        Inside a backward nothing is closed: somebody runs a forward in it.
        """
        if torch._C._current_graph_task_id() != -1:
            return
        for step in [step for step in self._open if step.in_backward]:
            step.in_backward = False
            self._open.remove(step)
            step.record.reason = _NO_END
            self._close(step, had_backward=True)

    def _close(self, step: Step, *, had_backward: bool) -> None:
        trace = step.trace
        if trace is not None:
            step.record.recomputed_flops = sum(event.flops for event in trace.events)
        elif had_backward:
            step.record.recomputed_flops += step.decision.flops
        step.is_closed = True
        self._records.close(step.record)

    def finish(self) -> None:
        """Close everything, as the session ends."""
        self._note_peaks(self._footprint.fold())
        self._settle()
        for step in self._open:
            step.record.reason = "detached before the backward"
            self._close(step, had_backward=False)
        self._open.clear()
        self._footprint.is_closed = True
        self._meter.release()

    @property
    def peak_bytes(self) -> int:
        """The highest footprint since the session began, optimizer steps included."""
        return self._footprint.highest_bytes(self._optimizers.peak_bytes)

    def _note_peaks(self, peaks: Peaks, step: Step | None = None) -> None:
        """Put the peaks since the last reset into the records that wait for them."""
        level = peaks.level_bytes
        if step is not None:
            step.peak_bytes = level = max(level, step.peak_bytes)
            if self._meter.reads_peak:
                self._footprint.note_level(level)
                step.record.note_peaks(peaks._replace(level_bytes=level))
        for other in self._open:
            other.peak_bytes = max(other.peak_bytes, level)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the model beyond predictions, ready for JSON."""
        return {
            "sizes": self._facts.state_dict(),
            "kept_units": self._findings.state_dict(),
            "optimizer_excess_bytes": self._optimizers.excess_bytes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another driver knew.

        Args:
            state: What ``state_dict`` returned.
        """
        self._facts.load_state_dict(state["sizes"])
        self._optimizers.excess_bytes = float(state["optimizer_excess_bytes"])
        self._findings.load_state_dict(state["kept_units"])

    # ------------------------------------------------------------------ for reports

    def last_facts(self) -> tuple[StepFacts, SizeTable] | None:
        """Return what was read of the last forward."""
        return self._facts.last

    def memory_now(self) -> Memory:
        """Return what is held now, as if a step began."""
        return self._memory(self._meter.live_bytes(), 0)


def _type(value: object) -> str:
    return type(value).__name__
