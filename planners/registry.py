"""Planners by name."""

import re
from collections.abc import Callable

from .base import Planner
from .eviction import Eviction
from .fixed import EveryK, Full, NoPlan
from .greedy import Greedy
from .marginal import Marginal
from .optimal import Optimal

_MAKERS: dict[str, Callable[[], Planner]] = {
    "auto": Marginal,
    "eviction": Eviction,
    "full": Full,
    "greedy": Greedy,
    "greedy-released": lambda: Greedy(largest=False),
    "marginal": Marginal,
    "none": NoPlan,
    "optimal": Optimal,
}
_EVERY = re.compile(r"every-([1-9][0-9]*)")


def make_planner(planner: str | Planner) -> Planner:
    """Turn a name into a planner; a planner is handed back as it is.

    Args:
        planner: One of ``"auto"`` (marginal), ``"eviction"``, ``"full"``,
            ``"greedy"``, ``"greedy-released"``, ``"marginal"``, ``"none"``,
            ``"optimal"`` and ``"every-K"`` for an integer K, or an object with a
            ``plan`` method.

    Returns:
        The planner.

    Raises:
        ValueError: No planner has this name.
        TypeError: It is neither a name nor a planner.
    """
    if isinstance(planner, str):
        every = _EVERY.fullmatch(planner)
        if every:
            return EveryK(int(every[1]))
        if planner not in _MAKERS:
            known = ", ".join([*sorted(_MAKERS), "every-K"])
            msg = f"no planner is called {planner!r}; choose one of {known}"
            raise ValueError(msg)
        return _MAKERS[planner]()
    if isinstance(planner, type) or not isinstance(planner, Planner):
        msg = f"planner must be a name or have name and plan(problem), got {planner!r}"
        raise TypeError(msg)
    return planner
