"""The planner beside training: as near to a proof as the time there allows."""

import sys
from dataclasses import dataclass, replace
from typing import ClassVar

from .base import Plan, Planner, PlanningProblem
from .marginal import Marginal
from .optimal import Optimal

_WIDTH = 4096
_TIME_LIMIT_SECONDS = 0.5
_SOLVER = "scipy.optimize"


@dataclass(frozen=True, kw_only=True, slots=True)
class Refined:
    """The wide search, which proves nearly every plan; where it does not, the solver.

    The solver takes long to import (``python -X importtime -c "import
    mimose.planners.program"``), with the interpreter's lock held, and memory that
    stays; so it is asked only where the process has imported it already.
    """

    name: ClassVar[str] = "refined"

    def plan(self, problem: PlanningProblem) -> Plan:
        """Choose the cheapest actions within the budget.

        Args:
            problem: The step to plan; it is not modified.

        Returns:
            A plan within both budgets; its ``optimal`` tells whether it is proven.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        made = Marginal(width=_WIDTH, widest=_WIDTH).plan(problem)
        if not made.optimal and _SOLVER in sys.modules:
            made = Optimal(time_limit_seconds=_TIME_LIMIT_SECONDS).plan(problem)
        return replace(made, planner=self.name)


def refiner_of(planner: Planner) -> Planner | None:
    """Return what refines a planner's plans; None where they are to stay as made.

    Args:
        planner: That makes them. A baseline's, a published algorithm's and a user's
            own plans are what was asked for.
    """
    return Refined() if type(planner) is Marginal else None
