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
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from mimose.budget import format_bytes
from mimose.distributed import is_final, mark_final, why_waits
from mimose.exactness.side_effects import Given, accelerators, saved_random_state
from mimose.exceptions import (
    LateChangeError,
    NotRecomputableError,
    RecomputationError,
)
from mimose.memory.out_of_memory import asked_bytes, is_out_of_memory
from mimose.runtime.step import Step
from mimose.tensors import version

if TYPE_CHECKING:
    from mimose.runtime.engine import Engine

_log = logging.getLogger(__name__)

_NO_ROOM = "run again, to leave room for the backward"

_Result = TypeVar("_Result")


class NoRoomError(RuntimeError):
    """A forward has left too little room for its backward, and runs again.

    Args:
        changes_plan: Whether everything is recomputed then.
    """

    def __init__(self, *, changes_plan: bool) -> None:
        super().__init__()
        self.changes_plan = changes_plan


def may_run_again(
    engine: Engine, step: Step, error: BaseException, given: Given
) -> bool:
    """Give a step whose forward has failed the safest plan, if that can help.

    A forward that has changed its inputs cannot run again.

    Args:
        engine: The session's parts.
        step: The step.
        error: Its error.
        given: The inputs of the model.

    Returns:
        Whether to run the forward again. Hold no reference to the error, because its
        traceback keeps the tensors of the failed forward.
    """
    if isinstance(error, NoRoomError):
        step.run_again(_NO_ROOM, changes_plan=error.changes_plan)
        return True
    runs_out, is_at_wall = is_out_of_memory(error), False
    if runs_out:
        engine.memory_limit.ran_out(asked_bytes(error))
        is_at_wall = engine.memory_limit.beyond_wall(asked_bytes(error)) > 0
    elif isinstance(error, NotRecomputableError):
        for index in error.layers:
            engine.layers[index].keep(error.why)
    elif isinstance(error, LateChangeError):
        if not engine.rollback.covers(error.buffers):
            engine.calls.forget_changes()  # others are likely to follow
            return False
    else:
        return False
    why = why_waits(engine.driver.model, engine.layers, with_backward=False)
    if _others_wait(engine, error, f"the forward of step {step.number}", why):
        return False
    if (runs_out and step.is_safest) or given.are_edited():
        return False
    # At the wall gaps may be the cause, which are gone once cached blocks are freed.
    changes_plan = step.retries > 0 or not is_at_wall
    _log.warning(
        "mimose: the forward of step %d failed (%s, phase %s, shape %s) and runs again "
        "%s",
        step.number,
        type(error).__name__,
        step.phase,
        dict(step.shape),
        "with everything recomputed"
        if changes_plan
        else "with all cached blocks freed",
    )
    engine.learner.distrust_plans()
    step.run_again(
        f"run again after {type(error).__name__} in forward", changes_plan=changes_plan
    )
    return True


def _others_wait(engine: Engine, error: BaseException, what: str, why: str) -> bool:
    """Whether other ranks wait for what has failed; adds this to the error."""
    if why and not is_final(error):
        held = format_bytes(engine.memory_limit.least_bytes())
        budget = format_bytes(engine.memory_limit.budget_bytes)
        mark_final(error, what, why, f"{held} are held now; the budget is {budget}.")
    return bool(why)


def release_memory(device: torch.device) -> None:
    """Collect cycles that hold tensors, and free cached blocks."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


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
        engine: The session's parts.
        is_new: Whether the session was made during the step.
    """

    def __init__(self, engine: Engine, *, is_new: bool = False) -> None:
        self._engine = engine
        self._n_kept = 0 if is_new else len(engine.findings.kept)
        self._n_begun = 0 if is_new else engine.steps.n_begun
        self._has_run_out = False

    @property
    def has_one_forward(self) -> bool:
        """Whether the attempt has run one forward, which the session can undo."""
        return self._engine.steps.n_begun == self._n_begun + 1

    def can_follow(self, error: RuntimeError) -> bool:
        """Whether another attempt, with the safest plan, may succeed.

        Args:
            error: The error of the last attempt.
        """
        is_ours = isinstance(error, RecomputationError)  # its layer is kept by now
        runs_out = not is_ours and is_out_of_memory(error)
        if runs_out:
            self._engine.memory_limit.ran_out(asked_bytes(error))
        elif not is_ours:
            return False
        engine = self._engine
        why = why_waits(engine.driver.model, engine.layers, with_backward=True)
        if _others_wait(engine, error, "the step", why):
            return False
        n_kept = len(self._engine.findings.kept)
        if self._has_run_out if runs_out else n_kept == self._n_kept:
            return False
        self._has_run_out = self._has_run_out or runs_out
        self._n_kept, self._n_begun = n_kept, self._engine.steps.n_begun
        _log.warning("mimose: a step failed (%s) and runs again", type(error).__name__)
        return True

    def prepare(self, *, undoes: bool = False) -> None:
        """Let the next step recompute everything. Hold no reference to the error.

        Args:
            undoes: Whether to restore what the last forward has changed.
        """
        self._engine.driver.prepare_safest()
        if undoes:
            self._engine.rollback.restore()


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
