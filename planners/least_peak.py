"""The plan with the least peak, and the error where it is not low enough.

Note: [Lossy actions]. Whoever allows lossy actions has planners choose them where they
cost least. But a plan of the least peak is what a step falls back on, and no user asked
for noise in gradients where there is memory enough. So it holds exact actions alone
(but where a call has none) as long as such a plan keeps the budget. Where none does,
lossy ones are taken as well, and the least peak that is reported is theirs: with them
the budget may be kept, and the error that says it cannot would not be true.
"""

from dataclasses import replace

import numpy as np

from .prefix import PrefixForm
from .problem import InfeasibleBudgetError, IntArray, Plan, PlanningProblem
from .timeline import fits, host_bytes, judge, lay_out, peak_bytes

_WIDTH = 64
_BISECTIONS = 20


def safest_plan(problem: PlanningProblem) -> Plan:
    """Make the plan with the least peak, whatever it costs.

    One pass over the calls, last to first, is exact. Where the host budget binds, the
    least peak is searched by halving, and may be missed.

    Args:
        problem: The step to plan; its budget is read only where it may be kept without
            its lossy actions, see Note: [Lossy actions].

    Returns:
        The plan. Among actions that reach the same peak, the one that holds least.
    """
    return judge(problem, safest_choice(problem), planner="least-peak")


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


def safest_choice(problem: PlanningProblem) -> IntArray:
    """Choose the actions with the least peak within the host budget.

    Args:
        problem: The step to plan.

    Returns:
        (C,) index of each call's action, exact ones where they suffice: Note: [Lossy
        actions].
    """
    is_exact = np.array([name not in problem.lossy for name in problem.actions])
    exact = problem.allowed & is_exact
    left = np.where(exact.any(axis=1)[:, None], exact, problem.allowed)
    host = np.where(left, problem.host_bytes, np.inf).min(axis=1).sum()
    if (left != problem.allowed).any() and host <= problem.host_budget_bytes:
        choice = _least_peak(replace(problem, allowed=left))
        if fits(problem, choice):
            return choice
    return _least_peak(problem)


def _least_peak(problem: PlanningProblem) -> IntArray:
    """Choose among all actions that are allowed."""
    form = PrefixForm.of(problem)
    least, held = form.least_suffix(), form.held_bytes
    reached = np.maximum(form.need_bytes, least[1:, None] + held)
    holds = np.where(reached <= least[:-1, None], held, np.inf)
    is_least = holds == holds.min(axis=1, keepdims=True, initial=np.inf)
    choice: IntArray = np.where(is_least, problem.cost, np.inf).argmin(axis=1)
    if host_bytes(problem, choice) <= problem.host_budget_bytes:
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
        walk = form.cheapest_walk(problem.host_bytes, middle, _WIDTH)
        if walk and host_bytes(problem, walk[0]) <= problem.host_budget_bytes:
            safe, enough = walk[0], middle
        else:
            too_low = middle
    return safe
