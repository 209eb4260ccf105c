"""Runs the forward of each step: describe, decide, run, and repeat if it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import distributed, nn

from mimose.distributed import Ranks
from mimose.exactness.call_inputs import CallInputs
from mimose.exactness.rollback import Rollback
from mimose.exceptions import MimoseError
from mimose.inputs.describe import Describer
from mimose.inputs.size_table import SizeTable
from mimose.loss_by_rows import LossChoice, n_labels_of
from mimose.model.patch import hidden, is_traced
from mimose.model.sharding import after_hooks, is_sharded
from mimose.policy.decision import BASELINE, Decision, without_plan
from mimose.policy.policy import Policy
from mimose.runtime.budget import SessionBudget
from mimose.runtime.last_steps import LastSteps
from mimose.runtime.layer_calls import LayerCalls
from mimose.runtime.retry import Retry
from mimose.runtime.step import Begun, Step, Steps, is_in_backward
from mimose.runtime.unplanned import EVALUATION, NO_GRAD, Unplanned
from mimose.runtime.watched import PlanPrefetcher, ShapesToCome
from mimose.torch_private import (
    drop_saved_hooks,
    eval_frame_callback,
    next_sequence_number,
    top_saved_hooks,
    top_transform,
)
from mimose.types import StepInput

_SHARED = "several forwards or backwards make up a step"
_AGAIN = "the step is run again"
_NO_SHAPE = "the inputs hold no tensors, so there is no shape to plan for"
_NO_LAYER = "no layer was called"
_NO_GRADIENTS = "layers of the plan ran without gradients"
_STILL_HELD = (
    "a forward was to run again, because memory has run out or would in its backward, "
    "but tensors that it has made, with their graph, are still held: a hook or a list "
    "outside of the model keeps them. A loss over these would count them twice. Return "
    "them from the model's forward, keep them detached, or raise the budget"
)
_TRANSFORMED = (
    "the model was called inside a transform of torch.func (grad, vmap, jvp, …), which "
    "mimose cannot plan: detach the session first, or call a copy of the model that "
    "has no session"
)


class _Decided(NamedTuple):
    """What a forward does."""

    step_input: StepInput
    shape: Mapping[str, int]
    decision: Decision
    plan: tuple[StepInput, Decision] | None
    """The expected window, and its decision; None if none was made."""


class Decider:
    """Decides what a forward does, from what arrives and what is held.

    Args:
        describer: Describes what arrives.
        policy: Makes the decisions.
        budget: The session's budget.
        losses: Chooses how losses are computed.
        last_steps: Remembers what was planned.
        to_come: Checks shapes that are expected.
        ranks: The ranks that agree with this one; None for none.
        later_waits: Raises an error if other ranks wait that have not agreed; None if
            that is known.

    Attributes:
        plans: Whether plans are made. A baseline does the same in every step.
        is_outdated: Whether the model's modules have changed.
        renew: Reads them again.
        as_ran: Adjusts a decision to the layer calls that have run.
        sharing_errors: Sends an error to the other ranks, if they wait for an exchange.
    """

    def __init__(
        self,
        describer: Describer,
        policy: Policy,
        budget: SessionBudget,
        losses: LossChoice,
        last_steps: LastSteps,
        to_come: ShapesToCome,
        ranks: Ranks | None,
        later_waits: Callable[[], None] | None,
    ) -> None:
        self._describer, self._policy, self._budget = describer, policy, budget
        self._losses, self._last, self._to_come = losses, last_steps, to_come
        self._ranks, self._later_waits = ranks, later_waits
        self.plans = budget.plans
        self.is_outdated: Callable[[], bool] = describer.is_outdated
        self.renew: Callable[[], None] = describer.renew
        self.as_ran = policy.as_ran
        self.sharing_errors: Callable[[], AbstractContextManager[None]]
        self.sharing_errors = nullcontext if ranks is None else ranks.sharing_errors

    def decide(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        begun: Begun,
        reason: str,
        calls: LayerCalls,
        *,
        is_first: bool,
    ) -> _Decided:
        """Describe a forward, and decide what it does.

        Args:
            args: The model's arguments.
            kwargs: Its keyword arguments.
            begun: What its window says.
            reason: Why no plan is made for it; "" if one is.
            calls: Runs the layers.
            is_first: Whether no forward has run before.
        """
        if self._later_waits is not None and distributed.is_initialized():
            self._later_waits()
        step_input, table = self._describer.arrive(args, kwargs)
        if self._describer.mode is not calls.mode:
            calls.set_mode(self._describer.mode)
        if self._last.listener is not None and not begun.has_others:
            self._last.listener(step_input)
        is_least = reason == _AGAIN
        if self._losses.losses:
            budget_bytes = 0 if is_least else self._budget.n_bytes
            # Ranks must choose alike: by the sizes alone, not by what each has learned.
            may_be_plain = not (is_least or begun.parts) and self._ranks is None
            step_input = self._losses.choose(
                step_input,
                n_labels_of(kwargs),
                begun.memory,
                budget_bytes,
                may_be_plain=may_be_plain,
            )
        if not (is_least or step_input.sizes):
            reason = _NO_SHAPE
        plan = None
        if not self.plans:
            decision = BASELINE
            self._last.ran_without_plan(step_input, table)
        elif begun.reason or reason:
            decision = without_plan(begun.reason or reason)
        else:
            plan = self._plan(step_input, table, begun, is_first=is_first)
            decision = plan[1]
        if self._ranks is not None:
            whole = (plan or begun.plan or (step_input,))[0]
            decision = self._agree(self._ranks, decision, whole, begun, calls)
            plan = plan and (whole, decision)
        if is_least:
            decision = decision.safest(_AGAIN)
        self._last.began(step_input, begun.memory.start_bytes)
        return _Decided(step_input, table.named(step_input.sizes), decision, plan)

    def _plan(
        self, step_input: StepInput, table: SizeTable, begun: Begun, *, is_first: bool
    ) -> tuple[StepInput, Decision]:
        """Return the expected window of a forward, and its decision."""
        memory, policy, describer = begun.memory, self._policy, self._describer
        if self._to_come.unknown and not begun.parts:
            self._to_come.check(step_input, table, memory)
        parts = [*begun.parts, step_input]
        whole, found = policy.decide(parts, memory, begun.plan, is_first=is_first)
        self._last.planned(whole, table, describer.mode.key, hides=describer.hides)
        # Steps whose layer calls vary may run less.
        pattern = policy.learner.model.patterns.get(whole.context)
        may_vary = pattern is not None and pattern.may_vary
        # What is rebuilt just before it is needed may need less than recomputing all.
        if not (found.cache_hit or may_vary or found.rebuilds):
            self._budget.raise_if_infeasible(whole, memory.start_bytes)
        return whole, found

    def _agree(
        self,
        ranks: Ranks,
        decision: Decision,
        whole: StepInput,
        begun: Begun,
        calls: LayerCalls,
    ) -> Decision:
        """Return the decision that all ranks agree on."""
        is_measured = begun.is_measured if begun.parts else decision.is_measured
        return ranks.agree(
            decision,
            whole,
            begun.memory,
            part=len(begun.parts),
            is_measured=self.plans and is_measured,
            layers=calls.layers,
            menu=self._policy.learner.model.menu,
            policy=self._policy if self.plans else None,
        )


class Driver:
    """Runs the model's forwards as steps.

    Args:
        model: The model.
        decider: Decides what each forward does.
        steps: Follows each to the end of its backward.
        calls: Runs the layers.
        rollback: Saves what a forward may change.
        retry: Decides whether a forward runs again.
        budget: The session's budget.
        unplanned: Counts what is no step.
        prefetcher: Learns which steps follow a batch.

    Attributes:
        model: The model.
        steps: The argument.
    """

    def __init__(
        self,
        model: nn.Module,
        decider: Decider,
        steps: Steps,
        calls: LayerCalls,
        rollback: Rollback,
        retry: Retry,
        budget: SessionBudget,
        unplanned: Unplanned,
        prefetcher: PlanPrefetcher,
    ) -> None:
        self.model, self.steps = model, steps
        self._decider, self._calls = decider, calls
        self._rollback, self._retry = rollback, retry
        self._budget, self._unplanned, self._prefetcher = budget, unplanned, prefetcher
        self._safest_once = self._is_running = False
        self._untraced = hidden(Driver.run)

    # ------------------------------------------------------------------ the root

    def enter(
        self,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a step in training with grad enabled; else only run the forward.

        `torch.compile` of the model does not trace into this, because each step is
        decided separately.

        Args:
            original: The model's own forward.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        has_grad = torch.is_grad_enabled()
        if self._is_running or not (self.model.training and has_grad):
            if not self._is_running and not is_in_backward():
                self._budget.limit.drop_wall()  # it is no step
                if self.model.training or has_grad:
                    self._unplanned.note(EVALUATION if has_grad else NO_GRAD)
                else:
                    self._unplanned.ran()
            return original(*args, **kwargs)
        if top_transform() is not None:
            if self._decider.plans:
                raise MimoseError(_TRANSFORMED)
            return original(*args, **kwargs)  # a baseline keeps no budget
        if is_traced() or eval_frame_callback() is not None:  # compiled after attach
            return self._untraced(self, original, args, kwargs)
        return self.run(original, args, kwargs)

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run one forward of the model as a step.

        Args:
            forward: The model's own forward.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget at this shape.
            MimoseError: The inputs cannot be planned for.
        """
        given, began = CallInputs((*args, *kwargs.values())), next_sequence_number()
        with self._decider.sharing_errors():
            step = self._begin(args, kwargs)
        output, error = self._attempt(step, given, forward, args, kwargs)
        while error is not None and self._retry.may_follow(step, error, given):
            error = None  # its traceback pins the tensors of the failed forward
            if not self._retry.undo(step, began, n_labels_of(kwargs)):
                error = MimoseError(_STILL_HELD)
                break
            self._budget.enforce(step.decision)
            self.steps.start_again(step)
            output, error = self._attempt(step, given, forward, args, kwargs)
        if error is not None:
            error = self._retry.refused(step, error)
            self.steps.abort(step, error)
            try:
                raise error
            finally:
                del error  # it refers to this frame, and this frame to the output
        self._end_forward(step, output)
        return output

    def _attempt(
        self,
        step: Step,
        given: CallInputs,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[Any, BaseException | None]:
        outer = top_saved_hooks(False)
        self._is_running = True
        self._calls.begin(step)
        try:
            output = forward(*args, **kwargs)
            if self._rollback.is_wide:
                self._rollback.learn()
            if self._calls.findings.read:
                self._calls.raise_if_unrepeatable()
            held, peak = self._budget.limit.forward_ended()
            if self._budget.limit.has_wall:
                self._retry.check_room(step, output, given, held, peak)
            return output, None
        except BaseException as error:  # every one is raised again, or retried
            drop_saved_hooks(outer)
            self._calls.abandon_forward()
            return None, error
        finally:
            self._calls.end()
            self._is_running = False

    # ------------------------------------------------------------------ beginning

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Step:
        began, steps = time.perf_counter(), self.steps
        steps.settle()  # a backward that has failed leaves no window
        if self._budget.next is not None:
            self.renew_budget()
        begun = steps.begin()
        if self._decider.is_outdated():
            self._decider.renew()
            self._calls.renew()
            self._rollback.renew()
            self._unplanned.check(self._calls.layers)
        is_again, self._safest_once = self._safest_once, False
        reason = _AGAIN if is_again else _SHARED if steps.is_shared else ""
        step_input, shape, decision, plan = self._decider.decide(
            args, kwargs, begun, reason, self._calls, is_first=not steps.n_begun
        )
        is_measured = steps.decide(plan, decision)
        self._rollback.take(is_planned=not is_measured)
        if self._budget.limit.has_wall:
            self._budget.enforce(decision)
        return steps.start(
            step_input,
            shape,
            decision,
            began,
            is_measured=is_measured,
            n_failed=int(is_again),
        )

    def renew_budget(self) -> None:
        """Set the budget of the window that begins: see `SessionBudget.renew`."""
        self._budget.renew(self.is_within_window)

    def is_within_window(self) -> bool:
        """Whether a step runs, or the next one adds to gradients that are there.

        A new budget waits for the end of the window.
        """
        runs = self._is_running or self.steps.has_window or is_in_backward()
        return runs or self._budget.has_gradients_due()

    # ------------------------------------------------------------------ ending

    def _end_forward(self, step: Step, output: Any) -> None:
        trace, step_input = step.trace, step.forward.step_input
        if trace is not None:
            trace.mark("root_exit")
            if is_sharded(self.model):
                after_hooks(self.model, trace.leave_hooks)
        if self._prefetcher.batch:
            self._prefetcher.ran(step_input)
        counts = tuple(self._calls.counts)
        decision, is_as_planned = step.decision, True
        chosen = decision.chosen
        if chosen is not None and (chosen.between or counts != chosen.counts):
            part = step.forward.part
            ran = self._decider.as_ran(step.whole, decision, counts, part)
            step.note_ran(ran)
            is_as_planned = ran is not None
        if trace is not None and trace.why_discarded:
            step.withdraw(trace.why_discarded)
        if is_as_planned:
            if not any(counts) or counts == step.forward.counts:
                if step.decision.chosen is not None or not step.decision.reason:
                    step.withdraw(_NO_LAYER)
            elif self._calls.lacks_gradients:
                step.withdraw(_NO_GRADIENTS)
        self.steps.forward_ended(step, output, counts)

    def prepare_safest(self, undoes: bool) -> None:
        """Make the next step recompute everything, because the last one failed.

        Args:
            undoes: Whether to restore what the last forward has changed.
        """
        self._retry.release(is_failed=True)
        self.steps.abandon()
        self._safest_once = True
        if undoes:
            self._rollback.restore()
