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
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from mimose.actions import OnRecompute
from mimose.copies import are_kept
from mimose.gauges import KEEP, RECOMPUTE, Gauge, Reading
from mimose.meters import Meter
from mimose.series import Sizes
from mimose.tracker import storages_in, tensors_in

_FILE_NOISE = 65536
"""A segment in which more bytes of files were mapped tells nothing of its excess."""

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
    """Whether autocast keeps its copies of weights just now: see `mimose.copies`."""


@dataclass(slots=True)
class Measured:
    """What was learned of one event."""

    name: str
    """``name#call``."""
    unit: int
    call: int
    sizes: Sizes
    """Its inputs'; once it has run, its outputs' behind them. (A layer that halves an
    image rounds odd sides up, which no polynomial of its inputs' sizes does.)"""
    action: str
    family: int = -1
    """Told once it has run: what it returns is part of it."""
    held_bytes: dict[str, float] = field(default_factory=dict)
    """By action, from the tracker; empty until the event is recomputed."""
    flops: int = 0
    """Of the whole recomputation."""
    copied_bytes: float = 0.0
    """Copies of weights among what it would hold: see `mimose.copies`."""
    inputs: dict[int, int] = field(default_factory=dict)
    """Bytes of the larger storages that it reads, by identity."""
    saved_inputs: set[int] = field(default_factory=set)
    """Those of them that it would hold if it were kept."""
    has_gradient: bool = False


class Trace:
    """The marks and measurements of one step.

    Args:
        meter: Where the marks read.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._file_bytes = 0
        self._first_file_bytes = 0
        self.marks: list[Mark] = []
        self.events: list[Measured] = []
        self.peak_bytes = 0
        self.is_closed = False

    @property
    def file_growth_bytes(self) -> int:
        """Bytes of files mapped during the step."""
        return self._file_bytes - self._first_file_bytes

    def mark(self, kind: str, event: int = -1) -> None:
        """Read the meter at a boundary; the first mark only starts the peak."""
        if self.is_closed:
            return
        live, peak, files = self._meter.read()
        self._meter.reset_peak()
        if not self.marks:
            peak, self._file_bytes, self._first_file_bytes = live, files, files
        self.peak_bytes = max(self.peak_bytes, peak)
        is_clean = abs(files - self._file_bytes) <= _FILE_NOISE
        self._file_bytes = files
        self.marks.append(
            Mark(kind, event, live - files, peak - files, is_clean, are_kept())
        )

    def enter(self, measured: Measured) -> int:
        """Mark an event's entry; return its index."""
        index = len(self.events)
        self.events.append(measured)
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
        shapes = [tuple(tensor.shape) for tensor in tensors_in(output)]
        self.events[index].sizes += tuple(itertools.chain(*shapes))
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
        event.held_bytes = reading.held_bytes
        event.copied_bytes = reading.copied_bytes
        return output

    def recomputed(self, index: int, gauge: Gauge) -> OnRecompute:
        """Return the `on_recompute` of an event: see Note: [Held bytes …]."""

        def run(forward: Callable[[], Any], given: Sequence[torch.Tensor]) -> Any:
            if self.is_closed:
                return forward()
            self.mark("recompute", index)
            event = self.events[index]
            output, reading = _run_watched(event, forward, given, gauge)
            event.held_bytes, event.flops = reading.held_bytes, reading.flops
            event.copied_bytes = reading.copied_bytes
            if not self._meter.reads_peak:
                self._raise_peak(reading.peak_bytes)
            self.mark("recomputed", index)
            return output

        return run

    def _raise_peak(self, n_bytes: int) -> None:
        """Stand in for a meter without a peak: the tracker's, since the last mark."""
        last = self.marks[-1]
        self.marks.append(
            last._replace(kind="working", peak_bytes=last.live_bytes + n_bytes)
        )

    def _on_gradient(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if not self.events[index].has_gradient:
                self.events[index].has_gradient = True
                self.mark("gradient", index)

        return hook


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
    event.saved_inputs = event.inputs.keys() - unchanged
    return output, reading


def _count_users(
    given: Sequence[torch.Tensor], returned: Sequence[torch.Tensor]
) -> Counter[int]:
    """Count who refers to each storage, but for those who return it.

    A tensor with gradient is saved as an alias, which is one more user of its storage.
    One without is saved as it is: a bool mask that ``where`` saves, for one. There the
    tensor itself has more users, or its Python object under hooks on saved tensors.
    """
    passed_on = Counter(map(id, returned))
    users: Counter[int] = Counter()
    for tensor in given:
        if tensor.layout != torch.strided:
            continue
        key = tensor.untyped_storage()._cdata
        users[key] += torch._C._storage_Use_Count(key)
        if not tensor.requires_grad:
            users[key] += sys.getrefcount(tensor) + _users_of(tensor)
            users[key] -= passed_on[id(tensor)]
    return users


def _users_of(tensor: Any) -> int:
    """Return how many C++ owners a tensor has (private; torch 2.9 to 2.13)."""
    return int(tensor._use_count()) if hasattr(tensor, "_use_count") else 0


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


@dataclass(frozen=True, slots=True)
class EventSample:
    """One event's segments in one step. None where a segment was not measured."""

    event: int
    held_bytes: dict[str, float]
    forward_excess_bytes: dict[str, float]
    """By action: under `recompute` from the forward, under `keep` from the
    recomputation (or, where the event was kept, from the forward)."""
    backward_excess_bytes: float | None
    """As if kept, over the level when the gradient arrives."""
    backward_net_bytes: float | None
    """Beyond the release of what the event held."""


@dataclass(frozen=True, slots=True)
class SegmentSample:
    """A segment outside the events. None where the reading was disturbed."""

    net_bytes: float | None
    excess_bytes: float | None


@dataclass(frozen=True, slots=True)
class StepSample:
    """All that one step's marks say."""

    events: tuple[EventSample, ...]
    gaps: tuple[SegmentSample, ...]
    """Before each event."""
    head: SegmentSample
    """From the last event's exit to the root's."""
    loss: SegmentSample | None
    """From the root's exit to the first gradient; None without a backward."""
    is_ordered: bool
    """Whether the gradients arrived in the reverse order of the events."""
    copies_end: str = ""
    """The segment, ``"head"`` or ``"loss"``, in which autocast lets its copies go."""


def analyse(marks: Sequence[Mark], events: Sequence[Measured]) -> StepSample:
    """Turn a step's marks into samples of its segments.

    What an event holds after its exit is what the tracker says; what the level says
    beyond that is counted to the gap behind it, so that all nets add up to the level.

    Args:
        marks: The marks of one whole step, from ``start``.
        events: The events, in the order in which they ran.
    """
    first_gradient = next(
        (i for i, mark in enumerate(marks) if mark.kind == "gradient"), len(marks)
    )
    forward, gaps, level = _forward_segments(marks[:first_gradient], events)
    head = gaps.pop()
    backward: dict[int, tuple[float | None, float | None]] = {}
    order: list[int] = []
    loss = None
    if first_gradient < len(marks):
        loss = _between(marks[first_gradient], level)
        order, backward = _backward_segments(marks[first_gradient:], events)
    samples = tuple(
        EventSample(
            index,
            event.held_bytes,
            _with_recomputation(marks, index, forward.get(index, {})),
            *backward.get(index, (None, None)),
        )
        for index, event in enumerate(events)
    )
    is_ordered = order == sorted(order, reverse=True)
    return StepSample(samples, tuple(gaps), head, loss, is_ordered, _copies_end(marks))


def without_readings(sample: StepSample) -> StepSample:
    """Keep what was counted, and drop what was read.

    A process's first step maps libraries' code, starts threads and fills caches: its
    readings say nothing of the next.
    """
    nothing = SegmentSample(None, None)
    return StepSample(
        events=tuple(
            EventSample(event.event, event.held_bytes, {}, None, None)
            for event in sample.events
        ),
        gaps=tuple(nothing for _ in sample.gaps),
        head=nothing,
        loss=None,
        is_ordered=sample.is_ordered,
        copies_end=sample.copies_end,
    )


def _copies_end(marks: Sequence[Mark]) -> str:
    """Tell where the copies of weights go; nowhere, if they outlive the forward."""
    kept = [m.kind for m in marks if m.keeps_copies]
    if "gradient" in kept or not kept:
        return ""
    return "loss" if "root_exit" in kept else "head"


def _between(mark: Mark, level: float) -> SegmentSample:
    excess = max(0.0, mark.peak_bytes - level) if mark.is_clean else None
    return SegmentSample(mark.live_bytes - level, excess)


def _forward_segments(
    marks: Sequence[Mark], events: Sequence[Measured]
) -> tuple[dict[int, dict[str, float]], list[SegmentSample], float]:
    """Return forward excesses, the gaps and the head, and the level at the end."""
    excess: dict[int, dict[str, float]] = {}
    gaps: list[SegmentSample] = []
    level = float(marks[0].live_bytes)
    entry = level
    for mark in marks[1:]:
        if mark.kind == "enter":
            gaps.append(_between(mark, level))
            level = entry = float(mark.live_bytes)
        elif mark.kind == "exit":
            event = events[mark.event]
            if mark.is_clean:
                peak = max(0.0, mark.peak_bytes - entry)
                excess[mark.event] = {event.action: peak}
            held = event.held_bytes.get(event.action)
            level = float(mark.live_bytes) if held is None else entry + held
        elif mark.kind == "root_exit":
            gaps.append(_between(mark, level))
            level = float(mark.live_bytes)
    return excess, gaps, level


def _with_recomputation(
    marks: Sequence[Mark], index: int, excess: dict[str, float]
) -> dict[str, float]:
    """Add what the recomputation says of a kept event's forward."""
    for before, mark in itertools.pairwise(marks):
        ends = mark.kind in ("recomputed", "working") and mark.event == index
        if ends and mark.is_clean:
            working = max(0.0, mark.peak_bytes - before.live_bytes)
            excess = {**excess, KEEP: max(working, excess.get(KEEP, 0.0))}
    return excess


def _backward_segments(
    marks: Sequence[Mark], events: Sequence[Measured]
) -> tuple[list[int], dict[int, tuple[float | None, float | None]]]:
    """Return the order of arrival and each event's (excess if kept, net)."""
    order: list[int] = []
    segments: dict[int, tuple[float | None, float | None]] = {}
    starts = [i for i, mark in enumerate(marks) if mark.kind == "gradient"]
    for start, end in zip(starts, [*starts[1:], len(marks) - 1], strict=True):
        index = marks[start].event
        order.append(index)
        segments[index] = _backward_segment(marks[start : end + 1], events[index])
    return order, segments


def _backward_segment(
    marks: Sequence[Mark], event: Measured
) -> tuple[float | None, float | None]:
    held = event.held_bytes
    if len(marks) < 2 or (event.action != KEEP and not held):
        return None, None
    arrival = marks[0].live_bytes
    added = 0.0
    excess = 0.0
    is_clean = True
    for mark in marks[1:]:
        if mark.kind in ("recomputed", "working"):
            added = held[KEEP] - held[RECOMPUTE]
            continue
        excess = max(excess, mark.peak_bytes - arrival - added)
        is_clean = is_clean and mark.is_clean
    net = marks[-1].live_bytes - arrival + held[event.action] if held else None
    return (excess if is_clean else None), net


class Carried:
    """The bytes of the last step's outputs that the user still holds.

    They are part of what the next step starts from, and usually go when its outputs
    take their names: after its forward, before its backward.

    Args:
        tensors: What the root returned.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._held: list[tuple[weakref.ref[Any], int]] = []
        seen: set[int] = set()
        for tensor in tensors:
            if tensor.numel() < _FILE_NOISE // 8:
                continue
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in seen and storage.nbytes() >= _FILE_NOISE:
                seen.add(storage._cdata)
                self._held.append((weakref.ref(storage), storage.nbytes()))

    def live_bytes(self) -> int:
        """Return how much of it is still alive."""
        return sum([n_bytes for ref, n_bytes in self._held if ref() is not None])
