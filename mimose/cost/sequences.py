"""Sequences of events that differ from step to step, in one that holds them all.

Note: [Optional events]
Layers may be dropped at random, and a tower may run once for each image of a batch. So
what a context knows is the superset of all sequences measured, in their order; a step
runs some of it. Which, is told by how often each unit was called: calls are numbered,
and a unit called less often leaves out its last calls. Where that is not true of a
sequence, or there is no order that holds it and the others, it stands alone, and what
was measured before is measured anew.

How often a unit is called may follow from the batch's sizes (images, chunks); then a
plan is made for so many calls. Where it does not, the most calls ever seen are planned
for: who leaves some out holds less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from mimose.predictors import SizeMap
from mimose.types import Sizes

Calls: TypeAlias = tuple[int, ...]
"""By unit, how often it is called; calls without a gradient included."""
_SETTLED_ROWS = 4
_SETTLED_COUNTS = 3
"""So many measured steps, and so many numbers of calls among them, tell a rule that is
more than a column of the sizes."""


class Event(NamedTuple):
    """One call of a unit in a forward."""

    name: str
    """``name#call``."""
    unit: int
    call: int
    family: str
    part: int = 0
    """Which forward of its window."""

    @property
    def place(self) -> tuple[int, int]:
        """What tells it from the others of its context."""
        return self.unit, self.call


def merged(known: Sequence[Event], ran: Sequence[Event]) -> tuple[Event, ...] | None:
    """Return the sequence that holds two, each in its order; None if there is none.

    Args:
        known: One that holds all measured before.
        ran: Another one.
    """
    families = {event.place: event.family for event in known}
    if any(families.get(e.place, e.family) != e.family for e in ran):
        return None
    found: list[Event] = []
    left, right = list(reversed(known)), list(reversed(ran))
    of_known, of_ran = ({e.place for e in events} for events in (known, ran))
    while left and right:
        if left[-1].place == right[-1].place:
            found.append(left.pop())
            right.pop()
        elif right[-1].place not in of_known:
            # Between two that both have, calls go by turns, and units in their order.
            is_free = left[-1].place not in of_ran
            comes_first = is_free and _turn(left[-1]) < _turn(right[-1])
            found.append((left if comes_first else right).pop())
        elif left[-1].place not in of_ran:
            found.append(left.pop())
        else:
            return None
    return (*found, *reversed(left), *reversed(right))


def _turn(event: Event) -> tuple[int, int]:
    return event.call, event.unit


def ran_of(events: Iterable[Event], calls: Calls) -> tuple[Event, ...]:
    """Return the events of a step whose units were called so often.

    Args:
        events: Of all steps.
        calls: Of the step.
    """
    return tuple(event for event in events if event.call < calls[event.unit])


class CallCounts:
    """How often units are called at given sizes, at the most.

    Args:
        roots: The batch's sizes in each measured step.
        calls: The numbers of calls in each.
    """

    def __init__(self, roots: Sequence[Sizes], calls: Sequence[Calls]) -> None:
        self.most: Calls = tuple(map(max, *calls)) if len(calls) > 1 else calls[0]
        self._rules: dict[int, SizeMap] = {}
        self.vary = False
        """Whether the sizes do not tell how often some unit is called."""
        found: dict[tuple[int, ...], SizeMap | None] = {}
        for unit, counts in enumerate(zip(*calls, strict=True)):
            if counts not in found:
                found[counts] = _rule(roots, counts)
            rule = found[counts]
            if rule is not None:
                self._rules[unit] = rule
            elif len(set(counts)) > 1:
                self.vary = True

    def __call__(self, root: Sizes) -> Calls:
        """Return what is planned for.

        Args:
            root: The batch's sizes.
        """
        if not self._rules:
            return self.most
        calls = list(self.most)
        for unit, rule in self._rules.items():
            calls[unit] = max(0, int(rule.predict_one(root)))
        return tuple(calls)

    def exceed(self, root: Sizes, calls: Calls) -> bool:
        """Tell whether a rule says that a unit is called more often.

        Args:
            root: The batch's sizes.
            calls: By unit.
        """
        return any(rule.predict_one(root) > calls[u] for u, rule in self._rules.items())

    def __eq__(self, other: object) -> bool:
        """Whether both plan for the same, at all sizes."""
        if not isinstance(other, CallCounts):
            return NotImplemented
        mine, theirs = ((c.most, c.vary, c._told()) for c in (self, other))
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]

    def _told(self) -> dict[int, object]:
        return {unit: rule.rule_ for unit, rule in self._rules.items()}


def _rule(roots: Sequence[Sizes], counts: tuple[int, ...]) -> SizeMap | None:
    """Return how often a unit is called by the sizes, if they tell; else None."""
    distinct = set(counts)
    if len(distinct) == 1:
        return None
    is_settled = len(distinct) >= _SETTLED_COUNTS and len(counts) >= _SETTLED_ROWS
    columns = zip(*roots, strict=True)
    if not is_settled and counts not in columns:
        return None
    rule = SizeMap().fit(roots, counts)
    return rule if rule.found_ else None
