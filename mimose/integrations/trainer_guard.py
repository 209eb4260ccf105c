"""From a callback to the Trainer that calls it, which nothing hands over.

Note: [Reaching the trainer]
The trainer gives a callback neither itself nor a word of an exception, and by the time
a callback sees the logs, the trainer's history and the loggers before it in the list
have taken theirs. So the callback looks up, once a training, which handler is calling
it and which trainer is calling that. It then moves to the front of the handler's list,
so that what it adds to the logs reaches all, and wraps that trainer's `train`, so that
an exception anywhere in it leaves the model as it was, and its `training_step`, which
alone is given each batch, and in which a failed backward can be repeated. Where it is
called in another way, it says so once and does what it can.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from typing import Any

from accelerate import DistributedType
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler

from mimose.runtime.retry import TrainersStep


def guard(trainer: Any, kind: type[Any]) -> None:
    """Let an exception in a trainer's `train` detach its callbacks.

    Args:
        trainer: Its own attributes are set; a training that runs already is guarded
            step by step.
        kind: The class of those callbacks.
    """
    if isinstance(trainer.train, _Guarded):
        return
    if trainer.is_in_train:
        trainer.training_step = _Guarded(trainer, "training_step", kind)
    trainer.training_step = _Step(trainer, "training_step", kind)
    trainer.train = _Guarded(trainer, "train", kind)


class _Guarded:
    """A trainer's method that detaches the callbacks where it raises.

    It does not keep the trainer alive, and a copy of the trainer gets one of its own.
    """

    def __init__(self, trainer: Any, name: str, kind: type[Any]) -> None:
        functools.update_wrapper(self, getattr(type(trainer), name), updated=())
        self._trainer = weakref.ref(trainer)
        self._name = name
        self._kind = kind
        self._own = vars(trainer).get(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._method(*args, **kwargs)
        except BaseException:
            for callback in self._callbacks:
                callback.detach()
            raise

    @property
    def _method(self) -> Any:
        trainer: Any = self._trainer()
        return self._own or getattr(type(trainer), self._name).__get__(trainer)

    @property
    def _callbacks(self) -> list[Any]:
        trainer: Any = self._trainer()
        every = trainer.callback_handler.callbacks
        return [callback for callback in every if isinstance(callback, self._kind)]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Guarded:
        trainer = self._trainer()
        return type(self)(memo.get(id(trainer), trainer), self._name, self._kind)

    def __reduce__(self) -> Any:
        return type(self), (self._trainer(), self._name, self._kind)


class _Step(_Guarded):
    """A trainer's step on one batch.

    Where one process trains and no gradients are there yet, it is run again if its
    backward fails in a way that another plan helps against.
    """

    def __call__(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        repeats = [
            each._repeats for each in self._callbacks if each._repeats is not None
        ]
        if len(repeats) != 1 or not self._is_alone:
            return self._method(model, inputs, *args, **kwargs)
        step = TrainersStep(model, lambda: repeats[0])
        step.note_gradients()
        given = [copy.copy(inputs)]  # a step may take out of it what it has used

        def attempt() -> Any:
            again = given[0] if step.n_failed else inputs
            given[0] = copy.copy(given[0])
            return self._method(model, again, *args, **kwargs)

        return step.run(attempt)

    @property
    def _is_alone(self) -> bool:
        trainer: Any = self._trainer()
        kind = getattr(trainer.accelerator, "distributed_type", None)
        return bool(kind == DistributedType.NO)


def callers() -> tuple[CallbackHandler | None, Trainer | None]:
    """Find the handler that calls a callback, and the trainer that calls it."""
    handler: CallbackHandler | None = None
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if handler is None and isinstance(caller, CallbackHandler):
            handler = caller
        if isinstance(caller, Trainer):
            return handler, caller
        frame = frame.f_back
    return handler, None
