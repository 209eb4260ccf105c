"""Planners: one action for each event, so that a step stays within its budget."""

from .actions import ActionSpec, Menu
from .base import FixedPlanner, OneShapePlanner, Plan, Planner, PlanningProblem
from .errors import InfeasibleBudgetError
from .eviction import Eviction
from .fixed import EveryK, Everywhere, Full, NoPlan, Static
from .greedy import Greedy
from .marginal import Marginal
from .optimal import Optimal, least_peak_plan
from .refined import Refined, refiner_of
from .registry import make_planner
from .safest import safest_plan
from .timeline import Timeline, host_bytes, lay_out, peak_bytes

__all__ = [
    "ActionSpec",
    "EveryK",
    "Everywhere",
    "Eviction",
    "FixedPlanner",
    "Full",
    "Greedy",
    "InfeasibleBudgetError",
    "Marginal",
    "Menu",
    "NoPlan",
    "OneShapePlanner",
    "Optimal",
    "Plan",
    "Planner",
    "PlanningProblem",
    "Refined",
    "Static",
    "Timeline",
    "host_bytes",
    "lay_out",
    "least_peak_plan",
    "make_planner",
    "peak_bytes",
    "refiner_of",
    "safest_plan",
]
