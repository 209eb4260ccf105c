"""A step from the end of its forward on: where its backward begins and ends.

Note: [The end of backward]
A hook on the root's outputs asks the autograd engine to call back when the whole
backward is done, every gradient accumulated; it works with a loss computed outside
the model. Nothing but the outputs' graph refers to that hook, so once it is gone no
backward of the step can follow. A backward that avoids the outputs (an auxiliary loss
on an inner tensor alone) is not seen: its step closes without an observed peak.

Note: [A step's stages]
A step begins in its forward. When that has ended it waits for a backward, which may
never come; with its first gradient it is in backward, and when the engine is done, or
no backward can come any more, it is closed: its outcome is made then, once. A graph
that was retained can be run backward again, which a closed step takes note of.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mimose.memory.marks import RetainedOutputs
from mimose.records import Peaks
from mimose.torch_private import NO_GRAPH_TASK, current_graph_task, queue_callback


class Stage(enum.Enum):
    """Where a step is: Note: [A step's stages]."""

    FORWARD = enum.auto()
    WAITING = enum.auto()
    BACKWARD = enum.auto()
    CLOSED = enum.auto()
    AGAIN = enum.auto()
    """In another backward, after it was closed."""


class Backward:
    """What is seen of a step once its forward has ended.

    Args:
        carried_bytes: What the step began with of the outputs of the one before.

    Attributes:
        stage: Where the step is.
        n_ended: Backwards that have run to their end.
        peaks: The highest readings; None until a backward has ended, and where the
            meter tells none.
        peak_bytes: The highest level so far.
        released_bytes: What went of the carried outputs before the first gradient.
        number: What torch counts it as.
        unseen: Why no backward can be seen; "" if one can.
    """

    def __init__(self, carried_bytes: int) -> None:
        self.carried_bytes = carried_bytes
        self.stage = Stage.FORWARD
        self.n_ended = 0
        self.peaks: Peaks | None = None
        self.peak_bytes = 0
        self.released_bytes = 0
        self.number = 0
        self.unseen = ""
        self._is_running = False
        self._graph: weakref.ref[Any] | None = None
        self._retained: RetainedOutputs | None = None

    def wait(self, graph: Any, retained: RetainedOutputs) -> None:
        """Wait for a gradient: the forward has ended.

        Args:
            graph: Lives as long as one can come.
            retained: The outputs of the step before.
        """
        self.stage = Stage.WAITING
        self._graph = weakref.ref(graph)
        self._retained = retained

    def begin(self) -> bool:
        """Take note of a gradient; return whether it is a backward's first."""
        if self.stage in (Stage.BACKWARD, Stage.AGAIN):
            return False
        is_closed = self.stage is Stage.CLOSED
        self._is_running = True
        self.number = current_graph_task()
        self.stage = Stage.AGAIN if is_closed else Stage.BACKWARD
        self.released_bytes = self.gone_bytes()
        return True

    def gone_bytes(self) -> int:
        """Return how much has gone of the outputs that the step began with."""
        if not self.carried_bytes or self._retained is None:
            return 0
        return self.carried_bytes - self._retained.live_bytes()

    def end(self) -> bool:
        """Take note that a backward has ended; return whether it counts.

        It does not where the step was closed before it, as by a session's detach.
        """
        self._is_running = False
        if self.stage is Stage.AGAIN:
            self.stage = Stage.CLOSED
        if self.stage is Stage.CLOSED and not self.n_ended:
            return False
        self.n_ended += 1
        return True

    def close(self) -> None:
        """Take note that the step's outcome is made."""
        self.stage = Stage.CLOSED

    def await_another(self) -> None:
        """Wait for another backward of the same graph."""
        self.stage = Stage.WAITING

    @property
    def is_running(self) -> bool:
        """Whether a backward has begun and not run to its end."""
        return self._is_running

    def miss(self, why: str) -> None:
        """Take note that no backward of it can be seen, and why."""
        self.unseen = why

    def raise_peak(self, level_bytes: int) -> int:
        """Take in a peak; return the highest so far."""
        self.peak_bytes = max(self.peak_bytes, level_bytes)
        return self.peak_bytes

    def note_peaks(self, peaks: Peaks) -> None:
        """Take in what was read as a backward ended."""
        self.peaks = peaks

    @property
    def can_come(self) -> bool:
        """Whether its graph is still there."""
        return self._graph is not None and self._graph() is not None


class Waiting:
    """The hook that only the outputs' graph refers to: Note: [The end of backward].

    Args:
        backward: The step's.
        on_begin: Called at its first gradient.
        on_end: Called when it has run to its end.
    """

    __slots__ = ("__weakref__", "_backward", "_on_begin", "_on_end")

    def __init__(
        self,
        backward: Backward,
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._backward = backward
        self._on_begin = on_begin
        self._on_end = on_end

    def __call__(self, _: torch.Tensor) -> None:
        """Take note of a gradient."""
        if self._backward.begin():
            self._on_begin()
            queue_callback(self._wait_for_others)

    def _wait_for_others(self) -> None:
        """Come after who has been called since: FSDP2 reduces what is left there."""
        queue_callback(self._on_end)

    def hook(self, outputs: Sequence[torch.Tensor]) -> None:
        """Wait for gradients of the outputs that have a graph."""
        for tensor in outputs:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self)  # type: ignore[no-untyped-call]


def is_running() -> bool:
    """Whether this is called from within a backward."""
    return current_graph_task() != NO_GRAPH_TASK
