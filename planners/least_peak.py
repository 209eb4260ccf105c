"""The safest plan, which has the lowest peak, and the error if even that is too high.

Note: [Lossy actions]. If a user allows lossy actions, planners choose them where they
are cheapest. The safest plan is different: a step uses it as a fallback, and nothing
justifies inexact gradients if memory suffices without. So it has only exact actions
(except for calls that allow none) as long as such a plan keeps the budget. If none
does, it has lossy actions too. Then the reported lowest peak is theirs as well: an
error that ignored them would be wrong.
"""

from dataclasses import replace

import numpy as np

from .prefix import PrefixForm
from .problem import InfeasibleBudgetError, IntArray, Plan, PlanningProblem
from .timeline import fits, host_bytes, judge, lay_out, peak_bytes

_WIDTH = 64
_BISECTIONS = 20


def safest_plan(problem: PlanningProblem) -> Plan:
    """Return the plan with the lowest peak, whatever it costs.

    One pass over the calls, from the last to the first, finds it exactly. If the host
    budget limits the plan, bisection finds it approximately.

    Args:
        problem: The step to plan. Its budget decides only whether lossy actions are
            needed: Note: [Lossy actions] in ``least_peak.py``.

    Returns:
        The plan. Among actions with the same peak it has the one that holds least.
    """
    return judge(problem, safest_choice(problem), planner="least-peak")


def infeasible(problem: PlanningProblem) -> InfeasibleBudgetError:
    """Return the error for a budget that no plan keeps, with the lowest peak.

    Args:
        problem: The step.
    """
    laid_out = lay_out(problem, safest_choice(problem))
    return InfeasibleBudgetError(
        problem.budget_bytes, laid_out.peak_bytes, laid_out.holders()
    )


def safest_choice(problem: PlanningProblem) -> IntArray:
    """Return (C,) the actions with the lowest peak: Note: [Lossy actions].

    Args:
        problem: The step to plan.
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
    """Choose among all allowed actions."""
    form = PrefixForm(problem)
    least, held = form.least_suffix(), problem.held_bytes
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
    """Bisect between a peak that needs too much host memory and one that does not."""
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
