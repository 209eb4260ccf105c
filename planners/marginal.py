"""The planner for the critical path: near the optimum in a millisecond or two."""

from dataclasses import dataclass, replace
from typing import ClassVar

from .base import FloatArray, Plan, PlanningProblem
from .choices import cheapest_choice
from .errors import InfeasibleBudgetError
from .fewer import with_fewer_actions
from .frontier import Walk
from .give_back import give_back
from .prefix import PrefixForm, prefix_form, prefix_peak
from .pricing import walk_within_host
from .safest import infeasible, safest_choice
from .timeline import fits, judge, keeps_host_budget
from .walks import find_walk

# The search adds the same numbers as the judge, in another order. It first gets a
# little more than the budget, so that no plan is lost to rounding, then, should the
# judge object, less than the budget by more than rounding.
_BUDGET_FACTORS = (1 + 2.0**-38, 1 - 2.0**-38)
# A walk that may cost more than the best by a greater part is searched for again, so
# many times as wide.
_TOLERANCE = 0.01
_WIDER = 4
_EVENTS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Marginal:
    """Cost per byte off the peak, weighed along the timeline.

    Walks the events once, in forward order, and carries the frontier of cost against
    bytes held, see ``frontier.py``. Walks that cannot end cheaper than one that is
    known are left out; where there are still too many, those stay that may end
    cheapest. If one that was left out might be cheaper by more than a hundredth, the
    search is made again, wider. With events of few families nothing is lost, as a rule,
    and the plan is the optimum, which ``Plan.optimal`` then says. Where actions need
    the host and its budget binds, host bytes get a price, see ``pricing.py``.

    It always keeps the budget where the plan of the least peak does. And where it does
    not prove its plan, it makes one of fewer actions as well (``fewer.py``), so that
    nothing gets dearer by allowing more.
    """

    name: ClassVar[str] = "marginal"

    width: int = 256
    """Most walks carried on at first. More is nearer to the optimum and slower."""

    widest: int = 4096
    """Most walks carried on where the search is made again, up to 24 events; fewer in
    proportion with more, so that no plan takes seconds."""

    def __post_init__(self) -> None:
        """Check the width."""
        if self.width < 2:
            msg = f"width must be at least 2, got {self.width}"
            raise ValueError(msg)

    def plan(self, problem: PlanningProblem) -> Plan:
        """Choose the cheapest actions within the budget, as far as the width sees.

        Args:
            problem: The step to plan; it is not modified.

        Returns:
            A plan within both budgets.

        Raises:
            InfeasibleBudgetError: The plan of the least peak exceeds the budget.
        """
        made = self._plan(problem)
        fewer = None if made.optimal else with_fewer_actions(problem)
        if fewer is None:
            return made
        try:
            other = self.plan(fewer)
        except InfeasibleBudgetError:
            return made
        if made.extra_cost <= other.extra_cost:
            return made
        return replace(other, optimal=False)

    def _plan(self, problem: PlanningProblem) -> Plan:
        """Search once."""
        form = prefix_form(problem)
        for factor in _BUDGET_FACTORS:
            walk = self._walk(problem, form, problem.budget_bytes * factor)
            if walk is None:
                break
            proved = walk.exact and factor > 1
            made = judge(problem, walk.choice, planner=self.name, optimal=proved)
            is_within = made.peak_bytes <= problem.budget_bytes
            if is_within and keeps_host_budget(problem, walk.choice):
                return made
        return self._plan_from_safest(problem, form)

    def _walk(
        self, problem: PlanningProblem, form: PrefixForm, budget: float
    ) -> Walk | None:
        """The cheapest walk within this budget and the host's, or near to it."""
        cheapest = cheapest_choice(problem)
        if prefix_peak(form, cheapest) <= budget:
            walk: Walk | None = Walk(choice=cheapest, exact=True)
        else:
            walk = self._wide_enough(form, problem.cost, budget)
        if walk is None or keeps_host_budget(problem, walk.choice):
            return walk
        return walk_within_host(
            problem,
            form,
            walk.choice,
            budget,
            width=self.width,
            tolerance=_TOLERANCE,
        )

    def _wide_enough(
        self, form: PrefixForm, cost: FloatArray, budget: float
    ) -> Walk | None:
        """Search again, and wider, as long as a cheaper walk may have been left out."""
        width = self.width
        widest = self.widest * _EVENTS // max(_EVENTS, len(cost))
        walk = find_walk(form, cost, budget, width=width)
        while width < widest and (walk is None or walk.gap > _TOLERANCE):
            width = min(_WIDER * width, widest)
            walk = find_walk(form, cost, budget, width=width) or walk
        return walk

    def _plan_from_safest(self, problem: PlanningProblem, form: PrefixForm) -> Plan:
        """The plan of the least peak, less what it need not pay."""
        choice = safest_choice(problem, form)
        if not fits(problem, choice):
            raise infeasible(problem)
        return judge(problem, give_back(problem, choice), planner=self.name)
