"""Which events of a sequence share their numbers, and between whom each one stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mimose.cost.sequences import Event
from mimose.cost.size_rules import SizeRule

NO_FAMILY = ""
TURN = "turn"
"""Marks the first event of a later forward."""
AdjacentFamilies: TypeAlias = tuple[str, ...]
"""The families before and after an event: the first takes the gradient it makes, and
the second made the gradient that it takes. Of the last event that is the head, and
what is held in between is another (a MiB in T5). Behind them, in a window of several
forwards, which of them it is, and whether the event is its `TURN`: gradients of a
weight are added up in the first backward that reaches it, and between two forwards
lie a head and a loss."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where in the series' values each event's numbers stand."""

    classes: list[tuple[int, AdjacentFamilies]]
    """(an event of the class, the families of its neighbours)."""
    of_event: NDArray[np.intp]
    gaps: list[tuple[str, ...]]
    """(family before, family after), and where: see `AdjacentFamilies`."""
    of_gap: NDArray[np.intp]


def lay_out_events(
    events: Sequence[Event], maps: Sequence[tuple[SizeRule, ...]]
) -> Layout:
    """Put events and gaps together that share all their numbers.

    Args:
        events: In their order.
        maps: For each, the rules of its own sizes; equal ones are one object.
    """
    families = [event.family for event in events]
    classes: dict[tuple[str, AdjacentFamilies, int], int] = {}
    members: list[tuple[int, AdjacentFamilies]] = []
    of_event = []
    around = neighbours_of(events)
    for index, (family, neighbours) in enumerate(zip(families, around, strict=True)):
        key = (family, neighbours, id(maps[index]))
        if key not in classes:
            classes[key] = len(members)
            members.append((index, neighbours))
        of_event.append(classes[key])
    pairs = gaps_of(events)
    gaps = list(dict.fromkeys(pairs))
    return Layout(
        members,
        np.array(of_event, dtype=np.intp),
        gaps,
        np.array([gaps.index(pair) for pair in pairs], dtype=np.intp),
    )


def neighbours_of(events: Sequence[Event]) -> list[AdjacentFamilies]:
    """Return, for each event, the families before and after it, and where it is."""
    around = [NO_FAMILY, *(event.family for event in events), NO_FAMILY]
    pairs = zip(around, around[2:], strict=False)
    return [(*pair, *where) for pair, where in zip(pairs, _places(events), strict=True)]


def gaps_of(events: Sequence[Event]) -> list[tuple[str, ...]]:
    """Return, for each event, the families around the gap before it, and where."""
    families = [event.family for event in events]
    pairs = zip([NO_FAMILY, *families], families, strict=False)
    return [(*pair, *where) for pair, where in zip(pairs, _places(events), strict=True)]


def _places(events: Sequence[Event]) -> list[tuple[str, ...]]:
    """Return, for each event, which forward of a window it is in; () in others."""
    last = events[-1].part if events else 0
    if not last:
        return [()] * len(events)
    places: list[tuple[str, ...]] = []
    before = 0
    for event in events:
        where = f"{event.part + 1}/{last + 1}"
        places.append((where, TURN) if event.part > before else (where,))
        before = event.part
    return places
