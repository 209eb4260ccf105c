"""Repeats what failed: a forward, or a whole step if the session runs it.

After an out-of-memory error in a forward everything is released and restored, and the
forward runs once more with everything recomputed. A backward can be repeated only if
the session runs both forward and backward: in `Session.step`, in the Trainer's
`training_step` and in Lightning's closure. The same holds for a layer that turns out
not to be recomputable.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from mimose.budget import format_bytes
from mimose.distributed import is_final, mark_final, why_waits
from mimose.exactness.call_inputs import CallInputs
from mimose.exactness.context import accelerators, saved_random_state
from mimose.exactness.findings import Findings
from mimose.exactness.rollback import Rollback
from mimose.exceptions import LateChangeError, NotRecomputableError, RecomputationError
from mimose.loss_by_rows import LossChoice
from mimose.memory.out_of_memory import asked_bytes, is_out_of_memory
from mimose.model.placement import only_device
from mimose.policy.plans import Plans
from mimose.runtime.budget import SessionBudget
from mimose.runtime.layer_calls import LayerCalls
from mimose.runtime.step import Step, Steps
from mimose.tensors import is_graph_held, tensors_in, version

_log = logging.getLogger(__name__)

_NO_ROOM = "run again, to leave room for the backward"
_MOST_IN_VAIN = 6
"""Each forward that ran again in vain doubles the steps until the next, up to 63, so
that these are at most 1.6% in the end. Without it every forward of six small layers
with a head of 50,000 classes ran twice."""
_AT_THE_WALL = (
    "The forward ended there, and would have needed more. Raise the budget, use a "
    "smaller batch or shorter inputs, or leave such batches out."
)

_Result = TypeVar("_Result")


class NoRoomError(RuntimeError):
    """A forward has left too little room for its backward, and runs again.

    Args:
        changes_plan: Whether everything is recomputed then.
    """

    def __init__(self, *, changes_plan: bool) -> None:
        super().__init__()
        self.changes_plan = changes_plan


class Retry:
    """Decides whether a forward runs again.

    Args:
        model: The model.
        calls: Runs the layers.
        rollback: Restores what a forward has changed.
        budget: The session's budget.
        plans: Not trusted after a failure.
        losses: Chooses how losses are computed.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: LayerCalls,
        rollback: Rollback,
        budget: SessionBudget,
        plans: Plans,
        losses: LossChoice,
    ) -> None:
        self._model, self._calls, self._rollback = model, calls, rollback
        self._budget, self._limit = budget, budget.limit
        self._plans, self._losses = plans, losses
        self._device = only_device(model)
        self._n_in_vain = self._n_to_wait = 0
        """Forwards that ran again in vain since the last one that found room, and how
        often the next ones do not."""

    def check_room(
        self,
        step: Step,
        output: Any,
        given: CallInputs,
        held_bytes: int,
        peak_bytes: int,
    ) -> None:
        """Check that the backward has room: Note: [Room for the backward].

        Args:
            step: The step, whose forward has run.
            output: What the model returned.
            given: What it was given.
            held_bytes: The level now.
            peak_bytes: The highest level since the last reset.

        Raises:
            NoRoomError: It may not have, and to run the forward again may help.
        """
        limit, decision = self._limit, step.decision
        if not self._budget.is_enforced(decision):
            return
        allowed = self._plans.margin.allowed
        level = step.backward_bytes(peak_bytes, held_bytes, allowed)
        if level is None:
            return
        chosen = decision.chosen
        block = 0 if chosen is None else int(chosen.growth.largest_bytes)
        if not self._losses.is_by_rows:
            # A gradient in float32 does not fit where an output in half precision was.
            halves = (t.numel() for t in tensors_in(output) if t.itemsize == 2)
            block = max(block, 4 * max(halves, default=0))
        has_room = limit.has_room(level, block, tries=step.trace is None)
        if step.retries == 1:
            self._n_in_vain = 0 if has_room else min(self._n_in_vain + 1, _MOST_IN_VAIN)
            self._n_to_wait = 2**self._n_in_vain - 1
        if has_room:
            return
        is_gaps = not step.retries
        if is_gaps and self._n_to_wait:
            self._n_to_wait, is_gaps = self._n_to_wait - 1, False
        helps = is_gaps or self._keeps(step)
        if not is_gaps and decision.rebuilds and step.window.plan is not None:
            planned, memory = step.window.plan[0], step.window.memory
            self._plans.lacked_room(planned, memory)
            # Recomputing everything may need more.
            peaks, start = self._budget.least_peaks, memory.start_bytes
            helps = (
                helps and peaks.bound(planned, start, math.inf) <= limit.budget_bytes
            )
        if helps and not (
            self.why_waits(with_backward=False)
            or given.are_edited()
            or self._rollback.has_missed()
        ):
            raise NoRoomError(changes_plan=not is_gaps)
        self._budget.use_grace()

    def _keeps(self, step: Step) -> bool:
        """Whether a plan does less than to recompute every layer that can run again."""
        chosen, least = step.decision.chosen, self._plans.learner.model.menu.least
        if chosen is None:
            return False
        return any(
            not layer.is_kept and any(action != least for action in actions)
            for layer, actions in zip(self._calls.layers, chosen.by_layer, strict=True)
        )

    def may_follow(self, step: Step, error: BaseException, given: CallInputs) -> bool:
        """Give a step whose forward has failed the safest plan, if that can help.

        A forward that has changed its inputs cannot run again.

        Args:
            step: The step.
            error: Its error.
            given: The inputs of the model.

        Returns:
            Whether to run the forward again. Hold no reference to the error, because
            its traceback keeps the tensors of the failed forward.
        """
        if isinstance(error, NoRoomError):
            step.run_again(_NO_ROOM, changes_plan=error.changes_plan)
            return True
        runs_out, is_at_wall = is_out_of_memory(error), False
        if runs_out:
            self._limit.ran_out(asked_bytes(error))
            is_at_wall = self._limit.beyond_wall(asked_bytes(error)) > 0
        elif isinstance(error, NotRecomputableError):
            for index in error.layers:
                self._calls.layers[index].keep(error.why)
        elif isinstance(error, LateChangeError):
            if not self._rollback.covers(error.buffers):
                self._calls.forget_changes()  # others are likely to follow
                return False
        else:
            return False
        forward = step.forward
        what = f"the forward of step {forward.number}"
        if self.others_wait(error, what, with_backward=False):
            return False
        if (runs_out and step.is_safest) or given.are_edited():
            return False
        # At the wall gaps may be the cause, which are gone with the cached blocks.
        changes_plan = step.retries > 0 or not is_at_wall
        _log.warning(
            "mimose: the forward of step %d failed (%s, phase %s, shape %s) and runs "
            "again %s",
            forward.number,
            type(error).__name__,
            step.decision.phase,
            dict(forward.shape),
            "with everything recomputed"
            if changes_plan
            else "with all cached blocks freed",
        )
        self._plans.learner.distrust_plans()
        step.run_again(
            f"run again after {type(error).__name__} in forward",
            changes_plan=changes_plan,
        )
        return True

    def ran_out(self, error: BaseException) -> None:
        """Record that memory ran out in a backward."""
        self._limit.ran_out(asked_bytes(error))

    def why_waits(self, *, with_backward: bool) -> str:
        """Return why other ranks wait for a forward of the model; "" if none does."""
        return why_waits(self._model, self._calls.layers, with_backward=with_backward)

    def others_wait(
        self, error: BaseException, what: str, *, with_backward: bool
    ) -> bool:
        """Whether other ranks wait for what has failed; adds this to the error.

        Args:
            error: The error.
            what: What has failed.
            with_backward: Whether its backward counts too.
        """
        why = self.why_waits(with_backward=with_backward)
        if why and not is_final(error):
            held = format_bytes(self._limit.least_bytes())
            budget = format_bytes(self._budget.n_bytes)
            held_now = f"{held} are held now; the budget is {budget}."
            mark_final(error, what, why, held_now)
        return bool(why)

    def undo(self, step: Step, began: int, n_labels: int) -> bool:
        """Undo a forward that has failed and runs again, in as little as possible.

        Args:
            step: The step.
            began: What `next_sequence_number` returned before the forward.
            n_labels: The number of labels in the step.

        Returns:
            Whether nothing holds the graph that it has made.
        """
        self._rollback.restore(began)  # also attributes that it has set
        self.release()
        # A cast from the failed forward would be older than the nodes that use it,
        # and gradients would be added in another order. An earlier forward of the
        # window may have filled the cache too.
        if not step.forward.part:
            torch.clear_autocast_cache()
        if is_graph_held(began):
            return False
        self._losses.choose_least(n_labels)
        return True

    def release(self, *, is_failed: bool = False) -> None:
        """Collect cycles that hold tensors, and free cached blocks.

        Args:
            is_failed: Whether a backward has failed, after which no plan is trusted.
        """
        gc.collect()
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()
        if is_failed:
            self._plans.learner.distrust_plans()

    def refused(self, step: Step, error: BaseException) -> BaseException:
        """Return the error to raise; if no plan keeps the budget, the one saying so."""
        is_device = isinstance(error, torch.OutOfMemoryError)
        if not (step.retries and is_device) or is_final(error):
            return error
        least = self._limit.beyond_wall(asked_bytes(error))
        if not least:
            return error
        start = int(step.window.memory.start_bytes)
        return self._budget.error(least, start, _AT_THE_WALL)


def saved_gradients(parameters: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Save the gradients of parameters.

    Without gradients (when a window has just begun) this costs nothing; else it holds a
    copy of each.

    Args:
        parameters: The parameters.

    Returns:
        A function that restores them, in place if the tensors still exist.
    """
    grads = [
        (p, None if p.grad is None else p.grad.detach().clone())
        for p in parameters
        if p.requires_grad
    ]

    def restore() -> None:
        for parameter, grad in grads:
            if grad is None or parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad.detach_().copy_(grad)

    return restore


class Attempts:
    """Decides after each failed attempt at a step whether another one can help.

    Args:
        retry: Knows who waits.
        steps: The session's steps.
        findings: Says which layers are kept.
        prepare: Makes the next step recompute everything; see `Driver.prepare_safest`.
        is_new: Whether the session was made during the step.
    """

    def __init__(
        self,
        retry: Retry,
        steps: Steps,
        findings: Findings,
        prepare: Callable[[bool], None],
        *,
        is_new: bool = False,
    ) -> None:
        self._retry, self._steps, self._findings = retry, steps, findings
        self._prepare = prepare
        self._n_kept = 0 if is_new else len(findings.kept)
        self._n_begun = 0 if is_new else steps.n_begun
        self._has_run_out = False

    @property
    def has_one_forward(self) -> bool:
        """Whether the attempt has run one forward, which the session can undo."""
        return self._steps.n_begun == self._n_begun + 1

    def can_follow(self, error: RuntimeError) -> bool:
        """Whether another attempt, with the safest plan, may succeed.

        Args:
            error: The error of the last attempt.
        """
        is_ours = isinstance(error, RecomputationError)  # its layer is kept by now
        runs_out = not is_ours and is_out_of_memory(error)
        if not (is_ours or runs_out):
            return False
        if runs_out:
            self._retry.ran_out(error)
        if self._retry.others_wait(error, "the step", with_backward=True):
            return False
        n_kept = len(self._findings.kept)
        if self._has_run_out if runs_out else n_kept == self._n_kept:
            return False
        self._has_run_out = self._has_run_out or runs_out
        self._n_kept, self._n_begun = n_kept, self._steps.n_begun
        _log.warning("mimose: a step failed (%s) and runs again", type(error).__name__)
        return True

    def prepare(self, *, undoes: bool = False) -> None:
        """Let the next step recompute everything. Hold no reference to the error.

        Args:
            undoes: Whether to restore what the last forward has changed.
        """
        self._prepare(undoes)


class TrainersStep:
    """Repeats a failed step in a trainer's loop, if that needs no copies.

    Unlike `Session.step` it saves only the random state; the session undoes the
    forward. So the step is not repeated if there were gradients before it, if it has
    run several forwards, or if it has changed weights.

    Args:
        model: The trained model.
        begin: Returns the session's `Attempts`, or None without a session.
    """

    def __init__(self, model: nn.Module, begin: Callable[..., Attempts | None]) -> None:
        self._begin = begin
        self._weights = list(model.parameters())  # once: the search takes long
        self._restore_random = saved_random_state(accelerators(self._weights))
        self._versions: list[int] | None = None
        """The versions of the weights; None if they had gradients."""
        self.n_failed = 0
        """The number of failed attempts."""

    def note_gradients(self) -> None:
        """Record that the backward begins with the gradients that are there now."""
        is_clean = all(weight.grad is None for weight in self._weights)
        self._versions = list(map(version, self._weights)) if is_clean else None

    def run(self, attempt: Callable[[], _Result]) -> _Result:
        """Run forward and backward, again as long as another attempt may help.

        Args:
            attempt: Runs them.

        Raises:
            RuntimeError: It failed for another reason, or cannot run again.
        """
        attempts = self._begin()
        while True:
            try:
                return attempt()
            except RuntimeError as error:
                found = self._begin(is_new=True)
                if found is None:
                    raise
                attempts = attempts or found
                weights = list(map(version, self._weights))
                is_undoable = attempts.has_one_forward and self._versions == weights
                if not (is_undoable and attempts.can_follow(error)):
                    raise
            self.n_failed += 1
            attempts.prepare(undoes=True)
            self._restore_random()
            for weight in self._weights:
                weight.grad = None
