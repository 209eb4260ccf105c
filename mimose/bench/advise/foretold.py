"""What a session's own planner says of batch sizes that were not run.

The costs are those that the session plans with, at the seconds that a FLOP took.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mimose.bench.advise.training import Point
from mimose.exceptions import MimoseError
from mimose.planners import InfeasibleBudgetError, Plan
from mimose.session import Session

N_SHARES = 9
"""Budgets that are planned for, from the least there is to what keeps everything."""
_BISECTIONS = 10
_WIDEST = 2.0
"""A budget that holds a plan, as a multiple of its peak, margins included."""
_AMPLE_BYTES = 2**50


def foretell(
    session: Session,
    shapes: Mapping[Point, Mapping[str, int]],
    points: Sequence[Point],
    most_seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Return what plans cost, from the least budget to the largest that matters.

    Args:
        session: One that has learned.
        shapes: The shapes of steps that ran; at least two batch sizes of the sample's
            length, and two lengths where points have one.
        points: Sizes to plan for, those that matter most first.
        most_seconds: After so long no further one is begun.

    Returns:
        For each that the session trusts its predictions at: ``batch``, ``length``;
        ``least_bytes``, the least budget that some plan keeps; ``keep_bytes``, the
        least that needs no plan; and ``seconds``, what the plans of `N_SHARES` budgets
        from one to the other, in equal steps, add to plain training's.
    """
    found, rate = [], flop_seconds(session)
    until = time.monotonic() + most_seconds
    for point in points:
        row = _row(session, _scaled(shapes, point), point, rate)
        if row is not None:
            found.append(row)
        if time.monotonic() > until:
            break
    return found


def _row(
    session: Session, shape: dict[str, int], point: Point, rate: float
) -> dict[str, Any] | None:
    def plan(budget_bytes: float) -> Plan | None:
        try:
            return session.plan_for(shape, budget_bytes=int(budget_bytes))
        except InfeasibleBudgetError:
            return None

    whole = plan(_AMPLE_BYTES)
    if whole is None or whole.extra_cost:
        return None  # sizes at which nothing is trusted are recomputed at any budget
    least_peak = _least_peak(session, shape)
    least = _least(lambda at: plan(at) is not None, least_peak)
    keep = _least(
        lambda at: (found := plan(at)) is not None and not found.extra_cost,
        whole.peak_bytes,
    )
    if least is None or keep is None:
        return None
    step = (keep - least) / (N_SHARES - 1)
    plans = [plan(least + step * i) for i in range(N_SHARES)]
    most = max(each.extra_cost for each in plans if each is not None)
    return {
        "batch": point.batch,
        "length": point.length,
        "least_bytes": least,
        "keep_bytes": keep,
        "seconds": [
            rate * (most if each is None else each.extra_cost) for each in plans
        ],
    }


def _least_peak(session: Session, shape: dict[str, int]) -> float:
    try:
        return session.plan_for(shape, budget_bytes=1).peak_bytes
    except InfeasibleBudgetError as error:
        return float(error.least_peak_bytes)


def _least(holds: Callable[[float], bool], peak_bytes: float) -> float | None:
    """Return the least budget that holds, which is a margin above a plan's peak.

    None where even the widest margin does not do.
    """
    low, high = peak_bytes, _WIDEST * peak_bytes
    if not holds(high):
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _scaled(shapes: Mapping[Point, Mapping[str, int]], point: Point) -> dict[str, int]:
    """Return a point's shape: sizes that grew with the batch or the length grow on."""
    by_batch = {each.batch: s for each, s in shapes.items() if each.length is None}
    shape = _line(by_batch, point.batch)
    if point.length is None:
        return shape
    by_length = {each.length: s for each, s in shapes.items() if each.length}
    longer = _line(by_length, point.length)
    first = next(iter(by_length.values()))
    grows = {name for s in by_length.values() for name in s if s[name] != first[name]}
    return {name: longer[name] if name in grows else shape[name] for name in shape}


def _line(shapes: Mapping[int, Mapping[str, int]], at: int) -> dict[str, int]:
    low, high = min(shapes), max(shapes)
    return {
        name: size + (shapes[high][name] - size) * (at - low) // (high - low)
        for name, size in shapes[low].items()
    }


def flop_seconds(session: Session) -> float:
    """Return what a FLOP took, the median of the steps that ran.

    Training a layer takes three times its forward, which is what recomputing it costs.

    Args:
        session: One that has learned.
    """
    found, trained = [], dict[tuple[tuple[str, int], ...], float]()
    for record in session.records:
        shape = tuple(record.shape.items())
        try:
            if shape not in trained:
                problem = session.planning_problem(record.shape)
                trained[shape] = 3.0 * float(problem.cost[:, -1].sum())
        except MimoseError:
            continue
        flops = trained[shape] + record.recomputed_flops
        if record.seconds and flops:
            found.append(record.seconds / flops)
    return statistics.median(found)
