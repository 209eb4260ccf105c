"""The cheapest walk over the events within a budget, of any problem."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .base import FloatArray, IntArray, PlanningProblem
from .frontier import Walk, cheapest_walk
from .host_search import HostNeeds, cheaper_walk
from .prefix import PrefixForm, least_suffix

# Bytes and costs are put on a grid of 2**-48 of their sum (a GiB's is a 260,000th
# of a byte): equal sums then are equal whatever the order of their terms.
_GRID_BITS = 48


def find_walk(
    form: PrefixForm, cost: FloatArray, budget_bytes: float, *, width: int
) -> Walk | None:
    """Find the cheapest choice of actions within the budget.

    Args:
        form: The step, in prefix form.
        cost: (E, K) what the action costs, in any unit.
        budget_bytes: The highest level allowed; finite.
        width: Most walks that are carried on at any event.

    Returns:
        The cheapest walk found. None where none was: no walk keeps the budget, or,
        with nets that depend on the action, none of those that were carried on.
    """
    form, cost = _rounded(form, cost)
    headroom = budget_bytes - least_suffix(form)
    if headroom[0, 0] < 0 or form.step_bytes > budget_bytes:
        return None
    return cheapest_walk(form, cost, headroom, budget_bytes, width)


def find_walk_by_host(
    problem: PlanningProblem,
    form: PrefixForm,
    price: float,
    budget_bytes: float,
    *,
    known: IntArray,
    width: int,
) -> Walk:
    """Find the cheapest choice of actions within the budget and the host's.

    Args:
        problem: The step.
        form: The same in prefix form.
        price: Of a host byte, that makes the host's budget scarce enough.
        budget_bytes: The highest level allowed; finite.
        known: (E,) actions within both budgets.
        width: Most walks that are carried on at any event.

    Returns:
        The cheapest walk found.
    """
    form, cost = _rounded(form, problem.cost)
    host = _on_grid(np.where(problem.allowed, problem.host_bytes, 0.0), np.floor)
    needs = HostNeeds(host, problem.host_budget_bytes, price)
    headroom = budget_bytes - least_suffix(form)
    return cheaper_walk(form, cost, needs, headroom, budget_bytes, known, width)


def _rounded(form: PrefixForm, cost: FloatArray) -> tuple[PrefixForm, FloatArray]:
    """Put what is added up on grids; what is not allowed may cost anything."""
    is_allowed = np.isfinite(form.need_bytes)
    held = np.where(is_allowed, form.held_bytes, 0.0)
    if form.has_pairs:
        both = np.stack((held, np.where(is_allowed, form.shared_bytes, 0.0)))
        held, shared = _on_grid(both, np.ceil)
        form = replace(form, shared_bytes=shared)
    else:
        held = _on_grid(held, np.ceil)
    return replace(form, held_bytes=held), _on_grid(
        np.where(is_allowed, cost, 0.0), np.rint
    )


def _on_grid(
    table: FloatArray, rounding: Callable[[FloatArray], FloatArray]
) -> FloatArray:
    """Round to multiples of a power of two, small against the table's sum.

    Args:
        table: Any numbers.
        rounding: To whole numbers: up, or to the nearest.
    """
    total = float(np.abs(table).sum())
    if not total:
        return table
    grid = 2.0 ** (math.frexp(total)[1] - _GRID_BITS)
    return rounding(table / grid) * grid
