"""Choices of actions that take no search."""

import numpy as np

from .base import EXACT_ACTIONS, IntArray, PlanningProblem


def keep_choice(problem: PlanningProblem) -> IntArray:
    """Keep every event; where that is not allowed, recompute it.

    Args:
        problem: The step.

    Returns:
        (E,) index of each event's action.
    """
    return np.where(problem.allowed[:, 0], 0, recompute_choice(problem))


def recompute_choice(problem: PlanningProblem) -> IntArray:
    """Recompute every event, or take the next exact action that is allowed.

    Args:
        problem: The step.

    Returns:
        (E,) index of each event's action: the first allowed of the exact actions
        other than keeping, else keeping, else the first allowed.
    """
    exact = [problem.actions.index(a) for a in EXACT_ACTIONS if a in problem.actions]
    rest = [i for i in range(len(problem.actions)) if i not in exact]
    preference = np.array(exact + rest, dtype=np.intp)
    choice: IntArray = preference[problem.allowed[:, preference].argmax(axis=1)]
    return choice
