"""Choices of actions that take no search."""

from dataclasses import replace

import numpy as np

from .base import IntArray, PlanningProblem


def keep_choice(problem: PlanningProblem) -> IntArray:
    """Take the first action, that keeps, and where it is not allowed the last.

    Args:
        problem: The step.

    Returns:
        (E,) index of each event's action.
    """
    return np.where(problem.allowed[:, 0], 0, least_choice(problem))


def cheapest_choice(problem: PlanningProblem) -> IntArray:
    """Return the (E,) allowed actions that cost least."""
    choice: IntArray = np.where(problem.allowed, problem.cost, np.inf).argmin(axis=1)
    return choice


def least_choice(problem: PlanningProblem) -> IntArray:
    """Take the last action, or what comes nearest to it.

    Args:
        problem: The step.

    Returns:
        (E,) index of each event's action: the last that is allowed, is exact and needs
        nothing of the host; else the last that is exact; else the last that is allowed.
    """
    n_actions = len(problem.actions)
    is_exact = np.array([name not in problem.lossy for name in problem.actions])
    rank = np.arange(n_actions) + n_actions * is_exact
    rank = rank + n_actions * (is_exact & (problem.host_bytes == 0))
    choice: IntArray = np.where(problem.allowed, rank, -1).argmax(axis=1)
    return choice


def without_lossy(problem: PlanningProblem) -> PlanningProblem | None:
    """Forbid the lossy actions wherever there is an exact one.

    Args:
        problem: The step.

    Returns:
        The same step; None where no lossy action is left out by that, or where the
        others need more of the host than there is.
    """
    if not problem.lossy:
        return None
    is_exact = np.array([name not in problem.lossy for name in problem.actions])
    exact = np.logical_and(problem.allowed, is_exact)
    left = np.where(exact.any(axis=1)[:, None], exact, problem.allowed)
    host = np.where(left, problem.host_bytes, np.inf).min(axis=1, initial=np.inf)
    if (left == problem.allowed).all() or host.sum() > problem.host_budget_bytes:
        return None
    return replace(problem, allowed=left)
