"""The same step with fewer actions to choose from.

Where a search has left out what might be cheaper, a plan of a larger menu may come out
dearer than that of a smaller one, by some hundredths of a per cent. Nobody who allows
more actions expects that.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from .base import PlanningProblem


def with_actions(problem: PlanningProblem, at: Sequence[int]) -> PlanningProblem:
    """Leave a step some of its actions.

    Args:
        problem: The step.
        at: Positions of these actions, in order.

    Raises:
        ValueError: An event has none of them, or together they need too much of the
            host.
    """
    shape, names = problem.allowed.shape, [field.name for field in fields(problem)]
    values = {name: getattr(problem, name) for name in names}
    tables = {
        name: value[:, at] for name, value in values.items() if np.shape(value) == shape
    }
    actions = tuple(problem.actions[index] for index in at)
    lossy = problem.lossy & set(actions)
    return replace(problem, **tables, actions=actions, lossy=lossy)


def with_fewer_actions(problem: PlanningProblem) -> PlanningProblem | None:
    """Leave out the lossy actions; else those of the host; else all but the ends.

    Args:
        problem: The step.

    Returns:
        The same step with fewer actions; None where there are no fewer, or where it
        cannot do with them.
    """
    n_actions = len(problem.actions)
    exact = [i for i in range(n_actions) if problem.actions[i] not in problem.lossy]
    on_device = [i for i in exact if not np.count_nonzero(problem.host_bytes[:, i])]
    for at in (exact, on_device, sorted({0, n_actions - 1})):
        if len(at) < n_actions:
            try:
                return with_actions(problem, at)
            except ValueError:
                continue
    return None
