"""The root's forward: a step, where one is to be run."""

from __future__ import annotations

from typing import Any

from torch import nn

from mimose.exceptions import MimoseError
from mimose.inputs.patch import Patch, hidden, is_traced
from mimose.runtime.driver import Driver
from mimose.torch_private import eval_frame_callback, top_transform

_TRANSFORMED = (
    "the model was called inside a transform of torch.func (grad, vmap, jvp, …), whose "
    "tensors have no memory of their own to plan: detach the session before, or call a "
    "copy of the model that none is attached to"
)


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
        self._run = hidden(driver.run)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, or pass straight through."""
        if self.is_removed:
            return self.original(*args, **kwargs)
        if not self._driver.is_idle:
            self._driver.pass_by()
            return self.original(*args, **kwargs)
        if top_transform() is not None:
            if self._driver.plans:
                raise MimoseError(_TRANSFORMED)
            return self.original(*args, **kwargs)  # a baseline has nothing to keep to
        if is_traced() or eval_frame_callback() is not None:  # compiled after attach
            return self._run(self.original, args, kwargs)
        return self._driver.run(self.original, args, kwargs)
