"""The cheapest walk over the events, by the frontier of bytes held and cost.

In prefix form (see Note: [Prefix form] in ``prefix.py``) a plan is a walk over the
events, and of two walks that have come equally far the one that holds no more and
costs no more is at least as good. So it is enough to carry the frontier: the walks
that are the cheapest for what they hold.

Where it grows, walks are left out that cannot end cheaper than one that is known
already (``bounds.py``). Where more are left than a given width, those stay that may end
cheapest. If none was left out for want of room that might end cheaper than the walk
found, that is the cheapest of all.

Where nets depend on the action, a walk also remembers its level, the highest that the
backwards of its events will reach if those of later events leave the least they can.
As long as it is low enough for the most that they can leave, it does not matter. Only
the others, which come late in a step, are compared by all three numbers.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .base import BoolArray, FloatArray, IntArray
from .bounds import Bounds
from .pauses import give_way
from .prefix import PrefixForm

# Up to this many combinations of actions, neighbouring events are walked in one step.
_STEP_CHOICES = 8
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Steps:
    """Runs of neighbouring events, each with every combination of their actions."""

    held: FloatArray
    """(T, Q, 1) bytes that the combination holds."""

    cost: FloatArray
    """(T, Q, 1) what it costs."""

    limit: FloatArray
    """(T, Q, 1) the most that may be held before it; -inf where it is not allowed."""

    extra: FloatArray
    """(T, Q, 1) what its nets have beyond the least."""

    backward: FloatArray
    """(T, Q, 1) highest level of its backwards, less what is held before it."""

    low_until: FloatArray
    """(T,) the most that may be held before it so that no level of its own matters."""

    low_level: FloatArray
    """(T,) a level behind it that does not matter: there is room for the most that
    later events can leave."""

    n_events: int
    """Events in one step; the last step may be filled up with empty ones."""


class _Walks(NamedTuple):
    """(n,) walks that have come equally far, those that hold least first."""

    held: FloatArray
    cost: FloatArray
    level: FloatArray | None
    """None where none of them matters."""

    def picked(self, at: IntArray) -> "_Walks":
        """Read some of them."""
        level = None if self.level is None else self.level[at]
        return _Walks(self.held[at], self.cost[at], level)


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
        headroom: (E + 1,) the most that may be held before each event, and at the end.
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
        self._limit = np.minimum(
            budget_bytes - form.need_bytes, headroom[1:, None] - form.held_bytes
        )
        self._steps = _steps(form, cost, self._limit, budget_bytes)
        self._bounds: Bounds | None = None
        self._left_out = math.inf
        """The lowest bound of the walks that were left out for want of room."""

    def run(self) -> Walk | None:
        """Walk the events once."""
        steps, form = self._steps, self._form
        is_scarce = form.level_is_scarce(self._budget_bytes)
        level = np.full(1, form.step_bytes) if is_scarce else None
        walks = _Walks(np.zeros(1), np.zeros(1), level)
        trail: list[tuple[IntArray, int]] = []
        low_until, low_level = steps.low_until.tolist(), steps.low_level.tolist()
        for t in range(len(steps.held)):
            give_way()
            n_before = len(walks.held)
            grown = self._grow(walks, t, low_until[t])
            give_way()
            stay = _undominated(grown, low_level[t])
            if len(stay) > min(_FEW, self._width):
                give_way()
                stay = self._narrow(grown, stay, t, low_level[t])
                give_way()
            trail.append((stay, n_before))
            if not len(stay):
                return self._known()
            walks = grown.picked(stay)
            if walks.level is not None and walks.level.max() <= low_level[t]:
                walks = walks._replace(level=None)
        give_way()
        best = int(walks.cost.argmin())
        if self._bounds and walks.cost[best] >= self._bounds.known_cost:
            return self._known()
        choice = _trace(trail, best, steps, self._cost.shape)
        return self._found(choice, float(walks.cost[best]))

    def _known(self) -> Walk | None:
        """Return the walk that was known, if one was: none is cheaper."""
        if self._bounds is None or self._bounds.known is None:
            return None
        return self._found(self._bounds.known, self._bounds.known_cost)

    def _found(self, choice: IntArray, cost: float) -> Walk:
        spare = max(0.0, cost - self._left_out)
        return Walk(choice=choice, exact=not spare, gap=spare / abs(cost or 1.0))

    def _grow(self, walks: _Walks, t: int, low_until: float) -> _Walks:
        """Walk one more step, by each combination; what cannot be costs infinitely."""
        steps = self._steps
        held = (walks.held + steps.held[t]).ravel()
        cost = walks.cost + steps.cost[t]
        cost[walks.held > steps.limit[t]] = np.inf
        if walks.level is None and walks.held[-1] <= low_until:
            return _Walks(held, cost.ravel(), None)
        level = walks.held + steps.backward[t]
        if walks.level is not None:
            level = np.maximum(level, walks.level + steps.extra[t])
        cost[level > self._budget_bytes] = np.inf
        return _Walks(held, cost.ravel(), level.ravel())

    def _narrow(
        self, grown: _Walks, stay: IntArray, t: int, low_level: float
    ) -> IntArray:
        """Leave out what cannot end cheaper than the known walk, then what is many."""
        if self._bounds is None:
            self._bounds = Bounds(
                self._form, self._cost, self._headroom, self._limit, self._budget_bytes
            )
        n_behind = min((t + 1) * self._steps.n_events, len(self._cost))
        hope = self._bounds.least_costs(n_behind, grown.held[stay], grown.cost[stay])
        give_way()
        hopeful = hope < self._bounds.known_cost
        stay = self._most_hopeful(stay[hopeful], hope[hopeful])
        give_way()
        if grown.level is not None:
            stay = stay[~_beaten(grown.picked(stay), low_level)]
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


def _undominated(walks: _Walks, low_level: float) -> IntArray:
    """Positions of the walks for which no other holds and costs no more, by bytes.

    A walk whose level matters is no match for another.
    """
    cost = walks.cost
    if walks.level is None:
        order = walks.held.argsort(kind="stable")
        give_way()
        ordered = matches = cost[order]
    else:
        order = np.lexsort((walks.level, cost, walks.held))
        give_way()
        ordered = cost[order]
        matches = np.where(walks.level[order] <= low_level, ordered, np.inf)
    cheapest_before = np.empty(len(order) + 1)
    cheapest_before[0] = np.inf
    np.minimum.accumulate(matches, out=cheapest_before[1:])
    undominated: IntArray = order[ordered < cheapest_before[:-1]]
    return undominated


def _beaten(walks: _Walks, low_level: float) -> BoolArray:
    """Tell of walks whose level matters whether one that holds no more beats them."""
    is_beaten = np.zeros(len(walks.held), dtype=np.bool_)
    assert walks.level is not None
    (high,) = (walks.level > low_level).nonzero()
    level, cost = walks.level[high], walks.cost[high]
    beats = (level[:, None] <= level) & (cost[:, None] <= cost)
    give_way()
    # Who comes before holds no more; of equals the first stays.
    is_beaten[high] = np.triu(beats, 1).any(axis=0)
    return is_beaten


def _steps(
    form: PrefixForm, cost: FloatArray, limit: FloatArray, budget_bytes: float
) -> _Steps:
    """Join neighbouring events, so that fewer and longer arrays are handled."""
    n_events, n_actions = cost.shape
    together = 1
    while n_actions > 1 and n_actions ** (together + 1) <= _STEP_CHOICES:
        together += 1
    n_steps = -(-n_events // together)
    filled = np.zeros((5, n_steps * together, n_actions))
    backward = np.where(limit > -np.inf, form.backward_bytes, -np.inf)
    filled[:, :n_events] = form.held_bytes, cost, limit, form.extra_bytes, backward
    filled[2, n_events:], filled[4, n_events:] = np.inf, -np.inf
    events = filled.reshape(5, n_steps, together, n_actions)

    joined = events[:, :, 0]
    for i in range(1, together):
        give_way()
        following = events[:, :, i, None]
        before = joined[..., None]
        held, more, extra = before[[0, 1, 3]] + following[[0, 1, 3]]
        lowest = np.minimum(before[2], following[2] - before[0])
        highest = np.maximum(before[4] + following[3], before[0] + following[4])
        joined = np.stack([held, more, lowest, extra, highest]).reshape(5, n_steps, -1)
    give_way()
    held, more, lowest, extra, backward = joined
    most = extra.max(axis=1, initial=0.0)
    low_level = budget_bytes - (most.sum() - most.cumsum())
    low_until = low_level[:, None] - backward
    low_until[low_until >= lowest] = np.inf
    return _Steps(
        held=held[..., None],
        cost=more[..., None],
        limit=lowest[..., None],
        extra=extra[..., None],
        backward=backward[..., None],
        low_until=low_until.min(axis=1, initial=np.inf),
        low_level=low_level,
        n_events=together,
    )


def _trace(
    trail: list[tuple[IntArray, int]], at: int, steps: _Steps, shape: tuple[int, ...]
) -> IntArray:
    """Read the actions of one of the last walks."""
    n_events, n_actions = shape
    combinations = np.zeros(len(trail), dtype=np.intp)
    for t in range(len(trail) - 1, -1, -1):
        came, n_walks = trail[t]
        combinations[t], at = divmod(int(came[at]), n_walks)
    give_way()
    powers = n_actions ** np.arange(steps.n_events - 1, -1, -1)
    digits: IntArray = combinations[:, None] // powers % n_actions
    return digits.ravel()[:n_events].astype(np.intp)
