"""Which events run in a context, and how their own sizes follow from the batch's."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mimose.pauses import give_way
from mimose.predictors import SizeMap
from mimose.types import Sizes

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

_MOST_ROWS = 64
"""Measured steps whose sizes are remembered."""
_ENOUGH_ROWS = 16
"""So many, and steps that the rules foretell are not remembered any more."""
_MOST_FAILURES = 8
"""Fits that found no rule; then the next waits until there is half as much again."""


class Event(NamedTuple):
    """One call of a unit in a forward."""

    name: str
    """``name#call``."""
    unit: int
    call: int
    family: str
    part: int = 0
    """Which forward of its window."""


class Row(NamedTuple):
    """The sizes of one measured step."""

    root: Sizes
    own: tuple[Sizes, ...]
    """Every event's."""


@dataclass(frozen=True, slots=True)
class _Tries:
    """How fits of the rules went, up to the last."""

    n_fitted: int = 0
    """Rows taken in before it."""
    n_failed: int = 0
    """How many in a row found no rule."""


@dataclass(frozen=True, slots=True)
class _Rules:
    """The rules that rows follow, fitted once."""

    maps: list[tuple[SizeRule, ...]]
    """For each event, the rule of each of its own sizes."""
    tries: _Tries
    layout: Layout


@dataclass(frozen=True)
class Pattern:
    """The events of one context, in the order in which they ran; immutable.

    Rules are fitted by the first reader and remembered, as in
    Note: [Fits are made when asked for].
    """

    events: tuple[Event, ...]
    rows: tuple[Row, ...] = ()
    """Of the steps measured, a bounded number."""
    sides: tuple[tuple[int, ...], ...] = ()
    """The readers of each `SideTensor`."""
    is_ordered: bool = True
    copies_end: str = ""
    """Where autocast's copies of weights go: see `mimose.learn.copies`."""
    high: Sizes = ()
    """The largest of each root size measured."""
    calls: tuple[int, ...] = ()
    """How often each unit is called, calls without a gradient included."""
    between: tuple[tuple[int, ...], ...] = ()
    """How often it was called so far where each forward but the last has ended."""
    structure: str = ""
    """Names what the root is called with; contexts may share it."""
    n_rows: int = 0
    """Rows taken in, those dropped since included."""
    _tries: _Tries = field(default=_Tries(), repr=False)
    _kept_rules: _Rules | None = field(default=None, repr=False, compare=False)
    """Rules that rows taken in since do not change."""

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured, ready for JSON; rules and layout follow from it."""
        return {
            "events": self.events,
            "rows": self.rows,
            "sides": self.sides,
            "is_ordered": self.is_ordered,
            "copies_end": self.copies_end,
            "high": self.high,
            "calls": self.calls,
            "between": self.between,
            "structure": self.structure,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Pattern:
        """Make the pattern that ``state_dict`` told of.

        Args:
            state: What it returned.
        """
        return cls(
            events=tuple(Event(*each) for each in state["events"]),
            rows=tuple(Row(*as_tuples(row)) for row in state["rows"]),
            sides=as_tuples(state["sides"]),
            is_ordered=bool(state["is_ordered"]),
            copies_end=str(state["copies_end"]),
            high=as_tuples(state["high"]),
            calls=as_tuples(state["calls"]),
            between=as_tuples(state.get("between", ())),
            structure=str(state["structure"]),
            n_rows=len(state["rows"]),
        )

    def taken_in(self, root: Sizes, own: tuple[Sizes, ...]) -> Pattern:
        """Return the pattern with the sizes of one more measured step.

        Args:
            root: The root's.
            own: Every event's own.
        """
        high = tuple(map(max, root, self.high or root))
        row = Row(root, own)
        if row in self.rows or self._foretells(row):
            return self.told(high=high)
        rows = _bounded((*self.rows, row))
        n_rows, known, tries = self.n_rows + 1, self._known, self._tried
        # Another fit would be in vain where many were, and little is new.
        waits = known is not None and tries.n_failed >= _MOST_FAILURES
        waits = waits and n_rows < 1.5 * tries.n_fitted
        return replace(
            self,
            rows=rows,
            high=high,
            n_rows=n_rows,
            _tries=tries,
            _kept_rules=known if waits else None,
        )

    def told(self, **fields: Any) -> Pattern:
        """Return the pattern of which something else is known than its sizes."""
        return replace(self, **fields, _tries=self._tried, _kept_rules=self._known)

    @property
    def _known(self) -> _Rules | None:
        """The rules, if they were fitted."""
        known: _Rules | None = self.__dict__.get("_rules", self._kept_rules)
        return known

    @property
    def _tried(self) -> _Tries:
        known = self._known
        return self._tries if known is None else known.tries

    def _foretells(self, row: Row) -> bool:
        """Whether the rules already say this, so that the row teaches nothing."""
        if self._known is None or len(self.rows) < _ENOUGH_ROWS:
            return False
        return self.own_sizes(row.root) == list(row.own)

    @cached_property
    def _rules(self) -> _Rules:
        """The rules of every event; equal histories share them."""
        if self._kept_rules is not None:
            return self._kept_rules
        roots = [row.root for row in self.rows]
        found: dict[tuple[int, ...], SizeRule] = {}
        shared: dict[tuple[Sizes, ...], tuple[SizeRule, ...]] = {}
        maps = []
        for index in range(len(self.events)):
            give_way()
            history = tuple(row.own[index] for row in self.rows)
            if history not in shared:
                columns = [tuple(column) for column in zip(*history, strict=True)]
                for column in columns:
                    if column not in found:
                        give_way()
                        found[column] = SizeRule(roots, column)
                shared[history] = tuple(found[column] for column in columns)
            maps.append(shared[history])
        has_failed = not all(rule.is_found for rule in found.values())
        tries = _Tries(self.n_rows, self._tries.n_failed + 1 if has_failed else 0)
        return _Rules(maps, tries, _lay_out(self.events, maps))

    @property
    def rules(self) -> list[tuple[SizeRule, ...]]:
        """For each event, the rule of each of its own sizes."""
        return self._rules.maps

    @property
    def layout(self) -> Layout:
        """The events and gaps, those that share all their numbers together."""
        return self._rules.layout

    def make_rules(self) -> None:
        """Fit the rules, which are remembered, before anybody asks for them."""
        if self.rows:
            _ = self._rules

    @property
    def families(self) -> list[str]:
        """Each event's family."""
        return [event.family for event in self.events]

    @property
    def n_parts(self) -> int:
        """How many forwards its events ran in."""
        return self.events[-1].part + 1 if self.events else 1

    def events_until(self, part: int) -> int:
        """Return how many events have run where one of the forwards has ended.

        Args:
            part: Which of them.
        """
        return sum(event.part <= part for event in self.events)

    @property
    def follows_rules(self) -> bool:
        """Whether every event's sizes follow from the root's by a rule."""
        return all(rule.is_found for rules in self.rules for rule in rules)

    def reaches_further(self, root: Sizes) -> bool:
        """Whether a size that never varied is larger now: rules take it as constant.

        Where other layers ran than before, a pattern begins anew with one step, while
        the series of its families know all shapes.
        """
        columns = zip(*(row.root for row in self.rows), root, strict=True)
        return any(len(set(seen)) == 1 and now > seen[0] for *seen, now in columns)

    def own_sizes(self, root: Sizes) -> list[Sizes]:
        """Return every event's own sizes at the root's sizes."""
        done: dict[int, Sizes] = {}
        sizes = []
        for rules in self.rules:
            key = id(rules)
            if key not in done:
                give_way()
                done[key] = tuple(rule(root) for rule in rules)
            sizes.append(done[key])
        return sizes

    def by_unit(
        self, actions: Sequence[str], otherwise: str
    ) -> tuple[tuple[str, ...], ...]:
        """Sort a plan's actions by unit and call.

        Args:
            actions: One an event.
            otherwise: What calls do that are no events: they made no gradients, as in
                frozen layers, and save nothing.
        """
        by_unit = [[otherwise] * n_calls for n_calls in self.calls]
        for event, action in zip(self.events, actions, strict=True):
            by_unit[event.unit][event.call] = action
        return tuple(tuple(calls) for calls in by_unit)


def _bounded(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Drop the oldest row that is not the largest in any size, if they are too many."""
    if len(rows) <= _MOST_ROWS:
        return rows
    high = tuple(map(max, *(row.root for row in rows)))
    for index, row in enumerate(rows):
        if not any(map(operator.eq, row.root, high)):
            return rows[:index] + rows[index + 1 :]
    return rows[1:]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where in the series' values each event's numbers stand."""

    classes: list[tuple[int, AdjacentFamilies]]
    """(an event of the class, the families of its neighbours)."""
    of_event: NDArray[np.intp]
    gaps: list[tuple[str, ...]]
    """(family before, family after), and where: see `AdjacentFamilies`."""
    of_gap: NDArray[np.intp]


def _lay_out(events: Sequence[Event], maps: Sequence[tuple[SizeRule, ...]]) -> Layout:
    families = [event.family for event in events]
    classes: dict[tuple[str, AdjacentFamilies, int], int] = {}
    members: list[tuple[int, AdjacentFamilies]] = []
    of_event = []
    around = neighbours_of(events)
    for index, (family, neighbours) in enumerate(zip(families, around, strict=True)):
        give_way()
        key = (family, neighbours, id(maps[index]))
        if key not in classes:
            classes[key] = len(members)
            members.append((index, neighbours))
        of_event.append(classes[key])
    pairs = gaps_of(events)
    give_way()
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


class SideTensor(NamedTuple):
    """A tensor that events read and would not hold if they were kept.

    The measured steps recompute everything, and hold it for the recomputations. Under
    a plan that keeps all its readers it goes after the last of them.
    """

    readers: tuple[int, ...]
    """Positions of the events that read it."""
    n_bytes: float


class SizeRule:
    """How one of an event's own sizes follows from the root's."""

    def __init__(self, roots: Sequence[Sizes], own: Sequence[int]) -> None:
        self._constant = own[0] if all(v == own[0] for v in own) else None
        self._column: int | None = None
        self._map: SizeMap | None = None
        self.is_found = True
        if self._constant is not None:
            return
        for column in range(len(roots[0])):
            if all(row[column] == v for row, v in zip(roots, own, strict=True)):
                self._column = column
                return
        self._map = SizeMap().fit(np.array(roots), np.array(own))
        self.is_found = bool(self._map.found_)

    def __call__(self, root: Sizes) -> int:
        """Return the own size at the root's sizes."""
        if self._constant is not None:
            return self._constant
        if self._column is not None:
            return root[self._column]
        assert self._map is not None
        return int(self._map.predict_one(root))


def as_tuples(value: Any) -> Any:
    """Turn lists, as JSON brings them back, into tuples, however nested."""
    return tuple(map(as_tuples, value)) if isinstance(value, (list, tuple)) else value
