"""Chooses which storages a layer drops: points between keeping all and dropping all.

If a storage is dropped, its bytes are free until the backward, and some operators run
again. Two storages may need the same operator, which runs once. So the best choice at
one price of a byte is a minimum cut (project selection). The best choices at all prices
are the corners of a convex curve of bytes and costs. Of these a layer gets a few.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

_MOST_CUTS = 32
"""Cuts for one layer. A transformer's layer has 8 to 15 corners."""

Name: TypeAlias = Hashable
Goods: TypeAlias = "Mapping[Name, tuple[float, frozenset[Name]]]"
"""By storage: the bytes that dropping it frees, and the operators that it needs."""


class Point(NamedTuple):
    """A choice of storages to drop."""

    n_bytes: float
    """The bytes that are freed."""
    cost: float
    """Of the operators that run again."""
    dropped: frozenset[Name]


def corners(goods: Goods, costs: Mapping[Name, float]) -> list[Point]:
    """Return the best choices at all prices of a byte, from nothing dropped to all.

    Args:
        goods: What may be dropped.
        costs: The costs of the operators.
    """

    def point(names: frozenset[Name]) -> Point:
        run = frozenset[Name]().union(*(goods[name][1] for name in names))
        freed = math.fsum(goods[name][0] for name in names)
        return Point(freed, math.fsum(costs[name] for name in run), names)

    found = [point(frozenset()), point(frozenset(goods))]
    between, n_cuts = deque([(found[0], found[1])]), 0
    while between and n_cuts < _MOST_CUTS:
        low, high = between.popleft()
        if high.n_bytes <= low.n_bytes:
            continue
        price = (high.cost - low.cost) / (high.n_bytes - low.n_bytes)
        middle, n_cuts = point(_cut(goods, costs, price)), n_cuts + 1
        gain = price * (middle.n_bytes - low.n_bytes) - (middle.cost - low.cost)
        if gain > 1e-6 * high.cost:
            found.append(middle)
            between += (low, middle), (middle, high)
    return sorted(found)


def few(found: Sequence[Point], n: int) -> tuple[Point, ...]:
    """Return some corners between the first and the last, which lose the least.

    Between two points a plan can mix them over layers: it is on the line between them.
    So what is lost is the area between the lines and the curve.

    Args:
        found: All corners.
        n: How many; the last one fills up where there are fewer.
    """
    inner = range(1, len(found) - 1)

    def lost(chosen: tuple[int, ...]) -> float:
        ends = [found[at] for at in (0, *chosen, len(found) - 1)]
        return sum(
            (high.n_bytes - low.n_bytes) * (high.cost + low.cost)
            for low, high in itertools.pairwise(ends)
        )

    chosen = min(itertools.combinations(inner, min(n, len(inner))), key=lost)
    picked = [found[at] for at in chosen]
    return (*picked, *[found[-1]] * (n - len(picked)))


def _cut(goods: Goods, costs: Mapping[Name, float], price: float) -> frozenset[Name]:
    """Return the storages to drop if each byte is worth a price.

    A maximum flow, along shortest paths: from each storage as much as its bytes are
    worth, through each operator as much as it costs. What still could get more pays.
    """
    left = {name: price * n_bytes for name, (n_bytes, _) in goods.items()}
    room = {name: costs[name] for _, needs in goods.values() for name in needs}
    sent: dict[Name, dict[Name, float]] = {name: {} for name in room}
    least = 1e-9 * sum(left.values())
    while True:
        came: dict[tuple[bool, Name], tuple[bool, Name] | None]
        came = {(True, name): None for name in goods if left[name] > least}
        queue, end = deque(came), None
        while queue and end is None:
            here = queue.popleft()
            is_good, name = here
            following = goods[name][1] if is_good else sent[name]
            if not is_good and room[name] > least:
                end = here
                break
            for other in following:
                there = not is_good, other
                if there not in came and (is_good or sent[name][other] > least):
                    came[there] = here
                    queue.append(there)
        if end is None:
            return frozenset(name for is_good, name in came if is_good)
        path = [end]
        while (before := came[path[-1]]) is not None:
            path.append(before)
        path.reverse()
        back = [(b[1], a[1]) for a, b in itertools.pairwise(path) if b[0]]
        amount = min(
            left[path[0][1]],
            room[end[1]],
            *(sent[name][good] for good, name in back),
        )
        left[path[0][1]] -= amount
        room[end[1]] -= amount
        for one, two in itertools.pairwise(path):
            if one[0]:
                sent[two[1]][one[1]] = sent[two[1]].get(one[1], 0.0) + amount
            else:
                sent[one[1]][two[1]] -= amount
