"""What a search leaves walks out by: a first walk, and what each ends with at least.

A walk ends with at least its cost so far and what the rest costs at least
(``relaxed.py``). If that is no less than the first walk (``dive.py``) costs, it need
not be carried on.
"""

import math

import numpy as np

from .base import FloatArray, IntArray
from .dive import dive
from .limits import Limits
from .prefix import PrefixForm
from .relaxed import relaxed_rests


class Bounds:
    """The bounds of one search.

    Args:
        form: The step, in prefix form.
        cost: (E, K) what the action costs.
        headroom: (2, E + 1) the most that may be held before each event, and at the
            end, see ``limits.py``.
        limits: The same by the event's action.
        budget_bytes: The highest level allowed.
    """

    def __init__(
        self,
        form: PrefixForm,
        cost: FloatArray,
        headroom: FloatArray,
        limits: Limits,
        budget_bytes: float,
    ) -> None:
        self._rests = relaxed_rests(form, cost, headroom[0])
        self.known: IntArray | None = dive(
            form, cost, limits, budget_bytes, self._rests
        )
        """(E,) actions of the first walk; None where none was found."""
        self.known_cost = math.inf
        """What it costs."""
        if self.known is not None:
            self.known_cost = float(cost[np.arange(len(cost)), self.known].sum())

    def least_costs(
        self, n_behind: int, held_bytes: FloatArray, cost: FloatArray
    ) -> FloatArray:
        """Return what walks end with at least.

        Args:
            n_behind: Events that they have behind them.
            held_bytes: (n,) what they hold.
            cost: (n,) what they have cost.
        """
        least: FloatArray = cost + np.interp(held_bytes, *self._rests[n_behind])
        return least
