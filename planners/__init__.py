"""Planners choose one action for each layer call, so that a step keeps its budget."""

import re
from collections.abc import Callable, Mapping
from functools import partial

from .actions import ActionSpec, Menu
from .baselines import Pattern, every_k, everywhere
from .greedy import Greedy
from .least_peak import safest_plan
from .optimal import Optimal
from .problem import InfeasibleBudgetError, Plan, Planner, PlanningProblem
from .search import Search
from .timeline import Timeline, host_bytes, lay_out, peak_bytes

__all__ = [
    "ActionSpec",
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
    "safest_plan",
]


_BY_NAME: Mapping[str, Callable[[], Planner]] = {
    "auto": Search,
    "greedy": Greedy,
    "optimal": Optimal,
    "none": partial(Pattern, "none", ("keep",)),
    "full": partial(Pattern, "full", ("recompute",)),
}


def make_planner(planner: str | Planner) -> Planner:
    """Return the planner of a name.

    Args:
        planner: ``"auto"`` (`Search`), ``"greedy"`` (`Greedy`), ``"optimal"``
            (`Optimal`), ``"none"`` (keep everything), ``"full"`` (recompute
            everything), ``"every-K"`` for an integer K (`every_k`); or a `Planner`,
            which is returned unchanged.

    Raises:
        ValueError: There is no planner of this name.
        TypeError: It is neither a name nor a planner.
    """
    if isinstance(planner, str):
        every = re.fullmatch(r"every-([1-9][0-9]*)", planner)
        if every:
            return every_k(int(every[1]))
        if planner not in _BY_NAME:
            known = "auto, full, greedy, none, optimal, every-K (such as every-2)"
            msg = f"no planner is called {planner!r}; choose one of {known}"
            raise ValueError(msg)
        return _BY_NAME[planner]()
    if isinstance(planner, type) or not isinstance(planner, Planner):
        msg = (
            f"planner must be a name, or an object with an attribute name and a method "
            f"plan(problem), got {planner!r}"
        )
        raise TypeError(msg)
    return planner
