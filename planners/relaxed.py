"""What the rest of a walk costs at least: the bound by which walks are left out.

Were events divisible, the rest of a walk (see ``frontier.py``) would free its bytes
where a byte is cheapest, wherever that is. That is a convex function of the bytes held
so far, and no more than any real rest costs.
"""

import math
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from .base import FloatArray
from .prefix import PrefixForm


class Rest(NamedTuple):
    """Least cost of the rest of a walk, a convex function of the bytes held so far.

    It is flat up to the first corner, then goes up from one to the next, the cheapest
    piece first.
    """

    corner_bytes: list[float]
    corner_costs: list[float]

    def at(self, held_bytes: float) -> float:
        """Read the function in one place; `np.interp` reads it in many."""
        after = bisect(self.corner_bytes, held_bytes)
        if after == 0:
            return self.corner_costs[0]
        if after == len(self.corner_bytes):
            return self.corner_costs[-1]
        left, right = self.corner_bytes[after - 1 : after + 1]
        low, high = self.corner_costs[after - 1 : after + 1]
        return low + (high - low) * (held_bytes - left) / (right - left)


def relaxed_rests(
    form: PrefixForm, cost: FloatArray, headroom: FloatArray
) -> list[Rest]:
    """What the rest of a walk costs at least, were events divisible.

    Events hold what they do at the least, whatever the one before has saved.
    Goes backwards: one more event moves the function to the left by what the event
    holds when it costs least, puts the event's own pieces in their places, and cuts
    off what exceeds the headroom.

    Args:
        form: The step, in prefix form.
        cost: (E, K) what the action costs.
        headroom: (E + 1,) the most that may be held before each event, and at the end.

    Returns:
        (E + 1,) functions, by the number of events behind.
    """
    flat_until, flat_cost, length = float(headroom[-1]), 0.0, 0.0
    prices: list[float] = []
    lengths: list[float] = []
    rests = [_rest(flat_until, flat_cost, prices, lengths)]
    rows = zip(_hulls(form, cost), headroom[:-1].tolist(), strict=True)
    for hull, end in reversed(list(rows)):
        flat_cost += hull.cost
        flat_until -= hull.held_bytes
        for price, spared in hull.pieces:
            at = bisect(prices, price)
            if at and prices[at - 1] == price:
                lengths[at - 1] += spared
            else:
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
        rests.append(_rest(flat_until, flat_cost, prices, lengths))
    return rests[::-1]


def _rest(
    flat_until: float,
    flat_cost: float,
    prices: Sequence[float],
    lengths: Sequence[float],
) -> Rest:
    costs = [price * length for price, length in zip(prices, lengths, strict=True)]
    return Rest(
        corner_bytes=list(accumulate(lengths, initial=flat_until)),
        corner_costs=list(accumulate(costs, initial=flat_cost)),
    )


class _Hull(NamedTuple):
    """An event's actions that no mixture of others beats."""

    cost: float
    """Of the cheapest."""
    held_bytes: float
    """By the cheapest."""
    pieces: list[tuple[float, float]]
    """From each to the next: cost of a byte, ascending, and bytes."""


def _hulls(form: PrefixForm, cost: FloatArray) -> list[_Hull]:
    """Return (E,) hulls; equal events share one."""
    known: dict[tuple[tuple[float, ...], ...], _Hull] = {}
    hulls = []
    is_allowed = (form.need_bytes < math.inf).tolist()
    rows = zip(cost.tolist(), form.held_bytes.tolist(), is_allowed, strict=True)
    for costs, holds, allowed in rows:
        key = tuple(costs), tuple(holds), tuple(allowed)
        if key not in known:
            known[key] = _hull(costs, holds, allowed)
        hulls.append(known[key])
    return hulls


def _hull(costs: list[float], holds: list[float], allowed: list[bool]) -> _Hull:
    """Find the actions that no mixture of others beats, the cheapest first."""
    points = [
        (cost, hold)
        for cost, hold, may in zip(costs, holds, allowed, strict=True)
        if may
    ]
    hull: list[tuple[float, float]] = []
    for cost, hold in sorted(points):
        if hull and hold >= hull[-1][1]:
            continue
        while len(hull) > 1:
            (cost_0, hold_0), (cost_1, hold_1) = hull[-2:]
            if (cost - cost_1) * (hold_0 - hold_1) > (cost_1 - cost_0) * (
                hold_1 - hold
            ):
                break
            hull.pop()
        hull.append((cost, hold))
    pieces = [
        ((more - less) / (more_held - less_held), more_held - less_held)
        for (less, more_held), (more, less_held) in pairwise(hull)
    ]
    return _Hull(cost=hull[0][0], held_bytes=hull[0][1], pieces=pieces)
