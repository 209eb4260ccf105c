"""What a plan leaves free around calls whose tensors are copied to the host and back.

A copy can go on beside the computing where the device may hold a tensor longer than the
plan says, or again before it is asked for. The timeline tells where it may: as much as
lies, in every segment in which that would be so, between the segment's peak and what
the step is predicted to reach. So neither the budget is passed nor the prediction,
whatever of the last step's outputs is let go in between.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from mimose.cost.growth import Growth
from mimose.planners import Plan, PlanningProblem, lay_out
from mimose.types import Headroom


def headrooms(
    problem: PlanningProblem,
    plan: Plan,
    growth: Growth,
    released_bytes: float,
    on_host: Collection[str],
) -> dict[int, Headroom]:
    """Return what is free around each event that holds something on the host.

    Args:
        problem: That the plan was made for.
        plan: The plan.
        growth: That is predicted.
        released_bytes: What goes, in the problem, between forward and backward.
        on_host: The actions that hold something there.

    Returns:
        By the event's position.
    """
    events = [at for at, name in enumerate(plan.actions) if name in on_host]
    if not events:
        return {}
    index = {name: number for number, name in enumerate(problem.actions)}
    choice = np.array([index[name] for name in plan.actions], dtype=np.intp)
    peaks = lay_out(problem, choice).peak_bytes_by_segment - problem.start_bytes
    head, last = 2 * len(problem.events), 3 * len(problem.events)
    free = growth.before_release_bytes - peaks
    free[head + 1 :] = growth.bytes(0.0) - released_bytes - peaks[head + 1 :]
    found = {}
    for at, then in zip(events, [*events[1:], None], strict=True):
        # Up to the exit of the next one, or to the backward of this one.
        end = last - at if then is None else 2 * then + 1
        behind = free[2 * at + 2 : end + 1]
        # From the backward of the next one to the end of this one's.
        ahead = free[last - (at if then is None else then) : last - at + 1]
        found[at] = Headroom(*(max(0.0, float(each.min())) for each in (behind, ahead)))
    return found
