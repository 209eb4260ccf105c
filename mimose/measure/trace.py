"""Measures one step: marks at the boundaries.

Note: [Boundaries]
A mark is set where the step begins, where a call is entered and left, at the end of the
model's forward, where the backward begins at a loss that the model returned, where the
*first* gradient reaches any output that a call made, where a recomputation begins and
ends, and at the end of the backward. Each mark reads the meter and starts a new peak.
Two marks give a segment's retained bytes and its transient peak over the level at its
start. Hooks on inputs would not help: they run in the order of registration, before the
previous call's output, and for an input that many calls share (T5's encoder output)
only after all of them. So a backward segment ends at the next boundary.

Note: [Held bytes from the recomputation]
What a call would hold if it were kept is what its recomputation holds right after the
layer's own forward has returned, because the same operators save the same tensors. So a
collecting step needs no extra run. It is read inside the region and without the early
stop, whose exception holds frames (3% too much in GPT-2, 20% in a ResNet).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mimose.inputs.families import autocast_keeps_copies
from mimose.measure.gauges import Gauge
from mimose.memory.meters import Meter
from mimose.memory.out_of_memory import is_out_of_memory
from mimose.tensors import tensors_in
from mimose.types import Measured, OnRecompute

INNER_GRADIENT = "a gradient is taken inside the forward"
"""Then the segments are not those of an ordinary step."""


class Mark(NamedTuple):
    """A reading of the meter at a boundary."""

    kind: str
    call: int
    """Index of the call, or -1."""
    live_bytes: int
    """What is held."""
    peak_bytes: int
    """The highest level since the mark before."""
    keeps_copies: bool = False
    """Whether autocast keeps its copies of weights now."""


class Trace:
    """The marks and measurements of one step.

    Args:
        meter: The meter that marks read.
        budget_bytes: The budget.

    Attributes:
        is_closed: Whether it reads no more.
        why_discarded: Why nothing can be learned from the readings; "" if it can.
    """

    def __init__(self, meter: Meter, budget_bytes: float = math.inf) -> None:
        self._meter = meter
        self._budget_bytes = budget_bytes
        self.marks: list[Mark] = []
        self.calls: list[Measured] = []
        self.peak_bytes = 0
        self.is_closed = False
        self.why_discarded = ""
        self._is_forward = True
        self._is_in_call = False
        self._taken_bytes: int | None = None
        """Total of all allocations at the end of the model's forward."""
        self._least_peak_bytes = 0
        """A lower bound of the running segment's peak."""

    @property
    def room_bytes(self) -> float:
        """What the budget left at the last mark."""
        return self._budget_bytes - self.marks[-1].live_bytes

    def mark(self, kind: str, call: int = -1) -> None:
        """Read the meter at a boundary; the first mark only starts the peak."""
        if self.is_closed:
            return
        if kind == "root_exit":
            self._is_forward = False
            self._taken_bytes = self._meter.taken_bytes()
        live, peak = self._meter.read()
        self._meter.reset_peak()
        peak = max(peak, self._least_peak_bytes) if self.marks else live
        self._least_peak_bytes = 0
        self.peak_bytes = max(self.peak_bytes, peak)
        self.marks.append(Mark(kind, call, live, peak, autocast_keeps_copies()))

    def turn(self) -> None:
        """Mark the begin of the backward, if nothing was made since the forward's end.

        Otherwise the mark would hide the memory of metrics computed in between.
        """
        taken = self._meter.taken_bytes()
        if taken is None or self._taken_bytes is None:
            return
        if taken - self._taken_bytes <= 2**14:  # numbers: a scaled loss, its gradient
            self.mark("backward")

    def end(self) -> None:
        """Mark the end of the backward, and stop reading."""
        self.mark("end")
        self.is_closed = True

    def stop(self) -> None:
        """Read no more."""
        self.is_closed = True

    def join_forward(self) -> None:
        """Record that another forward begins; the gap continues to its first call."""
        if not self.is_closed:
            self._is_forward = True
            self._join()

    def leave_hooks(self) -> None:
        """Record that the hooks after the model's forward have run."""
        if not self.is_closed and self.marks and self.marks[-1].kind == "root_exit":
            self._join()
            self.mark("root_exit")

    def _join(self) -> None:
        """Remove the last mark, because the running segment continues."""
        peak = self.marks.pop().peak_bytes
        self._least_peak_bytes = max(self._least_peak_bytes, peak)

    def enter(self, measured: Measured) -> int:
        """Mark a call's entry; return its index."""
        index = len(self.calls)
        self.calls.append(measured)
        self._is_in_call = True
        self.mark("enter", index)
        return index

    def leave(
        self, index: int, inputs: Sequence[torch.Tensor], output: Any
    ) -> tuple[int, ...]:
        """Mark a call's exit and wait for its first gradient.

        Returns:
            The ranks of the outputs, whose sizes are added to those of the inputs.
        """
        self.mark("exit", index)
        self._is_in_call = False
        outputs = list(tensors_in(output))
        shapes = [tuple(tensor.shape) for tensor in outputs]
        self.calls[index].sizes += tuple(itertools.chain(*shapes))
        given = {id(tensor) for tensor in inputs}
        for tensor in outputs:
            is_made = tensor.grad_fn is not None and id(tensor) not in given
            if tensor.requires_grad and is_made:
                tensor.register_hook(self._on_gradient(index))  # type: ignore[no-untyped-call]
        return tuple(map(len, shapes))

    def kept(
        self,
        index: int,
        forward: Callable[[], Any],
        inputs: Sequence[torch.Tensor],
        gauge: Gauge,
    ) -> Any:
        """Run a call that is kept, and count what it holds."""
        output, reading = gauge(forward, inputs)
        call = self.calls[index]
        call.precision = reading.precision
        call.count(reading.held_bytes, flops=0)
        call.copied_bytes = reading.copied_bytes
        call.largest_bytes = reading.largest_bytes
        return output

    def recomputed(self, index: int, gauge: Gauge) -> OnRecompute:
        """Return the `on_recompute` of a call: see Note: [Held bytes …]."""

        def run(forward: Callable[[], Any], given: Sequence[torch.Tensor]) -> Any:
            is_own = self._is_in_call and index == len(self.calls) - 1
            if self._is_forward and not is_own:
                self._discard_readings(INNER_GRADIENT)
            if self.is_closed:
                return forward()
            self.mark("recompute", index)
            try:
                output, reading = gauge(forward, given)
            except RuntimeError as error:
                if is_out_of_memory(error):  # it runs again
                    self._discard_readings("a recomputation ran out of memory")
                raise
            call = self.calls[index]
            call.count(reading.held_bytes, reading.flops, reading.early_flops)
            call.copied_bytes = reading.copied_bytes
            call.precision = reading.precision
            call.largest_bytes = reading.largest_bytes
            call.kept_output_bytes = reading.saved_output_bytes
            if not self._meter.reads_peak:
                self._least_peak_bytes = self.marks[-1].live_bytes + reading.peak_bytes
            self.mark("recomputed", index)
            return output

        return run

    def _discard_readings(self, reason: str) -> None:
        """Stop reading, and say why nothing can be learned from what was read."""
        self.why_discarded = reason
        self.is_closed = True

    def _on_gradient(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            # A gradient inside a call's forward comes from a trial of its action.
            if self._is_in_call:
                return
            if self._is_forward:
                self._discard_readings(INNER_GRADIENT)
            elif not self.calls[index].has_gradient:
                self.calls[index].has_gradient = True
                self.mark("gradient", index)

        return hook
