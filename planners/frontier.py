"""The cheapest walk over the events, by the frontier of bytes held and cost.

In prefix form (see Note: [Prefix form] in ``prefix.py``) a plan is a walk over the
events, and of two walks that have come equally far the one that holds no more and
costs no more is at least as good. So it is enough to carry the frontier: the walks
that are the cheapest for what they hold (``dominance.py``).

Where it grows, walks are left out that cannot end cheaper than one that is known
already (``bounds.py``). Where more are left than a given width, those stay that may end
cheapest. If none was left out for want of room that might end cheaper than the walk
found, that is the cheapest of all.

Where nets depend on the action, a walk also remembers its level, the highest that the
backwards of its events will reach if those of later events leave the least they can.
As long as it is low enough for the most that they can leave, it does not matter. Only
the others, which come late in a step, are compared by all three numbers. And where the
next event may share what the last one has saved, a walk remembers whether it has.
"""

import math
from dataclasses import dataclass

import numpy as np

from .base import FloatArray, IntArray
from .bounds import Bounds
from .dominance import Walks, beaten, undominated
from .limits import limits_of
from .prefix import PrefixForm
from .steps import join, trace

# So few walks are carried on without looking at their bounds, which takes time as well.
_FEW = 96


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Walk:
    """The cheapest walk that was found."""

    choice: IntArray
    """(E,) index of each event's action."""

    exact: bool
    """Whether nothing was left out, so that it is the cheapest of all."""

    gap: float = 0.0
    """By what part of its cost another may be cheaper, at the most."""


def cheapest_walk(
    form: PrefixForm,
    cost: FloatArray,
    headroom: FloatArray,
    budget_bytes: float,
    width: int,
) -> Walk | None:
    """Find the cheapest choice of actions within the budget.

    Args:
        form: The step, in prefix form.
        cost: (E, K) what the action costs, in any unit.
        headroom: (2, E + 1) the most that may be held before each event, and at the
            end: where the event before has not saved its output, and where it has.
        budget_bytes: The highest level allowed; finite.
        width: Most walks that are carried on at any event.

    Returns:
        The cheapest walk found. None where none was: no walk keeps the budget, or,
        with nets that depend on the action, none of those that were carried on.
    """
    return _Search(form, cost, headroom, budget_bytes, width).run()


class _Search:
    """One search: its arguments are those of `cheapest_walk`."""

    def __init__(
        self,
        form: PrefixForm,
        cost: FloatArray,
        headroom: FloatArray,
        budget_bytes: float,
        width: int,
    ) -> None:
        self._form, self._cost, self._headroom = form, cost, headroom
        self._budget_bytes, self._width = budget_bytes, width
        self._limits = limits_of(form, headroom, budget_bytes)
        self._steps = join(form, cost, self._limits, budget_bytes)
        shared = form.shared_bytes.max(axis=1, initial=0.0) if form.has_pairs else None
        self._shared_by_next = None if shared is None else [*shared[1:].tolist(), 0.0]
        self._bounds: Bounds | None = None
        self._left_out = math.inf
        """The lowest bound of the walks that were left out for want of room."""

    def run(self) -> Walk | None:
        """Walk the events once."""
        steps, form = self._steps, self._form
        is_scarce = form.level_is_scarce(self._budget_bytes)
        level = np.full(1, form.step_bytes) if is_scarce else None
        walks = Walks(np.zeros(1), np.zeros(1), level)
        trail: list[tuple[IntArray, int]] = []
        low_until, low_level = steps.low_until.tolist(), steps.low_level.tolist()
        for t in range(len(steps.held)):
            n_before = len(walks.held)
            grown = self._grow(walks, t, low_until[t])
            stay = undominated(grown, low_level[t], self._shared_behind(t))
            if len(stay) > min(_FEW, self._width):
                stay = self._narrow(grown, stay, t, low_level[t])
            trail.append((stay, n_before))
            if not len(stay):
                return self._known()
            walks = grown.picked(stay)
            if walks.level is not None and walks.level.max() <= low_level[t]:
                walks = walks._replace(level=None)
        best = int(walks.cost.argmin())
        if self._bounds and walks.cost[best] >= self._bounds.known_cost:
            return self._known()
        choice = trace(trail, best, steps, self._cost.shape)
        return self._found(choice, float(walks.cost[best]))

    def _shared_behind(self, t: int) -> float:
        """Return the bytes that the next event may let go, if this one lets it."""
        return self._shared_by_next[t] if self._shared_by_next else 0.0

    def _known(self) -> Walk | None:
        """Return the walk that was known, if one was: none is cheaper."""
        if self._bounds is None or self._bounds.known is None:
            return None
        return self._found(self._bounds.known, self._bounds.known_cost)

    def _found(self, choice: IntArray, cost: float) -> Walk:
        spare = max(0.0, cost - self._left_out)
        return Walk(choice=choice, exact=not spare, gap=spare / abs(cost or 1.0))

    def _grow(self, walks: Walks, t: int, low_until: float) -> Walks:
        """Walk one more step, by each combination; what cannot be costs infinitely."""
        steps, form = self._steps, self._form
        held = walks.held + steps.held[t]
        cost = walks.cost + steps.cost[t]
        cost[walks.held > steps.limit[t]] = np.inf
        saved = None
        if form.has_pairs:
            if walks.saved is not None:
                held += np.where(walks.saved, form.shared_bytes[t][:, None], 0.0)
            cost[held > self._limits.behind[t][:, None]] = np.inf
            if self._shared_behind(t):
                saves = form.saves_output[t][:, None]
                saved = np.broadcast_to(saves, held.shape).ravel()
        if walks.level is None and walks.held[-1] <= low_until:
            return Walks(held.ravel(), cost.ravel(), None, saved)
        level = walks.held + steps.backward[t]
        if walks.level is not None:
            level = np.maximum(level, walks.level + steps.extra[t])
        cost[level > self._budget_bytes] = np.inf
        return Walks(held.ravel(), cost.ravel(), level.ravel(), saved)

    def _narrow(
        self, grown: Walks, stay: IntArray, t: int, low_level: float
    ) -> IntArray:
        """Leave out what cannot end cheaper than the known walk, then what is many."""
        if self._bounds is None:
            self._bounds = Bounds(
                self._form, self._cost, self._headroom, self._limits, self._budget_bytes
            )
        n_behind = min((t + 1) * self._steps.n_events, len(self._cost))
        hope = self._bounds.least_costs(n_behind, grown.held[stay], grown.cost[stay])
        hopeful = hope < self._bounds.known_cost
        stay = self._most_hopeful(stay[hopeful], hope[hopeful])
        if grown.level is not None:
            stay = stay[~beaten(grown.picked(stay), low_level)]
        return stay

    def _most_hopeful(self, stay: IntArray, hope: FloatArray) -> IntArray:
        """Take the lowest hopes, where there are too many, in the order they are in.

        The first walk always stays: it holds least.
        """
        if len(stay) <= self._width:
            return stay
        hope[0] = -np.inf
        order = hope.argpartition(self._width)
        self._left_out = min(self._left_out, float(hope[order[self._width]]))
        chosen: IntArray = stay[np.sort(order[: self._width])]
        return chosen
