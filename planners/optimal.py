"""The exact planner: a wide search; where that proves nothing, a 0-1 program for HiGHS.

``program.py`` imports SciPy, some 50 MiB that stay. So it is imported when the planner
is made, before a step is measured, and not at all where another planner is chosen.
"""

import logging
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from .base import Plan, PlanningProblem
from .choices import cheapest_choice
from .errors import InfeasibleBudgetError
from .marginal import Marginal
from .prefix import prefix_form
from .safest import infeasible, safest_choice
from .timeline import fits, host_bytes, judge, keeps_host_budget, peak_bytes

_LOGGER = logging.getLogger(__name__)

# A plan may still come back over the budget by the solver's tolerance. The budget is
# then lowered by twice that much, at most so often.
_ATTEMPTS = 4
_SAME_COST = 1e-9
# Walks that the search may carry on. A solver finds no end where many plans cost the
# same, as with equal layers; there the search has few walks to carry on.
_WIDTH = 4096
_TIME_LIMIT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimal:
    """The cheapest plan within the budget, by a search that proves it.

    First the frontier's walk (``frontier.py``), so wide that it leaves out only what
    cannot cost less, as a rule. Where it proves nothing, or the host's budget binds,
    branch and bound: a binary variable for every event and action, exactly one action
    an event; the bytes held before each event as a running sum; a row for every event
    that keeps all of its segments within the budget, one for the head and one for the
    host.
    See Note: [Prefix form] in ``prefix.py`` for why a row an event is enough. It is
    solved by ``scipy.optimize.milp``, which lets go of the interpreter lock.
    """

    name: ClassVar[str] = "optimal"

    time_limit_seconds: float = _TIME_LIMIT_SECONDS
    """When the solver has to stop. The best plan known by then is returned, with
    ``optimal=False``, and a warning is logged."""

    def __post_init__(self) -> None:
        """Check the time limit."""
        if not self.time_limit_seconds > 0:
            msg = f"time_limit_seconds must be positive, got {self.time_limit_seconds}"
            raise ValueError(msg)
        from . import program  # noqa: F401

    def plan(self, problem: PlanningProblem) -> Plan:
        """Choose the cheapest actions within the budget.

        Args:
            problem: The step to plan; it is not modified.

        Returns:
            A plan within both budgets.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        cheapest = cheapest_choice(problem)
        if fits(problem, cheapest):
            return judge(problem, cheapest, planner=self.name, optimal=True)
        needs_host = bool(np.count_nonzero(problem.host_bytes))
        form = prefix_form(problem)
        # Exact without the host, where the solver would get lost in its tolerances.
        is_exact = not needs_host and not form.has_extra
        if is_exact and not fits(problem, safest_choice(problem, form)):
            raise infeasible(problem)
        walked = self._walk(problem)
        if walked is not None and walked.optimal:
            return walked
        solved = self._solve(problem)
        if solved is None and walked is None:
            raise infeasible(problem)
        made = [plan for plan in (solved, walked) if plan is not None]
        return min(made, key=lambda plan: (not plan.optimal, plan.extra_cost))

    def _walk(self, problem: PlanningProblem) -> Plan | None:
        """The wide search's plan, or None where it has none within the budgets."""
        try:
            made = Marginal(width=_WIDTH).plan(problem)
        except InfeasibleBudgetError:
            return None
        return replace(made, planner=self.name)

    def _solve(self, problem: PlanningProblem) -> Plan | None:
        """The solver's plan, or None where it has none within the budgets."""
        from .program import build_program

        budget, host_budget = problem.budget_bytes, problem.host_budget_bytes
        least_cost = math.inf
        for _ in range(_ATTEMPTS):
            program = build_program(problem, host_budget)
            solution = program.cheapest(problem.cost, budget, self.time_limit_seconds)
            if not solution.proved:
                _LOGGER.warning(
                    "The optimal planner stopped after %g s without a proof, at %d "
                    "events; raise time_limit_seconds or use 'marginal'.",
                    self.time_limit_seconds,
                    len(problem.events),
                )
            if solution.choice is None:
                return None
            made = judge(problem, solution.choice, planner=self.name)
            # The first answer, within the solver's tolerance, costs least.
            least_cost = min(least_cost, made.extra_cost)
            if fits(problem, solution.choice):
                same = math.isclose(made.extra_cost, least_cost, rel_tol=_SAME_COST)
                return replace(made, optimal=solution.proved and same)
            host = float(host_bytes(problem, solution.choice))
            budget -= 2 * max(made.peak_bytes - problem.budget_bytes, 0.0)
            host_budget -= 2 * max(host - problem.host_budget_bytes, 0.0)
        return None


def least_peak_plan(problem: PlanningProblem) -> Plan:
    """Make the plan with the least peak by the solver, the host budget included.

    ``safest_plan`` does the same in a fraction of the time wherever no action needs
    the host.

    Args:
        problem: The step to plan; its budget is not read.

    Returns:
        The plan; its ``optimal`` is False, for it does not look at costs.
    """
    from .program import build_program

    safest = judge(problem, safest_choice(problem), planner="least-peak")
    if not problem.events:
        return safest
    program = build_program(problem, problem.host_budget_bytes)
    choice = program.least_peak(_TIME_LIMIT_SECONDS).choice
    if choice is None or not keeps_host_budget(problem, choice):
        return safest
    if peak_bytes(problem, choice) >= safest.peak_bytes:
        return safest
    return judge(problem, choice, planner="least-peak")
