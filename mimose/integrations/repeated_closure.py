"""Running the closure of Lightning's automatic optimization again, if that helps.

Note: [The closure]
In automatic optimization Lightning makes a closure for each batch, which runs
`training_step`, zeroes the gradients and runs the backward. It calls that itself where
it accumulates, and else hands it to `optimizer_step` and the precision's plugin. So it
is as it is made that it learns to repeat itself. A second run finds no gradients, so
there is nothing to zero, and has logged before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from mimose.runtime.retry import Repeats, TrainersStep

_MAKES = "_make_closure"
"""The method of Lightning's loop that makes a closure. If it were another, no step of
Lightning's would be run again."""
_PARTS = ("_step_fn", "_zero_grad_fn")
"""What a closure runs first and second."""


class RepeatedClosures:
    """Lets a trainer's closures run again: see Note: [The closure].

    Args:
        trainer: The trainer.
        module: The LightningModule.
        repeats: Returns the session's, as soon as there is one.
    """

    def __init__(
        self, trainer: Any, module: nn.Module, repeats: Callable[[], Repeats | None]
    ) -> None:
        self._module = module
        self._repeats = repeats
        self._loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self._make: Callable[..., Any] | None = getattr(self._loop, _MAKES, None)
        if self._make is not None:
            setattr(self._loop, _MAKES, self._made)

    def remove(self) -> None:
        """Give the trainer back as it was."""
        vars(self._loop).pop(_MAKES, None)

    def _made(self, *args: Any, **kwargs: Any) -> Any:
        assert self._make is not None
        made = self._make(*args, **kwargs)
        if all(hasattr(made, name) for name in _PARTS):
            made.closure = _Repeated(made, self._module, self._repeats)
        return made


class _Repeated:
    """A closure's run, repeated if its backward fails; in place of its own.

    Args:
        made: The closure.
        module: The LightningModule.
        repeats: Returns the session's.
    """

    def __init__(
        self, made: Any, module: nn.Module, repeats: Callable[[], Repeats | None]
    ) -> None:
        self._made = weakref.ref(made)  # in a cycle it would hold the batch
        self._step_fn, self._zero_grad_fn = made._step_fn, made._zero_grad_fn
        self._module: Any = module
        self._repeats = repeats
        self._step: TrainersStep | None = None
        made._step_fn = self._train
        if self._zero_grad_fn is not None:
            made._zero_grad_fn = self._zero

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made: Any = self._made()
        run = type(made).closure
        self._step = TrainersStep(self._module, self._repeats)
        return self._step.run(lambda: run(made, *args, **kwargs))

    def _train(self) -> Any:
        if self._step is None or not self._step.n_failed:
            return self._step_fn()
        before = vars(self._module).pop("log", None)
        self._module.log = _log_nothing
        try:
            return self._step_fn()
        finally:
            del self._module.log
            if before is not None:
                self._module.log = before

    def _zero(self) -> None:
        assert self._step is not None
        if not self._step.n_failed:
            self._zero_grad_fn()
            self._step.note_gradients()


def _log_nothing(*_: Any, **__: Any) -> None:
    """Leave out what the first run has logged."""
