"""The cheapest walk over the events where the host's budget binds as well.

Such a walk has one number more to remember, what it needs of the host, and few walks
are then no better than another in all of them. So what guides the search is a price on
host bytes (see ``pricing.py``): a walk ends with at least its cost so far and what the
rest costs at least (``relaxed.py``), host bytes paid for in both, less the price of all
that the budget has. Walks that cannot end cheaper than a known one are left out, and of
the others the most hopeful are carried on.
"""

import math
from typing import NamedTuple

import numpy as np

from .base import BoolArray, FloatArray, IntArray
from .frontier import Walk
from .limits import limits_of
from .prefix import PrefixForm
from .relaxed import relaxed_rests
from .trails import Trail, read_trail

# Of so many times the width the most hopeful are compared with one another.
_COMPARED = 2


class HostNeeds(NamedTuple):
    """What actions need of the host."""

    bytes: FloatArray
    """(E, K) by action."""
    budget_bytes: float
    """For all events together."""
    price: float
    """Cost of a byte, that makes it scarce enough."""


class _Labels(NamedTuple):
    """(n,) or (K, n) walks that have come equally far."""

    held: FloatArray
    cost: FloatArray
    host: FloatArray
    level: FloatArray
    saved: BoolArray

    def picked(self, at: IntArray) -> "_Labels":
        """Read some of them, by their positions were they in one row."""
        held, cost, host, level = (numbers.ravel()[at] for numbers in self[:4])
        return _Labels(held, cost, host, level, self.saved.ravel()[at])


def cheaper_walk(
    form: PrefixForm,
    cost: FloatArray,
    needs: HostNeeds,
    headroom: FloatArray,
    budget_bytes: float,
    known: IntArray,
    width: int,
) -> Walk:
    """Look for a walk within both budgets that is cheaper than a known one.

    Args:
        form: The step, in prefix form.
        cost: (E, K) what the action costs, in any unit.
        needs: What actions need of the host.
        headroom: (2, E + 1) the most that may be held before each event, and at the
            end, see ``limits.py``.
        budget_bytes: The highest level allowed; finite.
        known: (E,) actions within both budgets.
        width: Most walks that are carried on at any event.

    Returns:
        The cheapest walk found.
    """
    return _Search(form, cost, needs, headroom, budget_bytes, known, width).run()


class _Search:
    """One search: its arguments are those of `cheaper_walk`."""

    def __init__(
        self,
        form: PrefixForm,
        cost: FloatArray,
        needs: HostNeeds,
        headroom: FloatArray,
        budget_bytes: float,
        known: IntArray,
        width: int,
    ) -> None:
        self._form, self._cost, self._needs = form, cost, needs
        self._budget_bytes, self._width = budget_bytes, width
        self._limits = limits_of(form, headroom, budget_bytes)
        priced = cost + needs.price * needs.bytes
        self._rests = relaxed_rests(form, priced, headroom[0])
        self._known = known
        self._known_cost = float(cost[np.arange(len(cost)), known].sum())
        is_allowed = np.isfinite(form.need_bytes)
        least = np.where(is_allowed, needs.bytes, np.inf).min(axis=1)
        later = least.sum() - least.cumsum()
        self._host_limit = needs.budget_bytes - later
        """(E,) the most host bytes behind each event."""
        self._left_out = math.inf
        """The lowest hope of the walks that were left out for want of room."""

    def run(self) -> Walk:
        """Walk the events once."""
        none, start = np.zeros(1), np.full(1, self._form.step_bytes)
        labels = _Labels(none, none, none, start, np.zeros(1, dtype=np.bool_))
        trail: Trail = []
        for event in range(len(self._cost)):
            n_before = len(labels.held)
            grown, may = self._grown(labels, event)
            stay = self._hopeful(grown, may, event)
            trail.append((stay, n_before))
            labels = grown.picked(stay)
        if not len(labels.cost):
            return self._found(self._known, self._known_cost)
        best = int(labels.cost.argmin())
        return self._found(read_trail(trail, best), float(labels.cost[best]))

    def _found(self, choice: IntArray, cost: float) -> Walk:
        spare = max(0.0, cost - self._left_out)
        return Walk(choice=choice, exact=not spare, gap=spare / abs(cost or 1.0))

    def _grown(self, labels: _Labels, event: int) -> tuple[_Labels, BoolArray]:
        """Walk one more event, by each action, and tell what keeps the budgets."""
        form, limits = self._form, self._limits
        tables = form.held_bytes, form.shared_bytes, form.saves_output, self._cost
        holds, shares, saves, costs = (table[event][:, None] for table in tables)
        needs, extra = self._needs.bytes[event][:, None], form.extra_bytes[event]
        backward = labels.held + form.backward_bytes[event][:, None]
        grown = _Labels(
            held=labels.held + holds + np.where(labels.saved, shares, 0.0),
            cost=labels.cost + costs,
            host=labels.host + needs,
            level=np.maximum(labels.level + extra[:, None], backward),
            saved=np.broadcast_to(saves, backward.shape),
        )
        may: BoolArray = (
            (labels.held <= limits.before[event][:, None])
            & (grown.held <= limits.behind[event][:, None])
            & (grown.host <= self._host_limit[event])
            & (grown.level <= self._budget_bytes)
        )
        return grown, may

    def _hopeful(self, grown: _Labels, may: BoolArray, event: int) -> IntArray:
        """Positions of the walks that are carried on."""
        (stay,) = may.ravel().nonzero()
        walks, price = grown.picked(stay), self._needs.price
        rest = np.interp(walks.held, *self._rests[event + 1])
        paid = price * (walks.host - self._needs.budget_bytes)
        hope = walks.cost + paid + rest
        is_hopeful = hope < self._known_cost
        stay, hope = stay[is_hopeful], hope[is_hopeful]
        for most, compare in ((_COMPARED * self._width, True), (self._width, False)):
            if len(stay) > most:
                order = hope.argpartition(most)
                self._left_out = min(self._left_out, float(hope[order[most]]))
                stay, hope = stay[order[:most]], hope[order[:most]]
            if compare:
                left = _unbeaten(grown.picked(stay))
                stay, hope = stay[left], hope[left]
        return stay


def _unbeaten(walks: _Labels) -> IntArray:
    """Positions of the walks that no other beats in all that it remembers."""
    numbers = (walks.saved, walks.level, walks.host, walks.cost, walks.held)
    order: IntArray = np.lexsort(numbers)
    _, cost, host, level, saved = walks.picked(order)
    # Who comes before holds no more; of equals the first stays.
    beats = (cost[:, None] <= cost) & (host[:, None] <= host)
    beats &= (level[:, None] <= level) & (saved[:, None] <= saved)
    return order[~np.triu(beats, 1).any(axis=0)]
