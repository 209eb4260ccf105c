"""The scheduler of the Mimose paper, as a baseline."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .problem import FloatArray, Plan, PlanningProblem
from .timeline import judge

# A call joins a bucket if it is larger than this share of the bucket's first call.
_BUCKET = 0.9


@dataclass(frozen=True, slots=True)
class Greedy:
    """The planner ``"greedy"``: Algorithm 1 of the Mimose paper.

    Source: Liao et al., "Exploiting Input Tensor Dynamics in Activation Checkpointing
    for Efficient Training on GPU", IPDPS 2023 (arXiv:2209.02478).

    The deficit is what is held at the start plus the held bytes of all calls, minus the
    budget. While it is positive, the planner recomputes one more call: if a call covers
    the deficit, one of the bucket of similar calls that covers it most closely, else
    one of the largest bucket. In a bucket the earliest call comes first.

    It ignores transient peaks, positions and costs, so a plan may be over the budget,
    or save far more than it must.
    """

    name: ClassVar[str] = "greedy"

    def plan(self, problem: PlanningProblem) -> Plan:
        """Recompute calls until the sum of the held bytes fits.

        Args:
            problem: The step to plan; its transient peaks and costs are not read.

        Returns:
            A plan that may be over the budget.
        """
        without = problem.least_choice()
        choice = np.where(problem.allowed[:, 0], 0, without)
        calls = np.arange(len(choice))
        held = problem.held_bytes[calls, choice]
        freed = held - problem.held_bytes[calls, without]
        missing = problem.start_bytes + float(held.sum()) - problem.budget_bytes
        buckets = _buckets(freed)
        while missing > 0 and buckets:
            covering = [b for b in buckets if freed[b].max() > missing]
            bucket = covering[-1] if covering else buckets[0]
            call = bucket.pop(0)
            choice[call] = without[call]
            missing -= float(freed[call])
            buckets = [b for b in buckets if b]
        return judge(problem, choice, planner=self.name)


def _buckets(freed: FloatArray) -> list[list[int]]:
    """Return buckets of calls of similar size, largest first, each in forward order."""
    buckets: list[list[int]] = []
    first = np.inf
    for call in np.argsort(-freed, kind="stable").tolist():
        if freed[call] <= 0:
            break
        if not buckets or freed[call] <= _BUCKET * first:
            buckets.append([])
            first = float(freed[call])
        buckets[-1].append(call)
    return [sorted(bucket) for bucket in buckets]
