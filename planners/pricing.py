"""Cheap walks within the host's budget, by a price on its bytes.

At a price, host bytes are a cost like any other, and the cheapest walk is found as
where there is no host (``walks.py``). The dearer they are, the fewer the walk needs. Of
two walks, one that needs too many and one that does not, there is a price at which they
cost the same: if none is cheaper there, it is the price that makes the budget scarce
enough; else the cheaper one takes the place of one of the two. That takes some six
walks. All that are found like that lie on a convex hull, and the best within the budget
may not: so with that price a search is made that counts host bytes
(``host_search.py``).
"""

from dataclasses import dataclass

import numpy as np

from .base import FloatArray, IntArray, PlanningProblem
from .frontier import Walk
from .give_back import give_back
from .prefix import PrefixForm
from .timeline import fits, keeps_host_budget
from .walks import find_walk, find_walk_by_host

_PRICES = 12
_SAME = 1e-9
# Walks carried on by the search that counts host bytes: at first, and where one that
# was left out may be cheaper by more than the given part.
_WIDTHS = (256, 1024)


def walk_within_host(
    problem: PlanningProblem,
    form: PrefixForm,
    cheapest: IntArray,
    budget_bytes: float,
    *,
    width: int,
    tolerance: float,
) -> Walk | None:
    """Find a cheap walk within both budgets.

    Args:
        problem: The step.
        form: The same in prefix form.
        cheapest: (E,) actions within the budget, that need too much of the host.
        budget_bytes: The highest level allowed.
        width: Most walks that are carried on while the price is sought.
        tolerance: By what part the walk found may cost more than another, before it is
            searched for again.

    Returns:
        The walk; None where the one that needs least of the host needs too much.
    """
    budget_bytes = min(budget_bytes, _highest_peak(problem, form))
    frugal = find_walk(form, problem.host_bytes, budget_bytes, width=width)
    if frugal is None or not keeps_host_budget(problem, frugal.choice):
        return None
    ends = _End.of(problem, cheapest), _End.of(problem, frugal.choice)
    price, within = _price(problem, form, ends, budget_bytes, width)
    known = _best(problem, within)
    if known is None:
        return frugal
    for most in _WIDTHS:
        found = find_walk_by_host(
            problem, form, price, budget_bytes, known=known, width=most
        )
        known = found.choice if fits(problem, found.choice) else known
        if found.gap <= tolerance:
            break
    return found


@dataclass(frozen=True, slots=True)
class _End:
    """A walk, and what it comes to."""

    choice: IntArray
    cost: float
    host_bytes: float

    @classmethod
    def of(cls, problem: PlanningProblem, choice: IntArray) -> "_End":
        events = np.arange(len(choice))
        cost: FloatArray = problem.cost[events, choice]
        host: FloatArray = problem.host_bytes[events, choice]
        return cls(choice, float(cost.sum()), float(host.sum()))

    def at(self, price: float) -> float:
        return self.cost + price * self.host_bytes


def _price(
    problem: PlanningProblem,
    form: PrefixForm,
    ends: tuple[_End, _End],
    budget_bytes: float,
    width: int,
) -> tuple[float, list[IntArray]]:
    """Return the price of a host byte, and the walks within the budget on the way."""
    (beyond, within), price = ends, 0.0
    found = [within.choice]
    for _ in range(_PRICES):
        dearer = within.cost - beyond.cost
        price = max(0.0, dearer / (beyond.host_bytes - within.host_bytes))
        cost = problem.cost + price * problem.host_bytes
        walk = find_walk(form, cost, budget_bytes, width=width)
        if walk is None:
            break
        end = _End.of(problem, walk.choice)
        if end.at(price) >= beyond.at(price) - _SAME * abs(beyond.at(price)):
            break
        if end.host_bytes > problem.host_budget_bytes:
            beyond = end
        else:
            within = end
            found.append(end.choice)
    return price, found


def _best(problem: PlanningProblem, choices: list[IntArray]) -> IntArray | None:
    """Return the cheapest after giving back; None where none keeps the budgets."""
    better = [give_back(problem, each) for each in choices if fits(problem, each)]
    ends = [_End.of(problem, choice) for choice in better]
    return min(ends, key=lambda end: end.cost).choice if ends else None


def _highest_peak(problem: PlanningProblem, form: PrefixForm) -> float:
    """A level that no plan exceeds, in place of an infinite budget."""
    needs = form.need_bytes[problem.allowed]
    own = float(needs.max(initial=max(form.head_bytes, form.step_bytes)))
    return own + float(problem.held_bytes.sum()) + float(form.extra_bytes.sum())
