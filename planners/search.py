"""The default planner: near the optimum in a few milliseconds."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .least_peak import infeasible, safest_choice
from .prefix import PrefixForm
from .problem import IntArray, Plan, PlanningProblem
from .timeline import fits, host_bytes, judge

# The search adds the same numbers as the timeline, in another order. So it gets a
# little more than the budget, and rounding excludes no plan. The timeline judges it.
_BUDGET_FACTOR = 1 + 2.0**-38


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """The default planner ``"auto"``: a dynamic program over the saved bytes.

    See Note: [Prefix form] in ``prefix.py``. If the layers are of few families, the
    search usually drops no partial plan; then the plan is proved optimal, and
    ``Plan.optimal`` is True. It finds a plan if there is one, except in rare cases
    where the host budget limits the plan too.
    """

    name: ClassVar[str] = "auto"

    width: int = 128
    """How many partial plans the search keeps. More come closer to the optimum and take
    longer."""

    def plan(self, problem: PlanningProblem) -> Plan:
        """Choose the cheapest actions within the budget that the search finds.

        Args:
            problem: The step to plan; it is not modified.

        Returns:
            A plan within both budgets.

        Raises:
            InfeasibleBudgetError: The plan with the lowest peak is over the budget.
        """
        cheapest = np.where(problem.allowed, problem.cost, np.inf).argmin(axis=1)
        if fits(problem, cheapest):
            return judge(problem, cheapest, planner=self.name, optimal=True)
        walk = self._walk(problem)
        if walk is not None and fits(problem, walk[0]):
            return judge(problem, walk[0], planner=self.name, optimal=walk[1])
        choice = safest_choice(problem)
        if not fits(problem, choice):
            raise infeasible(problem)
        return judge(problem, choice, planner=self.name)

    def _walk(self, problem: PlanningProblem) -> tuple[IntArray, bool] | None:
        """Find the cheapest plan, a second time if it needs too much host memory."""
        form, most = PrefixForm(problem), _BUDGET_FACTOR * problem.budget_bytes
        walk = form.cheapest_walk(problem.cost, most, self.width)
        if not walk or host_bytes(problem, walk[0]) <= problem.host_budget_bytes:
            return walk
        return form.cheapest_walk(problem.cost, most, self.width, counts_host=True)
