"""Noticing where a step's backward begins and ends.

Note: [The end of backward]
A hook on the root's outputs asks the autograd engine to call back when the whole
backward is done, every gradient accumulated; it works with a loss computed outside
the model. Nothing but the outputs' graph refers to that hook, so once it is gone no
backward of the step can follow. A backward that avoids the outputs (an auxiliary loss
on an inner tensor alone) is not seen: its step closes without an observed peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.autograd import Variable

from mimose.run.step import Step


class Listener(Protocol):
    """Who is told of backwards."""

    def backward_begins(self, step: Step) -> None:
        """Take note of a step's first gradient."""
        ...

    def backward_ends(self, step: Step) -> None:
        """Take note that a backward has run to its end."""
        ...


class Waiting:
    """The hook that only the outputs' graph refers to: Note: [The end of backward].

    Args:
        step: The step.
        listener: Is told.
    """

    __slots__ = ("__weakref__", "_listener", "_step")

    def __init__(self, step: Step, listener: Listener) -> None:
        self._step = step
        self._listener = listener

    def __call__(self, _: torch.Tensor) -> None:
        """Take note of a gradient."""
        step, listener = self._step, self._listener
        if step.begin_backward():
            listener.backward_begins(step)
            Variable._execution_engine.queue_callback(
                lambda: listener.backward_ends(step)
            )

    def hook(self, outputs: Sequence[torch.Tensor]) -> None:
        """Wait for gradients of the outputs that have a graph."""
        for tensor in outputs:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self)  # type: ignore[no-untyped-call]


def is_running() -> bool:
    """Whether this is called from within a backward."""
    return bool(torch._C._current_graph_task_id() != -1)
