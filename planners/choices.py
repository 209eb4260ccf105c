"""Choices of actions that take no search."""

import numpy as np

from .base import IntArray, PlanningProblem


def keep_choice(problem: PlanningProblem) -> IntArray:
    """Take the first action, that keeps, and where it is not allowed the least.

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
    """Take the least action, or the last before it that is allowed and exact.

    Args:
        problem: The step.

    Returns:
        (E,) index of each event's action: the last that is allowed and exact, else
        the last that is allowed.
    """
    n_actions = len(problem.actions)
    lossy = [i for i, name in enumerate(problem.actions) if name in problem.lossy]
    exact = [i for i in range(n_actions) if i not in lossy]
    preference = np.array(exact[::-1] + lossy[::-1], dtype=np.intp)
    choice: IntArray = preference[problem.allowed[:, preference].argmax(axis=1)]
    return choice
