"""The plan with the least peak, found fast.

Note: [Lossy actions]. Whoever allows lossy actions has planners choose them where they
cost least. But a plan of the least peak is what a step falls back on, and nobody asked
for noise in gradients where there is memory enough. So it holds exact actions alone
(but where an event has none) as long as such a plan keeps the budget. Where none does,
lossy ones are taken as well, and the least peak that is reported is theirs: with them
the budget may be kept, and the error that says it cannot would not be true.
"""

import numpy as np

from .base import IntArray, Plan, PlanningProblem
from .choices import without_lossy
from .errors import InfeasibleBudgetError
from .least_peak import least_peak
from .prefix import PrefixForm, prefix_form
from .timeline import fits, judge, keeps_host_budget, lay_out, peak_bytes
from .walks import find_walk

_WIDTH = 64
_BISECTIONS = 20


def safest_plan(problem: PlanningProblem) -> Plan:
    """Make the plan with the least peak, whatever it costs.

    Without actions that need the host this is exact: one pass over the events, last
    to first (see ``prefix.least_suffix``). Where the host budget binds, the least
    peak is searched by halving, and may be missed by a millionth; where nets depend on
    the action, see ``least_peak.py``.

    Args:
        problem: The step to plan; its budget is read only where it may be kept without
            its lossy actions, see Note: [Lossy actions].

    Returns:
        The plan. Among actions that reach the same peak, the one that holds least.
    """
    return judge(problem, safest_choice(problem), planner="safest")


def infeasible(problem: PlanningProblem) -> InfeasibleBudgetError:
    """Build the error that says why no plan keeps the budget.

    Args:
        problem: The step whose budget cannot be kept.

    Returns:
        The error, with the least peak and what holds it.
    """
    laid_out = lay_out(problem, safest_choice(problem))
    return InfeasibleBudgetError(
        problem.budget_bytes, laid_out.peak_bytes, laid_out.holders()
    )


def safest_choice(problem: PlanningProblem, form: PrefixForm | None = None) -> IntArray:
    """Choose the actions with the least peak within the host budget.

    Args:
        problem: The step to plan.
        form: Its prefix form, if it is at hand.

    Returns:
        (E,) index of each event's action, exact ones where they suffice: Note: [Lossy
        actions].
    """
    exact = without_lossy(problem)
    if exact is not None:
        choice = _least_peak(exact, prefix_form(exact))
        if fits(problem, choice):
            return choice
    return _least_peak(problem, prefix_form(problem) if form is None else form)


def _least_peak(problem: PlanningProblem, form: PrefixForm) -> IntArray:
    """Choose among all actions that are allowed."""
    choice = least_peak(form, problem.cost)
    if keeps_host_budget(problem, choice):
        return choice
    return _within_host_budget(problem, form, float(peak_bytes(problem, choice)))


def _within_host_budget(
    problem: PlanningProblem, form: PrefixForm, too_low: float
) -> IntArray:
    """Halve the peaks between one that needs too much host and one that does not."""
    host = np.where(problem.allowed, problem.host_bytes, np.inf)
    safe: IntArray = host.argmin(axis=1)
    enough = float(peak_bytes(problem, safe))
    for _ in range(_BISECTIONS):
        middle = (too_low + enough) / 2
        walk = find_walk(form, problem.host_bytes, middle, width=_WIDTH)
        if walk and keeps_host_budget(problem, walk.choice):
            safe, enough = walk.choice, middle
        else:
            too_low = middle
    return safe
