"""The cheapest walk over the events within a budget, of any problem."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .base import FloatArray
from .frontier import Walk, cheapest_walk
from .pauses import give_way
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
    is_allowed = np.isfinite(form.need_bytes)  # what is not may cost anything
    held = np.where(is_allowed, form.held_bytes, 0.0)
    if form.has_pairs:
        both = np.stack((held, np.where(is_allowed, form.shared_bytes, 0.0)))
        held, shared = _on_grid(both, np.ceil)
        form = replace(form, shared_bytes=shared)
    else:
        held = _on_grid(held, np.ceil)
    form = replace(form, held_bytes=held)
    headroom = budget_bytes - least_suffix(form)
    if headroom[0, 0] < 0 or form.step_bytes > budget_bytes:
        return None
    give_way()
    cost = _on_grid(np.where(is_allowed, cost, 0.0), np.rint)
    give_way()
    return cheapest_walk(form, cost, headroom, budget_bytes, width)


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
