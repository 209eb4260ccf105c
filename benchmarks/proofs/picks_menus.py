"""Menus of `picks`: parts of a planning problem, and a planner to learn them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from mimose.bench.grid.strategies import ALL, ALL_MENU, FINE
from mimose.planners import Plan, PlanningProblem
from mimose.planners.choices import keep_choice, least_choice
from mimose.planners.timeline import judge, peak_bytes

MENUS = {
    "fine": FINE,
    "exact": tuple(name for name in ALL if name not in ALL_MENU.lossy),
    "all": ALL,
}
"""By name: what stays on the device and is exact, all that is exact, and all."""


def restricted(problem: PlanningProblem, names: Sequence[str]) -> PlanningProblem:
    """Return the problem with some of its actions.

    Args:
        problem: The step; it is not modified.
        names: Of the actions; those that the problem does not have are passed over.
            The first and the last are among them.
    """
    columns = [i for i, name in enumerate(problem.actions) if name in names]
    changes: dict[str, Any] = {
        field.name: getattr(problem, field.name)[:, columns]
        for field in fields(problem)
        if np.ndim(getattr(problem, field.name)) == 2
    }
    kept = tuple(problem.actions[i] for i in columns)
    lossy = problem.lossy & frozenset(kept)
    return replace(problem, actions=kept, lossy=lossy, **changes)


def budget_at(problem: PlanningProblem, share: float) -> float:
    """Return the bytes that lie so far between recomputing all (0) and keeping all (1).

    Whatever menu the problem has, the two ends are those of whole layers.
    """
    whole = restricted(problem, (problem.actions[0], problem.actions[-1]))
    least = float(peak_bytes(whole, least_choice(whole)))
    most = float(peak_bytes(whole, keep_choice(whole)))
    return least + share * max(0.0, most - least)


class Anything:
    """Keeps everything, so that a session tries its actions; then chooses at random.

    Args:
        seed: Of the choices.
    """

    name = "anything"

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.is_random = False

    def plan(self, problem: PlanningProblem) -> Plan:
        """Keep, or choose for each event any action that it may run under."""
        if not self.is_random:
            return judge(problem, keep_choice(problem), planner=self.name)
        noise = self._random.random(problem.allowed.shape)
        choice = np.where(problem.allowed, noise, -1.0).argmax(axis=1)
        return judge(problem, choice, planner=self.name)
