"""What an evicting allocator would do, as a plan made beforehand."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .base import BoolArray, FloatArray, Plan, PlanningProblem
from .choices import keep_choice, least_choice
from .timeline import judge, lay_out


@dataclass(frozen=True, kw_only=True, slots=True)
class Eviction:
    """Walk through the step and evict what is cheap, large and stale, when it is full.

    In the manner of Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021,
    for whole events: where a segment would go over the budget, the event alive there
    with the least cost ÷ (bytes × staleness) is evicted, to be recomputed in backward;
    staleness counts segments since it was last used. The original decides at every
    allocation and may evict and recompute one tensor many times; here an evicted event
    is recomputed once, and nothing is charged for the bookkeeping, which took 26% of an
    iteration there.
    """

    name: ClassVar[str] = "eviction"

    def plan(self, problem: PlanningProblem) -> Plan:
        """Evict, segment by segment, until the step fits or nothing is left to evict.

        Args:
            problem: The step to plan.

        Returns:
            A plan that may be over the budget.
        """
        choice, without = keep_choice(problem), least_choice(problem)
        events = np.arange(len(choice))
        held = problem.held_bytes
        freed = held[events, choice] - held[events, without]
        price = problem.cost[events, without] / np.maximum(freed, 1.0)
        while True:
            peaks = lay_out(problem, choice).peak_bytes_by_segment
            over = (peaks > problem.budget_bytes).nonzero()[0].tolist()
            evicted = next(
                (
                    event
                    for segment in over
                    for event in self._cheapest(
                        segment, (choice != without) & (freed > 0), price
                    )
                ),
                None,
            )
            if evicted is None:
                break
            choice[evicted] = without[evicted]
        return judge(problem, choice, planner=self.name)

    @staticmethod
    def _cheapest(segment: int, can_go: BoolArray, price: FloatArray) -> list[int]:
        """Return the event to evict in a segment, if there is one.

        A step has 3 E + 2 segments: a gap and a forward for each event, the head, the
        backwards from the last event to the first, the optimizer step. Alive are the
        events whose forward is over and whose backward is to come.
        """
        n_events = len(can_go)
        n_alive = min(segment // 2, n_events)
        if segment > 2 * n_events:
            n_alive = max(0, 3 * n_events - segment)
        alive = can_go[:n_alive].nonzero()[0]
        if not len(alive):
            return []
        staleness = segment - 2.0 * alive
        return [int(alive[(price[alive] / staleness).argmin()])]
