"""The planner for the critical path: near the optimum in a few milliseconds."""

from dataclasses import dataclass, replace
from typing import ClassVar

from .least_peak import infeasible, safest_choice
from .prefix import PrefixForm
from .problem import IntArray, Plan, Planner, PlanningProblem
from .timeline import fits, host_bytes, judge

# The search adds the same numbers as the judge, in another order. It first gets a
# little more than the budget, so that no plan is lost to rounding, then, should the
# judge object, less than the budget by more than rounding.
_BUDGET_FACTORS = (1 + 2.0**-38, 1 - 2.0**-38)
WIDE = 4096
"""Walks that are carried on where there is time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Cost per byte off the peak, weighed along the timeline by a dynamic programme.

    See ``prefix.py``. With calls of few families it leaves nothing out, as a rule, and
    the plan is the optimum, which ``Plan.optimal`` then says. It finds a plan wherever
    there is one; only where the host budget binds as well may it miss the last.
    """

    name: ClassVar[str] = "auto"

    width: int = 128
    """Walks carried on. More is nearer to the optimum and slower."""

    def __post_init__(self) -> None:
        """Check the width."""
        if self.width < 2:
            msg = f"width must be at least 2, got {self.width}"
            raise ValueError(msg)

    def plan(self, problem: PlanningProblem) -> Plan:
        """Choose the cheapest actions within the budget, as far as the width sees.

        Args:
            problem: The step to plan; it is not modified.

        Returns:
            A plan within both budgets.

        Raises:
            InfeasibleBudgetError: The plan of the least peak exceeds the budget.
        """
        cheapest = problem.cheapest_choice()
        if fits(problem, cheapest):
            return judge(problem, cheapest, planner=self.name, optimal=True)
        form = PrefixForm.of(problem)
        for factor in _BUDGET_FACTORS:
            walk = self._walk(problem, form, factor * problem.budget_bytes)
            if walk is None:
                break
            choice, proved = walk
            if fits(problem, choice):
                proved &= factor > 1
                return judge(problem, choice, planner=self.name, optimal=proved)
        choice = safest_choice(problem)
        if not fits(problem, choice):
            raise infeasible(problem)
        return judge(problem, choice, planner=self.name)

    def _walk(
        self, problem: PlanningProblem, form: PrefixForm, budget_bytes: float
    ) -> tuple[IntArray, bool] | None:
        """Find the cheapest walk; if that needs too much of the host, another."""
        walk = form.cheapest_walk(problem.cost, budget_bytes, self.width)
        if walk is None:
            return None
        if host_bytes(problem, walk[0]) <= problem.host_budget_bytes:
            return walk
        return form.cheapest_walk(
            problem.cost, budget_bytes, self.width, counts_host=True
        )


def refiner_of(planner: Planner) -> Planner | None:
    """Return what refines a planner's plans; None where they are to stay as made.

    Args:
        planner: That makes them. A baseline's, a published algorithm's and a user's
            own plans are what was asked for.
    """
    if not isinstance(planner, Search):
        return None
    return replace(planner, width=max(planner.width, WIDE))
