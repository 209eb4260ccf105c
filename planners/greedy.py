"""Mimose's own scheduler, as a baseline."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .problem import FloatArray, Plan, PlanningProblem
from .timeline import judge

# A call joins a bucket while it is larger than this part of the bucket's first.
_BUCKET = 0.9


@dataclass(frozen=True, slots=True)
class Greedy:
    """Take bytes off a sum, whatever their position and whatever they cost.

    Algorithm 1 of Liao et al., "Exploiting Input Tensor Dynamics in Activation
    Checkpointing for Efficient Training on GPU", IPDPS 2023. What is missing is the
    sum of the calls' estimated bytes, on top of what is held at the start, less the
    budget. While something is missing: if some call covers it, take from the bucket
    of similar calls that covers it most closely; else take the largest. In a bucket
    the earliest goes first.

    It knows no peak: a plan may be over the budget, or save far more than it must.
    """

    name: ClassVar[str] = "greedy"

    def plan(self, problem: PlanningProblem) -> Plan:
        """Recompute calls until the sum of what is held fits.

        Args:
            problem: The step to plan; its transient peaks and costs are not read.

        Returns:
            A plan that may be over the budget.
        """
        choice, without = problem.keep_choice(), problem.least_choice()
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
    """Calls of similar size together, the largest first; inside, by position."""
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
