"""The cheapest walk over the events, by the frontier of bytes held and cost.

This is for problems whose nets do not depend on the action; ``labels.py`` has the
others, and ``walks.py`` finds out which a problem is.

In prefix form (see Note: [Prefix form] in ``prefix.py``) a plan is a walk over the
events, and of two walks that have come equally far the one that holds no more and
costs no more is at least as good. So it is enough to carry the frontier: the walks
that are the cheapest for what they hold. Where it grows beyond a given width, those
walks stay whose cost so far, plus what the rest would cost were events divisible, is
lowest. That sum is a lower bound on the final cost, so if no walk was left out whose
sum is below the cost found, the walk found is the cheapest of all.
"""

import math
from bisect import bisect
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .base import FloatArray, IntArray
from .prefix import PrefixForm

# Up to this many combinations of actions, neighbouring events are walked in one step.
_STEP_CHOICES = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Walk:
    """The cheapest walk that was found."""

    choice: IntArray
    """(E,) index of each event's action."""

    exact: bool
    """Whether nothing was left out, so that it is the cheapest of all."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Steps:
    """Runs of neighbouring events, each with every combination of their actions."""

    held: FloatArray
    """(T, Q, 1) bytes that the combination holds."""

    cost: FloatArray
    """(T, Q, 1) what it costs."""

    limit: FloatArray
    """(T, Q, 1) the most that may be held before it; -inf where it is not allowed."""

    n_events: int
    """Events in one step; the last step may be filled up with empty ones."""


class Rest(NamedTuple):
    """Least cost of the rest of a walk, a convex function of the bytes held so far.

    It is flat up to some point, then goes up piece by piece, the cheapest first.
    """

    flat_until: float
    flat_cost: float
    prices: list[float]
    """Cost of a byte in each piece, ascending."""
    lengths: list[float]
    """Bytes of each piece."""

    def at(self, walked_bytes: FloatArray) -> FloatArray:
        """Read the function, (n,) bytes to (n,) cost."""
        lengths = np.array([0.0, *self.lengths])
        corners_bytes = self.flat_until + lengths.cumsum()
        corners_cost = self.flat_cost + (lengths * [0.0, *self.prices]).cumsum()
        return np.interp(walked_bytes, corners_bytes, corners_cost)


def cheapest_walk(
    form: PrefixForm,
    cost: FloatArray,
    room: FloatArray,
    budget_bytes: float,
    width: int,
) -> Walk | None:
    """Find the cheapest choice of actions within the budget.

    Args:
        form: The step, in prefix form.
        cost: (E, K) what the action costs, in any unit.
        room: (E + 1,) the most that may be held before each event, and at the end.
        budget_bytes: The highest level allowed; finite.
        width: Most walks that are carried on at any event.

    Returns:
        The cheapest walk found, or None where none was.
    """
    held = form.held_bytes
    limit = np.minimum(budget_bytes - form.need_bytes, room[1:, None] - held)
    steps = _steps(held, cost, limit)
    rests: list[Rest] = []
    left_out = np.inf

    walked_bytes, walked_cost = np.zeros(1), np.zeros(1)
    trail: list[tuple[IntArray, int]] = []
    for t in range(len(steps.held)):
        new_bytes = (walked_bytes + steps.held[t]).ravel()
        new_cost = walked_cost + steps.cost[t]
        new_cost[walked_bytes > steps.limit[t]] = np.inf
        new_cost = new_cost.ravel()
        stay = _undominated(new_bytes, new_cost)
        if len(stay) > width:
            rests = rests or relaxed_rests(form, cost, room)
            rest = rests[min((t + 1) * steps.n_events, len(held))]
            hope = new_cost[stay] + rest.at(new_bytes[stay])
            chosen, best_left_out = most_hopeful(hope, width // 2)
            left_out = min(left_out, best_left_out)
            stay = stay[chosen]
        trail.append((stay, len(walked_bytes)))
        walked_bytes, walked_cost = new_bytes[stay], new_cost[stay]
    if not len(walked_bytes):
        return None
    proved = bool(walked_cost[-1] <= left_out)
    return Walk(choice=_trace(trail, steps, held.shape), exact=proved)


def _undominated(held: FloatArray, cost: FloatArray) -> IntArray:
    """Positions of the walks for which no other holds and costs no more, by bytes."""
    order = held.argsort(kind="stable")
    ordered = cost[order]
    cheapest_before = np.empty(len(order) + 1)
    cheapest_before[0] = np.inf
    np.minimum.accumulate(ordered, out=cheapest_before[1:])
    undominated: IntArray = order[ordered < cheapest_before[:-1]]
    return undominated


def most_hopeful(hope: FloatArray, n_chosen: int) -> tuple[IntArray, float]:
    """Positions of the lowest hopes, in order, and the lowest hope left out.

    The first walk always stays: it holds least, so it can be finished.

    Args:
        hope: (n,) what each walk will cost at least; the first is overwritten.
        n_chosen: How many stay.
    """
    hope[0] = -np.inf
    order = hope.argpartition(n_chosen)
    chosen = order[:n_chosen]
    chosen.sort()
    return chosen, float(hope[order[n_chosen]])


def relaxed_rests(form: PrefixForm, cost: FloatArray, room: FloatArray) -> list[Rest]:
    """What the rest of a walk costs at least, were events divisible.

    Goes backwards: one more event moves the function to the left by what the event
    holds when it costs least, puts the event's own pieces in their places, and cuts
    off what exceeds the room.

    Args:
        form: The step, in prefix form.
        cost: (E, K) what the action costs.
        room: (E + 1,) the most that may be held before each event, and at the end.

    Returns:
        (E + 1,) functions, by the number of events behind.
    """
    payable = np.where(np.isfinite(form.need_bytes), cost, np.inf)
    held = form.held_bytes.tolist()
    tables = zip(payable.tolist(), held, room[:-1].tolist(), strict=True)
    flat_until, flat_cost, length = float(room[-1]), 0.0, 0.0
    prices: list[float] = []
    lengths: list[float] = []
    rests = [Rest(flat_until, flat_cost, [], [])]
    for costs, holds, end in reversed(list(tables)):
        hull = _hull(costs, holds)
        flat_cost += hull[0][0]
        flat_until -= hull[0][1]
        for (less, more_held), (more, less_held) in pairwise(hull):
            spared = more_held - less_held
            price = (more - less) / spared
            at = bisect(prices, price)
            prices.insert(at, price)
            lengths.insert(at, spared)
            length += spared
        while lengths and flat_until + length > end:
            length -= lengths.pop()
            price = prices.pop()
            kept = end - flat_until - length
            if kept > 0:
                prices.append(price)
                lengths.append(kept)
                length += kept
                break
        flat_until = min(flat_until, end)
        rests.append(Rest(flat_until, flat_cost, prices.copy(), lengths.copy()))
    return rests[::-1]


def _hull(costs: list[float], holds: list[float]) -> list[tuple[float, float]]:
    """The (cost, bytes) that no mixture of others beats, the cheapest first."""
    hull: list[tuple[float, float]] = []
    for cost, hold in sorted(zip(costs, holds, strict=True)):
        if hull and (hold >= hull[-1][1] or cost == math.inf):
            continue
        while len(hull) > 1:
            (cost_0, hold_0), (cost_1, hold_1) = hull[-2:]
            if (cost - cost_1) * (hold_0 - hold_1) > (cost_1 - cost_0) * (
                hold_1 - hold
            ):
                break
            hull.pop()
        hull.append((cost, hold))
    return hull


def _steps(held: FloatArray, cost: FloatArray, limit: FloatArray) -> _Steps:
    """Join neighbouring events, so that fewer and longer arrays are handled."""
    n_events, n_actions = held.shape
    together = 1
    while n_actions > 1 and n_actions ** (together + 1) <= _STEP_CHOICES:
        together += 1
    n_steps = -(-n_events // together)
    filled = np.zeros((3, n_steps * together, n_actions))
    filled[:, :n_events] = held, cost, limit
    filled[2, n_events:] = np.inf
    events = filled.reshape(3, n_steps, together, n_actions)

    joined = events[:, :, 0]
    for i in range(1, together):
        following = events[:, :, i, None]
        before = joined[..., None]
        lowest = np.minimum(before[2], following[2] - before[0])
        sums = before[:2] + following[:2]
        joined = np.concatenate([sums, lowest[None]]).reshape(3, n_steps, -1)
    step_held, step_cost, step_limit = joined[..., None]
    return _Steps(held=step_held, cost=step_cost, limit=step_limit, n_events=together)


def _trace(
    trail: list[tuple[IntArray, int]], steps: _Steps, shape: tuple[int, ...]
) -> IntArray:
    """Read the actions of the cheapest walk, the last of the final frontier."""
    n_events, n_actions = shape
    combinations = np.zeros(len(trail), dtype=np.intp)
    at = -1
    for t in range(len(trail) - 1, -1, -1):
        came, n_walks = trail[t]
        combinations[t], at = divmod(int(came[at]), n_walks)
    powers = n_actions ** np.arange(steps.n_events - 1, -1, -1)
    digits: IntArray = combinations[:, None] // powers % n_actions
    return digits.ravel()[:n_events].astype(np.intp)
