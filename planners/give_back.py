"""Taking back what a plan pays without need."""

import numpy as np

from .base import IntArray, PlanningProblem
from .timeline import fits


def give_back(problem: PlanningProblem, choice: IntArray) -> IntArray:
    """Take cheaper actions wherever the budgets allow, the greatest saving first.

    Args:
        problem: The step.
        choice: (E,) actions within both budgets.

    Returns:
        (E,) actions within both budgets that cost no more.
    """
    events = np.arange(len(choice))
    saving = problem.cost[events, choice][:, None] - problem.cost
    saving[~problem.allowed] = 0.0
    better = choice.copy()
    for flat in np.argsort(-saving, axis=None, kind="stable").tolist():
        event, action = divmod(flat, saving.shape[1])
        if saving[event, action] <= 0:
            break
        if problem.cost[event, action] >= problem.cost[event, better[event]]:
            continue
        tried = better.copy()
        tried[event] = action
        if fits(problem, tried):
            better = tried
    return better
