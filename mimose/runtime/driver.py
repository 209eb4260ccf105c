"""Runs the forward of each step: describe, decide, run, and repeat if it fails."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from mimose.cost.problem import Memory
from mimose.distributed import Ranks, is_final, why_waits
from mimose.exactness.side_effects import Given
from mimose.exceptions import MimoseError
from mimose.inputs.describe import SizeTable
from mimose.inputs.patch import hidden, is_traced
from mimose.inputs.sharding import after_hooks, is_sharded
from mimose.memory.out_of_memory import asked_bytes
from mimose.policy import SEVERAL_BACKWARDS, Decision
from mimose.runtime.loss_choice import large_logits, n_labels_of
from mimose.runtime.retry import NoRoomError, may_run_again, release_memory
from mimose.runtime.step import Step, Window, is_in_backward
from mimose.runtime.unplanned import EVALUATION, NO_GRAD
from mimose.tensors import is_graph_held, tensors_in
from mimose.torch_private import (
    drop_saved_hooks,
    eval_frame_callback,
    next_sequence_number,
    top_saved_hooks,
    top_transform,
)
from mimose.types import BY_ROWS, StepInput

if TYPE_CHECKING:
    from mimose.runtime.engine import Engine

_N_CALLS = operator.attrgetter("n_calls")
_SHARED = "several forwards or backwards make up a step"
_MOST_IN_VAIN = 6
"""Each forward that ran again in vain doubles the steps until the next, up to 63, so
that these are at most 1.6% in the end. Without it every forward of six small layers
with a head of 50,000 classes ran twice."""
_AGAIN = "the step is run again"
_NO_SHAPE = "the inputs hold no tensors, so there is no shape to plan for"
_NO_LAYER = "no layer was called"
_NO_GRADIENTS = "layers of the plan ran without gradients"
_AT_THE_WALL = (
    "The forward ended there, and would have needed more. Raise the budget, use a "
    "smaller batch or shorter inputs, or leave such batches out."
)
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


class Driver:
    """Runs the model's forwards as steps.

    Args:
        model: The model.
        engine: The session's parts.

    Attributes:
        model: The model.
        plans: Whether plans are made. A baseline does the same in every step.
        is_running: Whether a step's forward is running.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self.model = model
        self._engine = engine
        self._steps, self._calls = engine.steps, engine.calls
        self._memory_limit, self._meter = engine.memory_limit, engine.meter
        self._learner, self._policy = engine.learner, engine.policy
        self._safest_once = self._is_renewed = False
        self._untraced = hidden(Driver.run)
        self._found_gradients = False, False
        self.plans = engine.plans
        self.is_running = False
        self._n_in_vain = self._n_to_wait = 0
        """Forwards that ran again in vain since the last one that found room, and how
        often the next ones do not."""
        self._hid: tuple[str, str] | None = None
        """The context and structure of the typical step, if its masks hide
        something."""

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
        if self.is_running or not (self.model.training and has_grad):
            if not self.is_running and not is_in_backward():
                self._memory_limit.drop_wall()  # it is no step
                if self.model.training or has_grad:
                    self._engine.unplanned.note(EVALUATION if has_grad else NO_GRAD)
                else:
                    self._engine.unplanned.ran()
            return original(*args, **kwargs)
        if top_transform() is not None:
            if self.plans:
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
        given, began = Given((*args, *kwargs.values())), next_sequence_number()
        ranks = self._engine.ranks
        with nullcontext() if ranks is None else ranks.sharing_errors():
            step = self._begin(args, kwargs)
        output, error = self._attempt(step, given, forward, args, kwargs)
        while error is not None and may_run_again(self._engine, step, error, given):
            error = None  # its traceback pins the tensors of the failed forward
            self._engine.rollback.restore(began)  # and so do attributes that it has set
            release_memory(self._engine.device)
            # A cast from the failed forward would be older than the nodes that use it,
            # and gradients would be added in another order. An earlier forward of the
            # window may have filled the cache too.
            if not step.part:
                torch.clear_autocast_cache()
            if is_graph_held(began):
                error = MimoseError(_STILL_HELD)
                break
            losses = self._engine.losses
            self._set_losses(large_logits(losses, n_labels_of(kwargs), 0) > 0)
            self._raise_wall(step)
            step.start(self._meter)
            output, error = self._attempt(step, given, forward, args, kwargs)
        if error is not None:
            error = self._refused(step, error)
            self._steps.abort(step, error)
            try:
                raise error
            finally:
                del error  # it refers to this frame, and this frame to the output
        self._end_forward(step, output)
        return output

    def _attempt(
        self,
        step: Step,
        given: Given,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[Any, BaseException | None]:
        outer = top_saved_hooks(False)
        self.is_running = True
        self._calls.begin(step)
        try:
            output = forward(*args, **kwargs)
            if self._engine.rollback.is_wide:
                self._engine.rollback.learn()
            if self._engine.findings.read:
                self._calls.raise_if_unrepeatable()
            self._check_room(step, output, given)
            return output, None
        except BaseException as error:  # every one is raised again, or retried
            drop_saved_hooks(outer)
            self._calls.give_up()
            return None, error
        finally:
            self._calls.end()
            self.is_running = False

    def _check_room(self, step: Step, output: Any, given: Given) -> None:
        """Check that the backward has room: Note: [Room for the backward].

        Raises:
            NoRoomError: It may not have, and to run the forward again may help.
        """
        held, peak = self._memory_limit.forward_ended()
        level = step.backward_bytes(peak, held, self._policy.margin)
        if not step.has_wall or level is None:
            return
        chosen = step.decision.chosen
        block = 0 if chosen is None else int(chosen.growth.largest_bytes)
        if not any(loss.is_on for loss in self._engine.losses):
            # A gradient in float32 does not fit where an output in half precision was.
            halves = (t.numel() for t in tensors_in(output) if t.itemsize == 2)
            block = max(block, 4 * max(halves, default=0))
        tries = step.window.trace is None
        has_room = self._memory_limit.has_room(level, block, tries=tries)
        if step.retries == 1:
            self._n_in_vain = 0 if has_room else min(self._n_in_vain + 1, _MOST_IN_VAIN)
            self._n_to_wait = 2**self._n_in_vain - 1
        if has_room:
            return
        layers, planned = self._engine.layers, step.window.planned
        is_gaps = not step.retries
        if is_gaps and self._n_to_wait:
            self._n_to_wait, is_gaps = self._n_to_wait - 1, False
        helps = is_gaps or step.keeps(layers)
        if not is_gaps and step.decision.rebuilds and planned is not None:
            self._policy.lacked_room(planned, step.window.memory)
            # Recomputing everything may need more.
            start, peaks = step.window.memory.start_bytes, self._policy.least_peaks
            least = peaks.bound(planned, start, math.inf)
            helps = helps and least <= self._memory_limit.budget_bytes
        if helps and not (
            why_waits(self.model, layers, with_backward=False)
            or given.are_edited()
            or self._engine.rollback.has_missed()
        ):
            raise NoRoomError(changes_plan=not is_gaps)
        self._engine.use_grace()

    def _raise_wall(self, step: Step) -> None:
        """Make the allocator keep the budget, except for a baseline.

        If an impossible budget is only a warning, a step without a plan has no limit.
        """
        if not self._memory_limit.has_wall:
            return
        has_plan = step.decision.chosen is not None
        step.has_wall = self.plans and (has_plan or not self._engine.options.warns)
        if step.has_wall:
            self._memory_limit.raise_wall()
        else:
            self._memory_limit.drop_wall()

    def _refused(self, step: Step, error: BaseException) -> BaseException:
        """Return the error to raise; if no plan keeps the budget, the one saying so."""
        is_device = isinstance(error, torch.OutOfMemoryError)
        if not (step.retries and is_device) or is_final(error):
            return error
        least = self._memory_limit.beyond_wall(asked_bytes(error))
        if not least:
            return error
        return self._engine.checks.error(least, step.start_bytes, _AT_THE_WALL)

    # ------------------------------------------------------------------ beginning

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Step:
        began = time.perf_counter()
        engine = self._engine
        if engine.later_waits is not None and distributed.is_initialized():
            engine.later_waits()
        window = self._steps.begin() or self._new_window()
        if engine.describer.is_outdated():
            self._calls.renew()
            engine.describer.renew()
            engine.rollback.renew()
            engine.unplanned.check(engine.layers)
        step_input, table = engine.describer.arrive(args, kwargs)
        if engine.describer.mode is not self._calls.mode:
            self._calls.set_mode(engine.describer.mode)
        is_again, self._safest_once = self._safest_once, False
        budget_bytes = 0 if is_again else self._memory_limit.budget_bytes
        if engine.losses:
            step_input = self._choose_loss(step_input, kwargs, budget_bytes, window)
        if is_again or self._steps.is_shared or not step_input.sizes:
            why = _AGAIN if is_again else _SHARED if step_input.sizes else _NO_SHAPE
            window.give_up(why)
        decision = self._decide(step_input, table, window)
        if engine.ranks is not None:
            decision = self._agree(engine.ranks, decision, step_input, window)
        shape = table.named(step_input.sizes)
        step = Step(engine, step_input, shape, decision, window)
        self._steps.n_begun += 1
        self._found_gradients = self._found_gradients[1], step_input.has_gradients
        if not step_input.has_gradients:
            engine.start_bytes = step.start_bytes
        if is_again:
            step.run_again(_AGAIN)
        engine.rollback.take(is_planned=not step.is_measured)
        self._raise_wall(step)
        step.plan_seconds = time.perf_counter() - began
        step.start(self._meter)
        if not step.part:
            window.began = engine.seconds.mark()
        return step

    def _choose_loss(
        self,
        step_input: StepInput,
        kwargs: Mapping[str, Any],
        budget_bytes: int,
        window: Window,
    ) -> StepInput:
        """Choose losses by rows if the budget needs it; return the step's input."""
        large = large_logits(self._engine.losses, n_labels_of(kwargs), budget_bytes)
        by_rows = step_input._replace(context=step_input.context + BY_ROWS)
        # Ranks must choose alike: by the sizes alone, not by what each has learned.
        may_be_plain = budget_bytes and not window.steps and self._engine.ranks is None
        prefers_plain = self._policy.prefers_plain_loss
        is_on = large > 0 and not (
            may_be_plain and prefers_plain(step_input, by_rows, large, window.memory)
        )
        self._set_losses(is_on)
        return by_rows if is_on else step_input

    def _set_losses(self, is_by_rows: bool) -> None:
        for loss in self._engine.losses:
            loss.is_on = is_by_rows

    def is_within_window(self) -> bool:
        """Whether a step runs, or the next one adds to gradients that are there.

        A new budget waits for the end of the window.
        """
        runs = self.is_running or self._steps.has_window or is_in_backward()
        return runs or self._engine.optimizers.are_due

    def renew_budget(self) -> None:
        """Set the budget of the window that begins; a function is called once a window.

        Raises:
            BudgetError: What the function returned cannot be read.
            InfeasibleBudgetError: More is held already; the budget stays the same.
        """
        engine, chosen = self._engine, self._engine.next_budget
        if chosen is None or self._is_renewed or self.is_within_window():
            return
        if isinstance(chosen, int):
            engine.next_budget = None
            engine.move_budget(chosen)
        else:
            engine.move_budget(engine.read_budget(chosen))
        self._is_renewed = True

    def _new_window(self) -> Window:
        self.renew_budget()
        self._is_renewed = self._engine.optimizers.has_just_stepped = False
        start, peaks = self._memory_limit.begin()
        if self._steps.open:
            self._steps.note_peak(peaks.level_bytes)
        memory = self._memory_limit.memory(start, self._engine.host_budget_bytes)
        window = Window(memory, self._steps.retained)
        if self._steps.releases and window.carried_bytes:
            released = float(window.carried_bytes)
            window.memory = window.memory._replace(released_bytes=released)
        return window

    def _decide(
        self, step_input: StepInput, table: SizeTable, window: Window
    ) -> Decision:
        engine = self._engine
        if not self.plans:
            engine.last = step_input, table
            return Decision("plan", None)
        memory, part = window.memory, len(window.steps)
        if engine.to_come.unknown and not part:
            engine.to_come.check(step_input, table, memory)
        if window.reason:
            return Decision("fallback", None, reason=window.reason)
        before = None
        if window.planned is not None and window.decision is not None:
            before = window.planned, window.decision
        whole, found = self._policy.decide(
            [*(window.parts if part else ()), step_input],
            memory,
            before,
            is_first=not self._steps.n_begun,
        )
        engine.last = whole, table
        hides, kind = engine.describer.hides, (whole.structure, self._calls.mode.key)
        if hides or self._hid != kind:
            engine.typical = engine.last
            self._hid = kind if hides else None
        # Steps whose layer calls vary may run less.
        pattern = self._learner.model.patterns.get(whole.context)
        may_vary = pattern is not None and pattern.may_vary
        # What is rebuilt just before it is needed may need less than recomputing all.
        if not (found.cache_hit or may_vary or found.rebuilds):
            engine.checks.raise_if_infeasible(whole, memory.start_bytes)
        window.planned, window.decision = whole, found
        if found.reason == SEVERAL_BACKWARDS:
            window.spoil(found.reason)
        elif part and found.chosen is None:
            window.give_up(found.reason)
        return found

    def _agree(
        self, ranks: Ranks, decision: Decision, step_input: StepInput, window: Window
    ) -> Decision:
        """Return the decision that all ranks agree on."""
        is_measured = decision.chosen is None or decision.is_measured
        if window.steps:
            is_measured = window.trace is not None
        agreed = ranks.agree(
            decision,
            window.planned or step_input,
            window.memory,
            part=len(window.steps),
            is_measured=self.plans and is_measured,
            layers=self._engine.layers,
            menu=self._learner.model.menu,
            policy=self._policy if self.plans else None,
        )
        if self.plans:
            window.decision = window.decision and agreed
            if window.steps and agreed.chosen is None:
                window.give_up(agreed.reason)
        return agreed

    # ------------------------------------------------------------------ ending

    def _end_forward(self, step: Step, output: Any) -> None:
        window, trace = step.window, step.window.trace
        if trace is not None:
            trace.mark("root_exit")
            if is_sharded(self.model):
                after_hooks(self.model, trace.leave_hooks)
        if self._engine.ahead.batch:
            self._engine.ahead.ran(step.step_input)
        counts = tuple(map(_N_CALLS, self._calls.layers))
        ran: Decision | None = step.decision
        chosen = step.decision.chosen
        if chosen is not None and (chosen.between or counts != chosen.counts):
            step_input = window.planned or step.step_input
            ran = self._policy.as_ran(step_input, step.decision, counts, step.part)
            step.note_ran(ran)
        self._steps.forward_ended(step, output, counts)
        if trace is not None and trace.spoilt:
            step.withdraw(trace.spoilt)
            window.spoil(trace.spoilt)
        if ran is None:
            window.give_up(step.reason)
        elif not any(counts) or counts == step.counts_before:
            if step.decision.chosen is not None or not step.reason:
                step.withdraw(_NO_LAYER)
        elif self._calls.lacks_gradients:
            step.withdraw(_NO_GRADIENTS)

    def prepare_safest(self) -> None:
        """Make the next step recompute everything, because the last one failed."""
        release_memory(self._engine.device)
        self._steps.abandon()
        self._learner.distrust_plans()
        self._safest_once = True

    @property
    def accumulates(self) -> bool:
        """Whether one of the last two steps found gradients there."""
        return any(self._found_gradients)

    def memory_to_come(self, *, has_gradients: bool) -> Memory:
        """Return the memory at the start of the next step, as far as it is known.

        Note: [As the next step begins] of `mimose.forecast`.

        Args:
            has_gradients: Whether gradients are there when it begins.
        """
        there, to_be = self._engine.describer.gradient_bytes()
        start = self._meter.live_bytes() - there
        if not self._engine.optimizers.have_stepped:
            start = max(start, self._engine.start_bytes)
        if has_gradients:
            start += to_be
        return self._memory_limit.memory(start, self._engine.host_budget_bytes)
