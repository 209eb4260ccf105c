"""Turns the marks of a step into samples of its segments."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mimose.measure.trace import Mark
from mimose.planners import Menu
from mimose.types import CallSample, Measured, SegmentSample, StepSample


def analyse(marks: Sequence[Mark], calls: Sequence[Measured], menu: Menu) -> StepSample:
    """Turn a step's marks into samples of its segments.

    What a call holds after its exit is what was counted, or 0. The rest of the level
    belongs to the gap after it, so that all retained bytes add up. If a layer is called
    again, that call's graph holds the copies of weights that the first call dropped.

    Args:
        marks: The marks of one whole step, from ``start``.
        calls: The calls, in the order in which they ran.
        menu: The actions in use.
    """
    n_calls = Counter(call.layer for call in calls)
    for call in calls:
        if n_calls[call.layer] > 1:
            call.hold_copies()
    forward: dict[int, dict[str, float]] = {}
    gaps: list[SegmentSample] = []
    head, loss, turn = SegmentSample(None, None), None, None
    order: list[int] = []
    level = entry = float(marks[0].live_bytes)
    starts = [at for at, mark in enumerate(marks) if mark.kind == "gradient"]
    for before, mark in itertools.pairwise(marks):
        index = mark.call
        if mark.kind == "enter":
            gaps.append(_between(mark, level))
            level = entry = float(mark.live_bytes)
        elif mark.kind in ("ran", "exit"):
            call = calls[index]
            over = {call.action: max(0.0, mark.peak_bytes - entry)}
            forward.setdefault(index, over)
            if mark.kind == "exit":
                level = entry + call.held_bytes.get(call.action, 0.0)
        elif mark.kind == "root_exit":
            head = _between(mark, level)
            level = float(mark.live_bytes)
        elif mark.kind == "backward":
            turn = mark
        elif mark.kind == "gradient":
            loss = loss or _loss(turn, mark, level)
            order.append(index)
        elif mark.kind == "recomputed":  # it runs like a kept forward
            over = forward.setdefault(index, {})
            working = max(0.0, mark.peak_bytes - before.live_bytes)
            over[menu.first] = max(working, over.get(menu.first, 0.0))
    backward = {
        marks[begin].call: _backward_segment(marks[begin : end + 1], calls, menu)
        for begin, end in itertools.pairwise([*starts, len(marks) - 1])
    }
    samples = tuple(
        CallSample(
            index,
            call.held_bytes,
            forward.get(index, {}),
            *backward.get(index, ({}, {})),
            _cost(call, menu),
        )
        for index, call in enumerate(calls)
    )
    is_ordered = order == sorted(order, reverse=True)
    return StepSample(samples, tuple(gaps), head, loss, is_ordered, _copies_end(marks))


def without_readings(sample: StepSample) -> StepSample:
    """Keep the counts, and drop the readings.

    A process's first step maps libraries' code, starts threads and fills caches, so its
    readings do not predict the next.
    """
    nothing = SegmentSample(None, None)
    calls = [CallSample(e.call, e.held_bytes, {}, {}, {}, e.cost) for e in sample.calls]
    gaps = (nothing,) * len(sample.gaps)
    return replace(sample, calls=tuple(calls), gaps=gaps, head=nothing, loss=None)


def _between(mark: Mark, level: float) -> SegmentSample:
    return SegmentSample(mark.live_bytes - level, max(0.0, mark.peak_bytes - level))


def _loss(turn: Mark | None, mark: Mark, level: float) -> SegmentSample:
    """Return the loss segment, from the forward's end to the first gradient."""
    sample = _between(mark, level)
    if turn is None:
        return sample
    transient = max(sample.transient_bytes or 0.0, turn.peak_bytes - level)
    return SegmentSample(sample.retained_bytes, transient, mark.peak_bytes - level)


def _cost(call: Measured, menu: Menu) -> dict[str, float]:
    """Return the counted FLOPs, by the action that runs them again."""
    is_kept = call.action == menu.first  # its forward was not counted
    if menu.spec(call.action).rebuilds or (
        not call.flops and (is_kept or not call.held_bytes)
    ):
        return call.costs
    rerun = menu.least if call.action == menu.first else call.action
    return {**call.costs, rerun: float(call.early_flops or call.flops)}


def _copies_end(marks: Sequence[Mark]) -> str:
    """Return the segment in which copies of weights are freed; "" if there is none."""
    kept = [mark.kind for mark in marks if mark.keeps_copies]
    if "gradient" in kept or not kept:
        return ""
    return "loss" if "root_exit" in kept else "head"


def _backward_segment(
    marks: Sequence[Mark], calls: Sequence[Measured], menu: Menu
) -> tuple[dict[str, float], dict[str, float]]:
    """Return a backward's transient peak and retained bytes, by action."""
    arrival, index = marks[0].live_bytes, marks[0].call
    call, first = calls[index], menu.first
    held = call.held_bytes
    is_disturbed = any(  # another call's backward runs in it
        mark.kind == "recomputed" and mark.call != index for mark in marks
    )
    if is_disturbed or len(marks) < 2 or (call.action != first and not held):
        return {}, {}
    added = transient = 0.0
    for mark in marks[1:]:
        if mark.kind == "described":
            continue  # the peak of a comparison
        if mark.kind == "recomputed":
            added = held[first] - held[call.action]
        else:
            transient = max(transient, mark.peak_bytes - arrival - added)
    retained = marks[-1].live_bytes - arrival + held.get(call.action, 0.0)
    return {call.action: transient}, {call.action: retained} if held else {}
