"""Mimose's own scheduler, as a baseline."""

from dataclasses import dataclass

import numpy as np

from .base import FloatArray, IntArray, Plan, PlanningProblem
from .choices import keep_choice, least_choice
from .timeline import judge

# An event joins a bucket while it is larger than this part of the bucket's first.
_BUCKET = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Greedy:
    """Take bytes off a sum, whatever their position and whatever they cost.

    Algorithm 1 of Liao et al., "Exploiting Input Tensor Dynamics in Activation
    Checkpointing for Efficient Training on GPU", IPDPS 2023. What is missing is the
    sum of the events' estimated bytes, on top of what is held at the start, less the
    budget. While something is missing: if some event covers it, take from the bucket
    of similar events that covers it most closely; else take the largest. In a bucket
    the earliest goes first.

    It knows no peak: a plan may be over the budget, or save far more than it must.
    """

    largest: bool = True
    """Take the largest event where none covers what is missing. False takes the
    smallest, as the authors' released code does."""

    @property
    def name(self) -> str:
        """The name ``"greedy"``, or ``"greedy-released"``."""
        return "greedy" if self.largest else "greedy-released"

    def plan(self, problem: PlanningProblem) -> Plan:
        """Recompute events until the sum of what is held fits.

        Args:
            problem: The step to plan; its excesses and costs are not read.

        Returns:
            A plan that may be over the budget.
        """
        choice, without = keep_choice(problem), least_choice(problem)
        events = np.arange(len(choice))
        held = problem.held_bytes[events, choice]
        freed = held - problem.held_bytes[events, without]
        missing = problem.start_bytes + float(held.sum()) - problem.budget_bytes
        taken = self._take(freed, missing)
        choice[taken] = without[taken]
        return judge(problem, choice, planner=self.name)

    def _take(self, freed: FloatArray, missing: float) -> list[int]:
        """Positions of the events to recompute, in the order they were taken."""
        buckets = _buckets(freed)
        taken = []
        while missing > 0 and buckets:
            covering = [b for b in buckets if freed[b].max() > missing]
            if covering:
                bucket = covering[-1]
            else:
                bucket = buckets[0] if self.largest else buckets[-1]
            event = bucket.pop(0)
            taken.append(event)
            missing -= float(freed[event])
            buckets = [b for b in buckets if b]
        return taken


def _buckets(freed: FloatArray) -> list[list[int]]:
    """Events of similar size together, the largest first; inside, by position."""
    buckets: list[list[int]] = []
    first = np.inf
    by_size: IntArray = np.argsort(-freed, kind="stable")
    for event in by_size.tolist():
        if freed[event] <= 0:
            break
        if not buckets or freed[event] <= _BUCKET * first:
            buckets.append([])
            first = float(freed[event])
        buckets[-1].append(event)
    return [sorted(bucket) for bucket in buckets]
