"""Running again what failed: a forward by itself, a whole step by `Session.step`."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mimose.budget import format_bytes
from mimose.distributed import tell_alone, why_forward_waits
from mimose.exactness.handed import autograd_clock
from mimose.exactness.input_watch import is_edited, marks
from mimose.exactness.rollback import Rollback
from mimose.exceptions import LateChangeError, NotRecomputableError
from mimose.inputs.sharding import own_parameters
from mimose.memory.out_of_memory import asked_bytes, is_out_of_memory
from mimose.memory.wall import Footprint
from mimose.policy.policy import Policy
from mimose.runtime.events import EventRunner
from mimose.runtime.step import Step

_log = logging.getLogger(__name__)


class Call:
    """What the root is called with, and whether that has changed since.

    Args:
        args: Its arguments.
        kwargs: Those by name.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.clock = autograd_clock()
        self._marks = marks(args, kwargs)

    def is_edited(self) -> bool:
        """Whether a tensor among the arguments was edited in place."""
        return is_edited(self._marks)


class Retry:
    """Decides whether a forward that failed is run again, as the safest step.

    Args:
        model: The root.
        device: The model's.
        footprint: Is told where memory ran out.
        policy: Makes its plans anew after a failure.
        events: Knows what layers do to what they are given.
        rollback: Puts back what the forward has changed.
        first: Tells other ranks what the first forward shows.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        footprint: Footprint,
        policy: Policy,
        events: EventRunner,
        rollback: Rollback,
    ) -> None:
        self._model = model
        self._device = device
        self._footprint = footprint
        self._policy = policy
        self._events = events
        self._rollback = rollback

    def prepare(self, step: Step, error: BaseException, call: Call) -> bool:
        """Turn a failed step into the safest one, if that can help.

        A forward that has changed what the root was given cannot be run again.

        Args:
            step: Whose forward has failed.
            error: What it raised.
            call: What the root was called with.

        Returns:
            Whether the forward is to be run again; `rewind` then, with no reference to
            the error left: its traceback pins the tensors of the failed forward.
        """
        if is_out_of_memory(error):
            self._footprint.ran_out(asked_bytes(error))
        if isinstance(error, NotRecomputableError):
            for index in error.units:
                self._events.units[index].keep(error.why)
        kinds = (NotRecomputableError, LateChangeError)
        could_help = is_out_of_memory(error) or isinstance(error, kinds)
        if could_help and self._is_waited_for(step, error):
            return False
        if self._has_changed(call):
            return False
        if not self._helps(step, error):
            return False
        _log.warning(
            "mimose: the forward of step %d failed (%s, phase %s, shape %s) and is run "
            "again with everything recomputed",
            step.number,
            type(error).__name__,
            step.phase,
            dict(step.shape),
        )
        self._policy.distrust_plans()
        step.run_again(f"run again after {type(error).__name__} in forward")
        return True

    def rewind(self, step: Step) -> None:
        """Put the process back to where the forward began.

        What autocast has cast, it keeps for the next forward inside of it. That is
        older then than what uses it, and gradients would be added in another order.
        Where an earlier forward of the window has filled the cache, it stays.

        Args:
            step: Whose forward is to be run again.
        """
        release_memory(self._device)
        if not step.part:
            torch.clear_autocast_cache()
        self._rollback.restore()

    def _has_changed(self, call: Call) -> bool:
        """Whether the forward may have changed what the root was given."""
        may_have_changed = self._events.knowledge.may_have_changed
        is_edited = call.is_edited()
        return is_edited or may_have_changed(call.args, call.kwargs, call.clock)

    def _is_waited_for(self, step: Step, error: BaseException) -> bool:
        """Whether other ranks wait for the forward; then the error says so."""
        why = why_forward_waits(self._model, self._events.units)
        if why:
            start, peak = step.start_bytes, step.record().predicted_peak_bytes
            reached = "" if peak is None else f", {format_bytes(peak)} were predicted"
            budget = format_bytes(step.record().budget_bytes)
            tell_alone(
                error,
                f"the forward of step {step.number}",
                why,
                f"The step began with {format_bytes(start)}{reached}, and the budget "
                f"is {budget}.",
            )
        return bool(why)

    def _helps(self, step: Step, error: BaseException) -> bool:
        """Whether the same forward can come out another way."""
        if isinstance(error, LateChangeError):
            if self._rollback.covers(error.buffers):
                return True
            self._events.forget_changes()  # others are likely to follow
            return False
        if isinstance(error, NotRecomputableError):
            return True
        return is_out_of_memory(error) and not step.retries and step.can_be_safer


def release_memory(device: torch.device) -> None:
    """Collect cycles that pin tensors and give cached blocks back."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


class Gradients:
    """The gradients of a model as they are now, to be put back.

    Where none are there yet (the window has just begun) this costs nothing; else it
    holds a copy of each.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._grads = [
            (p, None if p.grad is None else p.grad.detach().clone())
            for p in own_parameters(model)
            if p.requires_grad
        ]

    def restore(self) -> None:
        """Put the gradients back; in place where they still are."""
        for parameter, grad in self._grads:
            if grad is None or parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad.detach_().copy_(grad)
