"""From a step's marks to samples of its segments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mimose.memory.trace import SEAM, Mark
from mimose.planners import Menu
from mimose.types import (
    EventSample,
    Measured,
    SegmentSample,
    StepSample,
)


def analyse(
    marks: Sequence[Mark], events: Sequence[Measured], menu: Menu
) -> StepSample:
    """Turn a step's marks into samples of its segments.

    What an event holds after its exit is what the tracker says; what the level says
    beyond that is counted to the gap behind it, so that all nets add up to the level.

    Args:
        marks: The marks of one whole step, from ``start``.
        events: The events, in the order in which they ran.
        menu: The actions in use.
    """
    marks = _without_seams(marks)
    first_gradient = next(
        (i for i, mark in enumerate(marks) if mark.kind == "gradient"), len(marks)
    )
    shown = _as_if_there(marks[: first_gradient + 1])
    forward, gaps, level = _forward_segments(shown[:first_gradient], events)
    head = gaps.pop()
    backward: dict[int, tuple[float | None, float | None]] = {}
    order: list[int] = []
    loss = None
    if first_gradient < len(marks):
        loss = _between(shown[first_gradient], level)
        order, backward = _backward_segments(marks[first_gradient:], events, menu)
    samples = tuple(
        EventSample(
            index,
            event.held_bytes,
            _with_rerun(marks, index, forward.get(index, {}), menu.first),
            *_told(event, menu, *backward.get(index, (None, None))),
        )
        for index, event in enumerate(events)
    )
    is_ordered = order == sorted(order, reverse=True)
    return StepSample(samples, tuple(gaps), head, loss, is_ordered, _copies_end(marks))


def _without_seams(marks: Sequence[Mark]) -> list[Mark]:
    """Leave out the marks within segments, whose peaks are those of the next one."""
    kept: list[Mark] = []
    peak, is_clean = 0, True
    for mark in marks:
        peak, is_clean = max(peak, mark.peak_bytes), is_clean and mark.is_clean
        if mark.kind != SEAM:
            kept.append(mark._replace(peak_bytes=peak, is_clean=is_clean))
            peak, is_clean = 0, True
    return kept


def _as_if_there(marks: Sequence[Mark]) -> list[Mark]:
    """Return marks of a forward as if inputs that layers let go were there.

    An input is there for the most of the segment in which it goes.
    """
    before = [marks[0], *marks] if marks else []
    return [
        mark._replace(
            live_bytes=int(mark.live_bytes + mark.gone_bytes),
            peak_bytes=int(mark.peak_bytes + earlier.gone_bytes),
        )
        for earlier, mark in zip(before, marks, strict=False)
    ]


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
    event: Measured, menu: Menu, excess: float | None, net: float | None
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return excess and net of a backward, and what was counted, by action."""
    rerun = menu.least if event.action == menu.first else event.action
    is_counted = event.flops or event.held_bytes
    return (
        {} if excess is None else {event.action: excess},
        {} if net is None else {event.action: net},
        {rerun: float(event.flops)} if is_counted else {},
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
    for before, mark in itertools.pairwise(marks):
        if mark.kind == "enter":
            gaps.append(_between(mark, level))
            level = entry = float(mark.live_bytes)
        elif mark.kind == "ran":
            excess[mark.event] = _over(mark, entry, events)
        elif mark.kind == "exit":
            event = events[mark.event]
            over = _over(mark, entry, events)
            if mark.event not in excess:
                excess[mark.event] = over
            elif before.kind == "let_go":  # packing takes memory of its own
                excess[mark.event] = _higher(excess[mark.event], over)
            held = event.held_bytes.get(event.action)
            level = float(mark.live_bytes) if held is None else entry + held
        elif mark.kind == "root_exit":
            gaps.append(_between(mark, level))
            level = float(mark.live_bytes)
    return excess, gaps, level


def _higher(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """Return the higher of two readings; nothing where one was disturbed."""
    return {
        action: max(one[action], other[action]) for action in one if action in other
    }


def _over(mark: Mark, entry: float, events: Sequence[Measured]) -> dict[str, float]:
    """Return what a forward took over the level at its entry, by its action."""
    if not mark.is_clean:
        return {}
    return {events[mark.event].action: max(0.0, mark.peak_bytes - entry)}


def _with_rerun(
    marks: Sequence[Mark], index: int, excess: dict[str, float], first: str
) -> dict[str, float]:
    """Add what running again says of the forward of an event that is kept."""
    for before, mark in itertools.pairwise(marks):
        ends = mark.kind in ("recomputed", "working") and mark.event == index
        if ends and mark.is_clean:
            working = max(0.0, mark.peak_bytes - before.live_bytes)
            excess = {**excess, first: max(working, excess.get(first, 0.0))}
    return excess


def _backward_segments(
    marks: Sequence[Mark], events: Sequence[Measured], menu: Menu
) -> tuple[list[int], dict[int, tuple[float | None, float | None]]]:
    """Return the order of arrival and each event's (excess if kept, net)."""
    order: list[int] = []
    segments: dict[int, tuple[float | None, float | None]] = {}
    starts = [i for i, mark in enumerate(marks) if mark.kind == "gradient"]
    for start, end in zip(starts, [*starts[1:], len(marks) - 1], strict=True):
        index = marks[start].event
        order.append(index)
        segments[index] = _backward_segment(
            marks[start : end + 1], index, events[index], menu.first
        )
    return order, segments


def _backward_segment(
    marks: Sequence[Mark], index: int, event: Measured, first: str
) -> tuple[float | None, float | None]:
    held = event.held_bytes
    reruns = [mark for mark in marks if mark.kind in ("recomputed", "working")]
    if any(mark.event != index for mark in reruns):
        return None, None  # another event's backward runs in it
    if len(marks) < 2 or (event.action != first and not held):
        return None, None
    # As if the input that was let go were there, and never twice.
    arrival = marks[0].live_bytes + event.gone_bytes
    added = event.handed_bytes - event.gone_bytes
    second = added
    excess = 0.0
    is_clean = True
    for mark in marks[1:]:
        if mark.kind in ("recomputed", "working"):
            added = second + held[first] - held[event.action]
            continue
        excess = max(excess, mark.peak_bytes - arrival - added)
        is_clean = is_clean and mark.is_clean
    net = marks[-1].live_bytes - arrival + held[event.action] if held else None
    return (excess if is_clean else None), net
