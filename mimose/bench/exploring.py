"""Plans by chance: with them a session learns every action in few steps."""

from __future__ import annotations

import random

import numpy as np

from mimose.planners import Plan, PlanningProblem
from mimose.planners.timeline import judge


class Exploring:
    """Chooses for each event by chance, whatever the budget.

    Args:
        seed: Of the choices.
    """

    name = "exploring"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def plan(self, problem: PlanningProblem) -> Plan:
        """Make a plan; its budget is not read."""
        choices = [
            self._random.choice(row.nonzero()[0].tolist()) for row in problem.allowed
        ]
        return judge(problem, np.array(choices, dtype=np.intp), planner=self.name)
