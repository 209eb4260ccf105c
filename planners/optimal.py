"""The exact planner: a wide search and, if that proves nothing, a 0-1 program.

Importing SciPy's solver takes time and 50 MiB that stay. So it is imported when this
planner is made, before a step is measured, and not at all for other planners.
"""

import logging
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from .least_peak import infeasible
from .prefix import PrefixForm
from .problem import FloatArray, InfeasibleBudgetError, IntArray, Plan, PlanningProblem
from .search import Search
from .timeline import fits, judge

_LOGGER = logging.getLogger(__name__)

# HiGHS has absolute tolerances of 1e-6, so bytes and costs are scaled to this maximum.
_SCALE = 1000.0
_WIDTH = 4096
"""The width of the search that goes before the solver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimal:
    """The planner ``"optimal"``: the cheapest plan within the budget, proved.

    It first runs the search of ``"auto"`` so wide that it often drops no partial plan.
    A solver alone does not end if many plans cost the same, as with equal layers; just
    there the search has few partial plans. If the search proves nothing, or if the host
    budget limits the plan, ``scipy.optimize.milp`` (HiGHS, branch and bound) solves a
    0-1 program. It has a binary variable for each call and action, one action for each
    call, a running sum of the held bytes, one budget constraint for each call (Note:
    [Prefix form] in ``prefix.py`` says why that is enough), one for the head and one
    for the host.
    """

    name: ClassVar[str] = "optimal"

    time_limit_seconds: float = 10.0
    """After this time the solver stops. The best plan so far is returned with
    ``optimal=False``, and a warning is logged. Above 0."""

    def __post_init__(self) -> None:
        """Import the solver, because steps are measured later."""
        import scipy.optimize  # noqa: F401

    def plan(self, problem: PlanningProblem) -> Plan:
        """Choose the cheapest actions within the budget.

        Args:
            problem: The step to plan; it is not modified.

        Returns:
            A plan within both budgets.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        made: list[Plan] = []
        try:
            made = [replace(Search(width=_WIDTH).plan(problem), planner=self.name)]
        except InfeasibleBudgetError:
            if not np.count_nonzero(problem.host_bytes):
                raise  # without the host the search is exact here
        if made and made[0].optimal:
            return made[0]
        choice, proved = solve(problem, self.time_limit_seconds)
        if not proved:
            _LOGGER.warning(
                "mimose: the planner 'optimal' stopped after %g s, before it could "
                "prove a plan for %d layer calls optimal: raise "
                "Optimal(time_limit_seconds=...), or use the planner 'auto'",
                self.time_limit_seconds,
                len(problem.calls),
            )
        if choice is not None and fits(problem, choice):  # the solver has a tolerance
            made.append(judge(problem, choice, planner=self.name, optimal=proved))
        if not made:
            raise infeasible(problem)
        return min(made, key=lambda plan: (not plan.optimal, plan.extra_cost))


def solve(
    problem: PlanningProblem, time_limit_seconds: float
) -> tuple[IntArray | None, bool]:
    """Solve the 0-1 program of a problem, within the solver's tolerances.

    The columns are x[c, a] in {0, 1}, then held[c], what calls 0 to c hold. Bytes and
    costs are scaled.

    Args:
        problem: The step.
        time_limit_seconds: When to stop.

    Returns:
        (C,) actions, or None if there are none, and whether that is proved.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, hstack

    form = PrefixForm(problem)
    n_calls, n_actions = problem.allowed.shape
    unit = float(np.abs(problem.held_bytes).max()) / _SCALE or 1.0
    host_unit = float(problem.host_bytes.max()) / _SCALE or 1.0
    cost_unit = float(np.abs(problem.cost).max()) / _SCALE or 1.0
    # Every call runs under exactly one action, so the needs may count from any level.
    origin = float(form.need_bytes.min())
    needs = np.where(problem.allowed, form.need_bytes - origin, 0.0)
    chosen = csr_array(np.repeat(np.eye(n_calls), n_actions, axis=1))
    before = csr_array(np.eye(n_calls, k=-1))
    behind = csr_array(np.eye(n_calls))

    def rows(
        table: FloatArray, sums: csr_array, low: float, high: float
    ) -> LinearConstraint:
        """Constrain, for each call, its entry of a table and the sums held."""
        own = csr_array(chosen.multiply(table.ravel()))
        return LinearConstraint(hstack([own, sums]), low, high)

    highest = np.full(n_calls, np.inf)
    highest[-1] = (problem.budget_bytes - form.head_bytes) / unit
    host = np.append(problem.host_bytes.ravel() / host_unit, np.zeros(n_calls))
    result = milp(
        np.append(problem.cost.ravel() / cost_unit, np.zeros(n_calls)),
        constraints=[
            rows(np.ones(problem.allowed.shape), 0 * before, 1, 1),
            rows(problem.held_bytes / unit, before - behind, 0, 0),
            rows(needs / unit, before, -np.inf, (problem.budget_bytes - origin) / unit),
            LinearConstraint(
                host[None], -np.inf, problem.host_budget_bytes / host_unit
            ),
        ],
        integrality=np.repeat([1, 0], [problem.allowed.size, n_calls]),
        bounds=Bounds(
            np.repeat([0, -np.inf], [problem.allowed.size, n_calls]),
            np.append(problem.allowed.ravel().astype(np.float64), highest),
        ),
        options={"time_limit": time_limit_seconds, "mip_rel_gap": 0.0},
    )
    proved = result.status in (0, 2)  # solved, or shown to be infeasible
    if result.x is None:
        return None, proved
    taken = result.x[: problem.allowed.size].reshape(problem.allowed.shape)
    return taken.argmax(axis=1), proved
