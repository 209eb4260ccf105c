"""Planners: one action for each call, so that a step stays within its budget."""

import re

from .actions import ActionSpec, Menu
from .baselines import (
    FixedPlanner,
    Pattern,
    every_k,
    everywhere,
)
from .greedy import Greedy
from .least_peak import safest_plan
from .optimal import Optimal
from .problem import InfeasibleBudgetError, Plan, Planner, PlanningProblem
from .search import Search, refiner_of
from .timeline import Timeline, host_bytes, lay_out, peak_bytes

__all__ = [
    "ActionSpec",
    "FixedPlanner",
    "Greedy",
    "InfeasibleBudgetError",
    "Menu",
    "Optimal",
    "Pattern",
    "Plan",
    "Planner",
    "PlanningProblem",
    "Search",
    "Timeline",
    "every_k",
    "everywhere",
    "host_bytes",
    "lay_out",
    "make_planner",
    "peak_bytes",
    "refiner_of",
    "safest_plan",
]


def make_planner(planner: str | Planner) -> Planner:
    """Turn a name into a planner; a planner is returned as it is.

    Args:
        planner: ``"auto"``, ``"greedy"``, ``"optimal"``, ``"none"``, ``"full"``, or
            ``"every-K"`` for an integer K, or an object with a ``plan`` method.

    Returns:
        The planner.

    Raises:
        ValueError: No planner has this name.
        TypeError: It is neither a name nor a planner.
    """
    if isinstance(planner, str):
        every = re.fullmatch(r"every-([1-9][0-9]*)", planner)
        if every:
            return every_k(int(every[1]))
        if planner == "auto":
            return Search()
        if planner == "greedy":
            return Greedy()
        if planner == "optimal":
            return Optimal()
        if planner == "none":
            return Pattern(planner, ("keep",))
        if planner == "full":
            return Pattern(planner, ("recompute",))
        known = "auto, full, greedy, none, optimal, every-K"
        msg = f"no planner is called {planner!r}; choose one of {known}"
        raise ValueError(msg)
    if isinstance(planner, type) or not isinstance(planner, Planner):
        msg = f"planner must be a name or have name and plan(problem), got {planner!r}"
        raise TypeError(msg)
    return planner
