"""Measuring one step: marks at the boundaries, and the samples that follow.

Note: [Boundaries]
A mark is set where the step begins, where an event is entered and left, where the
root is left, where the *first* gradient reaches any output that an event made, where
a recomputation begins and ends, and at the end of backward. Each mark reads the meter
and starts a new peak, so a segment's excess is its peak over the level it began at.
Hooks on inputs are of no use: they fire in the order of registration, before the
previous event's output, and an input shared by many events (T5's encoder output)
fires after all of them. So a backward segment reaches to the next boundary.

Note: [Held bytes from the recomputation]
What an event would hold if it were kept is what its recomputation holds right after
the unit's own forward has returned: the same operators save the same tensors. So
collecting runs nothing twice that is not recomputed anyway. Read inside the region,
and without the early stop, whose exception pins frames (3% too much in GPT-2, 20% in
a ResNet).
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mimose.inputs.families import autocast_keeps_copies
from mimose.memory.gauges import Gauge, Reading
from mimose.memory.meters import Meter
from mimose.tensors import storages_in, tensors_in
from mimose.torch_private import base_of, storage_key, storage_users, tensor_users
from mimose.types import (
    Measured,
    OnRecompute,
)

_FILE_NOISE = 65536
"""A segment in which more bytes of files were mapped tells nothing of its excess."""
INNER_GRADIENT = "a gradient is taken inside the forward"
"""Then no segment is what it is taken for."""
SEAM = "seam"
"""The kind of a mark within a segment."""
_SMALLEST = 512
"""Smaller inputs are not looked after: no allocator has smaller blocks."""


class Mark(NamedTuple):
    """What the meter said at a boundary."""

    kind: str
    event: int
    """Index of the event, or -1."""
    live_bytes: int
    """Held, mapped files left out."""
    peak_bytes: int
    """The highest since the mark before, mapped files left out."""
    is_clean: bool
    """False where files were mapped since the mark before (see `_FILE_NOISE`)."""
    keeps_copies: bool = False
    """Whether autocast keeps its copies of weights just now: Note: [Copies]."""
    gone_bytes: float = 0.0
    """Of inputs that layers have let go, gone by now."""


class Trace:
    """The marks and measurements of one step.

    Args:
        meter: Where the marks read.
        budget_bytes: What may be held.

    Attributes:
        predicted_bytes: What the step is predicted to reach; infinite if nothing is.
        spoilt: Why nothing is to be learned of what was read; "" if something is.
    """

    def __init__(self, meter: Meter, budget_bytes: float = math.inf) -> None:
        self._meter = meter
        self._budget_bytes = budget_bytes
        self.predicted_bytes = math.inf
        self._file_bytes = 0
        self._first_file_bytes = 0
        self.marks: list[Mark] = []
        self.events: list[Measured] = []
        self.peak_bytes = 0
        self.is_closed = False
        self.spoilt = ""
        self._is_forward = True
        self._is_in_event = False
        self._gone_bytes = 0.0

    @property
    def file_growth_bytes(self) -> int:
        """Bytes of files mapped during the step."""
        return self._file_bytes - self._first_file_bytes

    @property
    def room_bytes(self) -> float:
        """What was left of the budget at the last mark."""
        return self._budget_bytes - self.marks[-1].live_bytes - self._file_bytes

    @property
    def spare_bytes(self) -> float:
        """What is left of that without the step coming out above its prediction."""
        spare = self.predicted_bytes - self.marks[-1].live_bytes - self._file_bytes
        return min(spare, self.room_bytes)

    def mark(self, kind: str, event: int = -1) -> None:
        """Read the meter at a boundary; the first mark only starts the peak."""
        if self.is_closed:
            return
        if kind == "root_exit":
            self._is_forward = False
        if kind in ("enter", "root_exit", "gradient"):
            is_last = kind == "gradient"
            end = event if kind == "enter" else len(self.events)
            for at, before in enumerate(self.events[:end]):
                before.settle(end - at - 1 + is_last, is_last=is_last)
            self._gone_bytes = sum(each.gone_bytes for each in self.events)
        live, peak, files = self._meter.read()
        self._meter.reset_peak()
        if not self.marks:
            peak, self._file_bytes, self._first_file_bytes = live, files, files
        self.peak_bytes = max(self.peak_bytes, peak)
        is_clean = abs(files - self._file_bytes) <= _FILE_NOISE
        self._file_bytes = files
        self.marks.append(
            Mark(
                kind,
                event,
                live - files,
                peak - files,
                is_clean,
                autocast_keeps_copies(),
                self._gone_bytes,
            )
        )

    def end(self, *, is_last: bool = True) -> None:
        """Mark the end of a backward; after the last one read no more."""
        self.mark("end")
        if is_last:
            self.close()

    def join_forward(self) -> None:
        """Take note that another forward begins: the gap goes on to its first event."""
        if self.is_closed:
            return
        self._is_forward = True
        self._rename(self._root_exit())

    def leave_hooks(self) -> None:
        """Take note that what hangs on the root's call has run, behind its forward."""
        if not self.is_closed and self.marks and self.marks[-1].kind == "root_exit":
            self._rename(len(self.marks) - 1)
            self.mark("root_exit")

    def await_backward(self) -> None:
        """Take note that another backward comes: the loss goes on to its beginning."""
        self._rename(self._root_exit() + 1)
        for event in self.events:
            event.await_gradient()

    def _root_exit(self) -> int:
        kinds = [mark.kind for mark in self.marks]
        return len(kinds) - 1 - kinds[::-1].index("root_exit")

    def _rename(self, begin: int) -> None:
        """Take marks for readings within a segment."""
        for at in range(begin, len(self.marks)):
            self.marks[at] = self.marks[at]._replace(kind=SEAM)

    def close(self) -> None:
        """Read no more."""
        self.is_closed = True

    def enter(self, measured: Measured) -> int:
        """Mark an event's entry; return its index."""
        index = len(self.events)
        self.events.append(measured)
        self._is_in_event = True
        self.mark("enter", index)
        return index

    def leave(
        self, index: int, inputs: Sequence[torch.Tensor], output: Any
    ) -> tuple[int, ...]:
        """Mark an event's exit and wait for its first gradient.

        Returns:
            The ranks of the outputs, whose sizes it takes to those of the inputs.
        """
        self.mark("exit", index)
        self._is_in_event = False
        shapes = [tuple(tensor.shape) for tensor in tensors_in(output)]
        self.events[index].leave(tuple(itertools.chain(*shapes)))
        for tensor in _made_outputs(inputs, output):
            tensor.register_hook(self._on_gradient(index))  # type: ignore[no-untyped-call]
        return tuple(map(len, shapes))

    def kept(
        self,
        index: int,
        forward: Callable[[], Any],
        inputs: Sequence[torch.Tensor],
        gauge: Gauge,
    ) -> Any:
        """Run an event that is kept, and count what it holds."""
        event = self.events[index]
        output, reading = _run_watched(event, forward, inputs, gauge)
        event.count(reading.held_bytes, reading.copied_bytes, flops=0)
        return output

    def recomputed(self, index: int, gauge: Gauge) -> OnRecompute:
        """Return the `on_recompute` of an event: see Note: [Held bytes …]."""

        def run(forward: Callable[[], Any], given: Sequence[torch.Tensor]) -> Any:
            is_own = self._is_in_event and index == len(self.events) - 1
            if self._is_forward and not is_own:
                self._spoil()
            if self.is_closed:
                return forward()
            self.mark("recompute", index)
            event = self.events[index]
            output, reading = _run_watched(event, forward, given, gauge)
            event.count(reading.held_bytes, reading.copied_bytes, flops=reading.flops)
            event.kept_output_bytes = _saved_outputs(output)
            if not self._meter.reads_peak:
                self._raise_peak(reading.peak_bytes)
            self.mark("recomputed", index)
            return output

        return run

    def _spoil(self) -> None:
        """Read no more: a gradient came while the root's forward ran."""
        self.spoilt = INNER_GRADIENT
        self.close()

    def _raise_peak(self, n_bytes: int) -> None:
        """Stand in for a meter without a peak: the tracker's, since the last mark."""
        last = self.marks[-1]
        self.marks.append(
            last._replace(kind="working", peak_bytes=last.live_bytes + n_bytes)
        )

    def _on_gradient(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            # While an event runs forward, a gradient is one that its action tries.
            if self._is_in_event:
                return
            if self._is_forward:
                self._spoil()
            elif self.events[index].note_gradient():
                self.mark("gradient", index)

        return hook


def input_tensors(
    inputs: Sequence[torch.Tensor],
) -> dict[int, weakref.ref[torch.Tensor]]:
    """Return weak references to tensors, by the identity of their storages."""
    return {key: weakref.ref(t) for t in inputs for key in storages_in(t)}


def input_storages(inputs: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the larger storages that tensors live in, by identity."""
    return {
        key: storage.nbytes()
        for key, storage in storages_in(list(inputs)).items()
        if storage.nbytes() >= _SMALLEST
    }


def _run_watched(
    event: Measured,
    forward: Callable[[], Any],
    given: Sequence[torch.Tensor],
    gauge: Gauge,
) -> tuple[Any, Reading]:
    """Run a forward and notice which of its inputs' storages it has saved.

    They have more users after it. Only what is given *now* is looked at: under the
    user's hooks on saved tensors a recomputation gets other storages than the forward
    had, whose own may be gone. Those not given count as saved, the safe side.
    """
    before = _count_users(given, ())
    output, reading = gauge(forward, given)
    after = _count_users(given, list(tensors_in(output)))
    unchanged = {key for key, n in before.items() if after[key] <= n}
    event.read(event.inputs.keys() - unchanged)
    return output, reading


def _count_users(
    given: Sequence[torch.Tensor], returned: Sequence[torch.Tensor]
) -> Counter[int]:
    """Count who refers to each storage, but for those who return it.

    Under hooks a tensor with gradient is saved as an alias, which is one more user of
    its storage; without them it is saved as it is, and has one more itself. One without
    gradient, such as a bool mask that ``where`` saves, is saved as it is anyway: there
    the tensor itself has more users, or its Python object under hooks.
    """
    passed_on = Counter(map(id, returned))
    users: Counter[int] = Counter()
    for tensor in given:
        if tensor.layout != torch.strided:
            continue
        key = storage_key(tensor.untyped_storage())
        users[key] += storage_users(key) + tensor_users(tensor)
        if not tensor.requires_grad:
            users[key] += sys.getrefcount(tensor) - passed_on[id(tensor)]
    return users


def _saved_outputs(output: object) -> float | None:
    """Return the bytes of what a call returns that its own nodes have saved.

    A storage that is saved has more users than one that nobody knows.

    Returns:
        None where that does not show: a view's storage has its base as a user.
    """
    unknown = torch.empty(1)
    usual = storage_users(storage_key(unknown.untyped_storage()))
    saved: dict[int, int] = {}
    for tensor in tensors_in(output):
        if tensor.layout != torch.strided or base_of(tensor) is not None:
            return None
        if tensor.grad_fn is None:
            continue
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in saved:
            return None  # which of them is another's user cannot be told
        del storage
        is_saved = storage_users(key) > usual
        saved[key] = tensor.untyped_storage().nbytes() if is_saved else 0
    return float(sum(saved.values()))


def _made_outputs(inputs: Sequence[torch.Tensor], output: object) -> list[torch.Tensor]:
    """Return the differentiable outputs that are not inputs passed through."""
    given = {id(tensor) for tensor in inputs}
    return [
        tensor
        for tensor in tensors_in(output)
        if tensor.requires_grad
        and tensor.grad_fn is not None
        and id(tensor) not in given
    ]
