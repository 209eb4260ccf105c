"""From a step's marks to samples of its segments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mimose.measure.trace import Mark
from mimose.types import (
    KEEP,
    RECOMPUTE,
    EventSample,
    Measured,
    SegmentSample,
    StepSample,
)


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
            *_told(event, *backward.get(index, (None, None))),
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
            EventSample(event.event, event.held_bytes, {}, {}, {}, event.cost)
            for event in sample.events
        ),
        gaps=tuple(nothing for _ in sample.gaps),
        head=nothing,
        loss=None,
        is_ordered=sample.is_ordered,
        copies_end=sample.copies_end,
    )


def _told(
    event: Measured, excess: float | None, net: float | None
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return excess and net of a backward, and what was counted, by action.

    What a backward leaves is the same under both actions.
    """
    cost = {}
    if event.flops or event.held_bytes:
        cost[RECOMPUTE] = float(event.flops)
    return (
        {} if excess is None else {event.action: excess},
        {} if net is None else {RECOMPUTE: net},
        cost,
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
