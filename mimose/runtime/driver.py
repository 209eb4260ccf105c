"""The forward of each step: described, decided, run, and run again if it fails."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from mimose.cost.learner import Learner
from mimose.cost.problem import Memory
from mimose.cost.windows import Windows
from mimose.distributed import Ranks, is_told_alone
from mimose.exactness.rollback import Rollback
from mimose.inputs.describe import Describer
from mimose.inputs.sharding import after_hooks, is_sharded
from mimose.inputs.sizes import SizeTable, Table
from mimose.memory.meters import Meter
from mimose.memory.optimizer import OptimizerWatch
from mimose.memory.out_of_memory import asked_bytes
from mimose.memory.wall import Footprint
from mimose.planners import Menu
from mimose.policy.decision import Decision
from mimose.policy.policy import Policy
from mimose.runtime import backward
from mimose.runtime.device_checks import DeviceChecks
from mimose.runtime.ending import StepEnds
from mimose.runtime.epoch import Epoch
from mimose.runtime.events import EventRunner
from mimose.runtime.expected import Expectations
from mimose.runtime.foresight import Foresight
from mimose.runtime.loss_choice import LossChoice
from mimose.runtime.overlooked import Overlooked
from mimose.runtime.refusals import Refusals
from mimose.runtime.retry import Call, Retry, release_memory
from mimose.runtime.step import Step
from mimose.runtime.window import Window
from mimose.torch_private import count_graphs, drop_saved_hooks, top_saved_hooks
from mimose.types import StepInput

_log = logging.getLogger(__name__)

_SLACK = 0.005
"""Freed memory that a step may start with, as a share of what steps grow by."""
_CALLS = operator.attrgetter("calls")
_NO_LAYER = "no layer was called"
_NO_GRADIENTS = "layers that were planned for ran without gradients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Who takes part in a step; the session puts them together."""

    model: nn.Module
    device: torch.device
    footprint: Footprint
    budget_bytes: int
    host_budget_bytes: float
    """For what plans hold on the host."""
    menu: Menu
    """The actions in use."""
    action_at: Callable[[int], str] | None
    """A baseline's action, by position; None where plans are made."""
    learner: Learner
    policy: Policy
    events: EventRunner
    meter: Meter
    optimizers: OptimizerWatch
    checks: DeviceChecks
    refusals: Refusals
    rollback: Rollback
    retry: Retry
    describer: Describer
    overlooked: Overlooked
    windows: Windows
    ends: StepEnds
    ran: Callable[[StepInput], None]
    """Told of each step that has run its forward."""
    epoch: Epoch
    """Looks at the largest shapes to come."""
    ranks: Ranks | None
    """Makes decisions those of all ranks."""


class Driver:
    """Runs the root's forwards as steps.

    Args:
        parts: Who takes part.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.plans = parts.action_at is None
        """Whether plans are made; a baseline does the same in every step."""
        self._learner = parts.learner
        self._policy = parts.policy
        self._events = parts.events
        self._footprint = parts.footprint
        self._ends = parts.ends
        self._expectations = Expectations(parts.windows, parts.describer)
        self._foresight = Foresight(parts.policy, parts.learner)
        self.last: tuple[StepInput, Table] | None = None
        """What was planned last, with the names of its sizes."""
        self._retry = parts.retry
        self._graphs_at_clean_up = 0
        self._is_running = False
        self._safest_once = False
        self.loss = LossChoice(
            parts.describer, parts.learner, parts.footprint, parts.budget_bytes
        )

    # ------------------------------------------------------------------ the root

    @property
    def is_idle(self) -> bool:
        """Whether a forward of the root would begin a step."""
        is_training = self._parts.model.training and torch.is_grad_enabled()
        return not self._is_running and is_training

    @property
    def n_begun(self) -> int:
        """Forwards begun so far."""
        return self._ends.open.n_begun

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run one forward of the root as a step.

        Args:
            forward: The root's own.
            args: What it is given.
            kwargs: What it is given by name.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget at this shape.
            MimoseError: The inputs, or a setting of the device, cannot be planned for.
        """
        ranks = self._parts.ranks
        with nullcontext() if ranks is None else ranks.telling():
            self._parts.checks.before_step()
            call = Call(args, kwargs)
            step = self._begin(call)
        output, error = self._attempt(step, forward, call)
        while error is not None and self._retry.prepare(step, error, call):
            error = None  # its traceback pins the tensors of the failed forward
            self._retry.rewind(step)
            self.loss.apply(step, is_again=True)
            self._raise_wall(step)
            step.start(self._parts.meter)
            output, error = self._attempt(step, forward, call)
        if error is not None:
            error = self._refused(step, error)
            self._ends.abort(step, error)
            try:
                raise error
            finally:
                del error  # it refers to this frame, and this frame to the output
        self._end_forward(step, output)
        return output

    def _attempt(
        self, step: Step, forward: Callable[..., Any], call: Call
    ) -> tuple[Any, BaseException | None]:
        chosen, outer = step.decision.chosen, top_saved_hooks(False)
        self._is_running = True
        if chosen is None:
            self._events.begin(step, None)
        else:
            free = chosen.headrooms_at(step.facts.sizes)
            self._events.begin(step, chosen.by_unit, free)
        self._parts.overlooked.begin()
        try:
            output = forward(*call.args, **call.kwargs)
            self._events.refuse_unrepeatable(self._parts.rollback.learn())
            return output, None
        except BaseException as error:  # every one is raised again, or retried
            drop_saved_hooks(outer)
            self._events.forget_comparisons()
            return None, error
        finally:
            self._parts.overlooked.end()
            self._events.end()
            self._is_running = False

    def _raise_wall(self, step: Step) -> None:
        """Have the allocator keep the budget; a baseline does as it would by itself.

        Where an impossible budget is but warned of, the least plan may pass it.
        """
        is_kept = step.can_be_safer or not self._parts.refusals.warns
        step.has_wall = self.plans and is_kept
        if step.has_wall:
            self._footprint.raise_wall()
        else:
            self._footprint.drop_wall()

    def _refused(self, step: Step, error: BaseException) -> BaseException:
        """Return what to raise for an error: that nothing keeps the budget, perhaps."""
        is_device = isinstance(error, torch.OutOfMemoryError)
        if step.can_be_safer or not is_device or is_told_alone(error):
            return error
        least = self._footprint.beyond_wall(asked_bytes(error))
        if not least:
            return error
        return self._parts.refusals.beyond_wall(float(least), float(step.start_bytes))

    # ------------------------------------------------------------------ beginning

    def _begin(self, call: Call) -> Step:
        began = time.perf_counter()
        self._ends.drop_wall()
        self.tell_failure()
        self._ends.settle()
        window = self._window()
        describer = self._parts.describer
        if self._events.renew():
            describer.renew()
            self._parts.rollback.renew()
            self._parts.overlooked.note_modules(self._parts.model)
        facts, table = describer.arrive(call.args, call.kwargs)
        self._events.set_mode(describer.mode)
        is_again, self._safest_once = self._safest_once, False
        is_shared = self._ends.open.expects_shared or backward.is_running()
        window.give_up(_unplanned(facts, is_shared=is_shared, is_again=is_again))
        least = self.loss.begin(facts, is_first=not self._ends.open.n_begun)
        if self.plans and not window.steps and least is not None:
            self._parts.epoch.check(least, table, window.memory)
        is_first = self._ends.open.n_begun == 0
        decide = partial(self._decide, table, window, is_first)
        facts, decision = self.loss.decide(facts, window, decide, is_again=is_again)
        if self.loss.has_probed and window.planned is not None and self.last:
            self.last = window.planned, self.last[1]
        decision = self._agree(decision, facts, window)
        step = Step(
            self._ends.open.begin(),
            facts,
            table.named(facts.sizes),
            decision,
            window=window,
            budget_bytes=self._parts.budget_bytes,
            n_graphs=self._graphs_at_clean_up,
            began=began,
            menu=self._parts.menu,
            action_at=self._parts.action_at,
        )
        self.loss.apply(step)
        if is_again:
            step.run_again("the step is run again")
        self._parts.rollback.take(is_planned=not step.is_measured)
        self._raise_wall(step)
        step.planned(time.perf_counter() - began)
        step.start(self._parts.meter)
        return step

    def _window(self) -> Window:
        """Return the window that a forward is part of that begins now."""
        window = self._ends.open.window
        if window is None or backward.is_running():
            start, carried = self._level(), self._ends.carried_bytes
            return Window(self._memory(start, carried), carried)
        self._ends.note_peaks(self._footprint.fold())
        window.begin_next()
        return window

    def _level(self) -> int:
        """Return the level that a step starts from; the peaks before it are noted."""
        self._clean_up_after_compiler()
        meter, scale = self._parts.meter, self._learner.model.scale
        start, peaks = self._footprint.begin(max(5 * meter.noise_bytes, _SLACK * scale))
        if self._ends.open.steps:
            self._ends.note_peaks(peaks)
        return start

    def tell_failure(self) -> None:
        """Say what the worker thread has failed with, if it has."""
        told = self._learner.worker.take_failure()
        if told:
            _log.warning(
                "mimose: the thread beside training has failed and is not started "
                "again. Training goes on; fits are made in the steps from now on, "
                "plans are not refined and not made ahead. It failed with:\n%s",
                told,
            )

    def _clean_up_after_compiler(self) -> None:
        self._events.refuse_replaced()
        if self._graphs_at_clean_up != count_graphs():
            self._graphs_at_clean_up = count_graphs()
            self._parts.meter.clean_up()

    def _memory(self, start: int, carried: int) -> Memory:
        return Memory(
            self._footprint.level_budget(start),
            float(start),
            float(carried) if self._ends.releases else 0.0,
            0.0,
            0.0,
            self._parts.host_budget_bytes,
            self._footprint.reserved_ratio,
        )

    def _decide(
        self,
        table: SizeTable,
        window: Window,
        is_first: bool,
        facts: StepInput,
    ) -> Decision:
        if not self.plans:
            return Decision("plan", None)
        memory = window.memory
        expected = self._expectations.of(window, facts, table)
        if isinstance(expected, str):
            window.give_up(expected)
            self._refuse_infeasible(facts, memory)
            return Decision("fallback", None, reason=expected)
        whole, named = expected.whole, expected.table
        if not self.loss.is_probing:
            self.last = whole, named
        found = window.goes_on_as(whole)
        if found is None and expected.sizes is None:
            found = self._policy.cached(whole, named, memory, window.ran)
        if found is None:
            known = whole if expected.sizes is None else facts
            self._refuse_infeasible(known, memory)
            part = len(window.steps)
            whole, found = self._foresight.plan(
                expected, part, memory, window.ran, is_first=is_first
            )
        window.plan(whole, expected.n_backwards, found)
        return found

    def _agree(self, decision: Decision, facts: StepInput, window: Window) -> Decision:
        """Return what all ranks do: the decision itself where there is only one."""
        ranks = self._parts.ranks
        if ranks is None:
            return decision
        is_measured = decision.chosen is None or decision.is_measured
        if window.steps:
            is_measured = window.trace is not None
        agreed = ranks.agree(
            decision,
            window.planned or facts,
            window.memory,
            part=len(window.steps),
            is_measured=self.plans and is_measured,
            units=self._events.units,
            menu=self._parts.menu,
            policy=self._policy if self.plans else None,
        )
        if self.plans:
            window.agree(agreed)
        return agreed

    def _refuse_infeasible(self, facts: StepInput, memory: Memory) -> None:
        if self.loss.is_probing or self._learner.model.varies(facts.context):
            return  # it may run less than those measured
        state = float(self._parts.optimizers.state_bytes)
        self._parts.refusals.refuse_infeasible(facts, memory.start_bytes, state)

    # ------------------------------------------------------------------ ending

    def _end_forward(self, step: Step, output: Any) -> None:
        if step.trace is not None:
            step.trace.mark("root_exit")
            if is_sharded(self._parts.model):
                after_hooks(self._parts.model, step.trace.leave_hooks)
        self.loss.note(step)
        self._footprint.forward_ended()
        self._parts.ran(step.facts)
        self._parts.overlooked.note_calls()
        calls = tuple(map(_CALLS, self._events.units))
        before = step.calls_before or (0,) * len(calls)
        facts = step.window.planned or step.facts
        ran = self._policy.as_ran(facts, step.decision, calls, step.part)
        step.ran(ran)
        self._ends.forward_ended(step, output, calls)
        spoilt = "" if step.trace is None else step.trace.spoilt
        spoilt = self._events.inner.seen(spoilt)
        if spoilt:
            step.withdraw(spoilt)
            step.window.spoil(spoilt)
        if ran is None:
            step.window.give_up(step.reason)
        elif not any(map(operator.sub, calls, before)):
            if step.decision.chosen is not None or not step.reason:
                step.withdraw(_NO_LAYER)
        elif self._events.lacks_gradients:
            step.withdraw(_NO_GRADIENTS)

    def prepare_safest(self) -> None:
        """Run the next step with everything recomputed: the last one failed."""
        release_memory(self._parts.device)
        self._ends.settle()
        self._ends.open.abandon()
        self._policy.distrust_plans()
        self._safest_once = True

    def pass_by(self) -> None:
        """Take note that the root runs what is no step: no wall is for that."""
        if not self._is_running and not backward.is_running():
            self._footprint.drop_wall()

    def finish(self) -> None:
        """Close everything, as the session ends."""
        self._ends.finish()
        self._footprint.close()
        self._parts.meter.release()

    def memory_now(self) -> Memory:
        """Return what is held now, as if a step began."""
        return self._memory(self._parts.meter.live_bytes(), 0)


def _unplanned(facts: StepInput, *, is_shared: bool, is_again: bool) -> str:
    """Return why no plan is to be made for a step; "" if one is."""
    if is_shared:
        return "several forwards or backwards make up a step"
    if is_again:
        return "the step is run again"
    if not facts.sizes:
        return "the inputs hold no tensors, so there is no shape to plan for"
    return ""
