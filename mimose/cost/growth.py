"""What a plan comes to at exact sizes: its growth and what it recomputes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mimose.cost.copies import copies
from mimose.cost.heads import head
from mimose.cost.model import CostModel
from mimose.cost.side_tensors import side_tensors
from mimose.planners import PlanningProblem, lay_out
from mimose.types import StepInput, Uncounted


@dataclass(frozen=True, slots=True)
class Growth:
    """A plan's predicted growth at one exact shape.

    Outputs of the last step that are freed before the backward are part of what a
    step starts from: only what comes behind the forward profits from that.
    """

    before_release_bytes: float
    after_release_bytes: float
    """As if nothing were freed."""

    def bytes(self, released_bytes: float) -> float:
        """Return the growth where so much is freed."""
        after = self.after_release_bytes - released_bytes
        return max(self.before_release_bytes, after)


class ExactShape(NamedTuple):
    """What a plan comes to at exact sizes."""

    growth: Growth
    flops: tuple[int, ...]
    """Recomputed by each event, as far as they are known."""
    uncounted: Uncounted
    """Recomputations whose FLOPs are not."""


def plan_growth(
    model: CostModel,
    facts: StepInput,
    problem: PlanningProblem,
    actions: Sequence[str],
    released_bytes: float,
) -> Growth:
    """Judge a plan at the problem's sizes, before and after the release.

    The planner's problem is on the safe side about side tensors and copies of weights;
    here what a plan does not hold of them is taken off, segment by segment. A step of
    E events has 3 E + 2: a gap and a forward for each, the head, the backwards from the
    last event to the first, the optimizer's step.

    Args:
        model: What was learned.
        facts: The step's context and sizes.
        problem: That these fill.
        actions: The plan's, one an event.
        released_bytes: Of what the problem's step starts with, what goes in its head.
    """
    first, n_events = model.menu.first, len(actions)
    choice = np.array([problem.actions.index(a) for a in actions], dtype=np.intp)
    laid_out = lay_out(problem, choice)
    levels = laid_out.level_bytes - problem.start_bytes
    peaks = laid_out.peak_bytes_by_segment - problem.start_bytes
    counted_twice = 0.0  # until the context ends: Note: [Copies]
    for index, n_bytes in enumerate(copies(model, facts)):
        if actions[index] == first and n_bytes:
            counted_twice += n_bytes
            span = slice(2 * index + 2, 2 * n_events + 1)
            levels[span] -= n_bytes
            peaks[span] -= n_bytes
    away = [
        (side.goes_before, 3 * n_events - side.readers[0] + 1, side.n_bytes)
        for side in side_tensors(model, facts)
        if all(actions[reader] == first for reader in side.readers)
    ]
    gone_in_loss = 0.0
    for goes_before, end, n_bytes in away:
        span = slice(2 * min(goes_before, n_events) + 1, end)
        levels[span] -= n_bytes
        peaks[span] -= n_bytes
        gone_in_loss += n_bytes if goes_before == n_events else 0.0
    of_head = head(model, facts, actions[-1] if actions else first)
    start = levels[2 * n_events]
    before = [0.0, start + of_head.before_release_bytes, *peaks[: 2 * n_events]]
    # In the problem the release is part of the head. The optimizer's step is not
    # part of what is observed in a step.
    behind = peaks[2 * n_events + 1 : -1] + released_bytes
    begin = start - gone_in_loss
    copies_gone = begin + counted_twice + of_head.after_copies_bytes
    after = [begin + of_head.after_release_bytes, copies_gone, *behind]
    return Growth(float(max(before)), float(max(after)))
