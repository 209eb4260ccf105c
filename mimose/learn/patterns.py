"""Which events run in a context, and how their own sizes follow from the batch's."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mimose.predictors import SizeMap
from mimose.types import KEEP, Sizes

NO_FAMILY = -1
Neighbours: TypeAlias = tuple[int, int]
"""The families before and after an event: the first takes the gradient it makes, and
the second made the gradient that it takes. Of the last event that is the head, and
what is held in between is another (a MiB in T5)."""

_MOST_ROWS = 64
"""Measured steps whose sizes are remembered."""
_ENOUGH_ROWS = 16
"""So many, and steps that the rules foretell are not remembered any more."""
_MOST_FAILURES = 8
"""Fits that found no rule; then the next waits until there is half as much again."""


@dataclass(slots=True)
class Pattern:
    """The events of one context, in the order in which they ran."""

    events: tuple[tuple[str, int, int, int], ...]
    """(``name#call``, unit, call, family)."""
    rows: list[tuple[Sizes, tuple[Sizes, ...]]] = field(default_factory=list)
    """Root sizes and every event's own, of the steps measured: a bounded number."""
    maps: list[tuple[SizeRule, ...]] | None = None
    """For each event, the rule of each of its own sizes; see `rules`."""
    sides: tuple[tuple[int, ...], ...] = ()
    """The readers of each `SideTensor`."""
    is_ordered: bool = True
    copies_end: str = ""
    """Where autocast's copies of weights go: see `mimose.learn.copies`."""
    high: Sizes = ()
    """The largest of each root size measured."""
    calls: tuple[int, ...] = ()
    """How often each unit is called, calls without a gradient included."""
    structure: str = ""
    """Names what the root is called with; contexts may share it."""
    layout: Layout | None = None
    """Where the events' numbers stand; see `grouped`."""
    n_rows: int = 0
    """Rows taken in, those dropped since included."""
    n_fitted: int = 0
    """Rows taken in before the last fit."""
    n_failed: int = 0
    """Fits in a row that found no rule."""

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured, ready for JSON; maps and layout follow from it."""
        return {
            "events": self.events,
            "rows": self.rows,
            "sides": self.sides,
            "is_ordered": self.is_ordered,
            "copies_end": self.copies_end,
            "high": self.high,
            "calls": self.calls,
            "structure": self.structure,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Pattern:
        """Make the pattern that ``state_dict`` told of.

        Args:
            state: What it returned.
        """
        return cls(
            events=as_tuples(state["events"]),
            rows=[as_tuples(row) for row in state["rows"]],
            sides=as_tuples(state["sides"]),
            is_ordered=bool(state["is_ordered"]),
            copies_end=str(state.get("copies_end", "")),
            high=as_tuples(state["high"]),
            calls=as_tuples(state["calls"]),
            structure=str(state["structure"]),
            n_rows=len(state["rows"]),
        )

    def take_in(self, root: Sizes, own: tuple[Sizes, ...]) -> None:
        """Take in the sizes of one measured step.

        Args:
            root: The root's.
            own: Every event's own.
        """
        self.high = tuple(map(max, root, self.high or root))
        if (root, own) in self.rows or self._foretells(root, own):
            return
        self.rows.append((root, own))
        self.n_rows += 1
        if len(self.rows) > _MOST_ROWS:
            self._forget_row()
        if not self._waits():
            self.maps = None

    def _foretells(self, root: Sizes, own: tuple[Sizes, ...]) -> bool:
        """Whether the rules already say this, so that the row teaches nothing."""
        if self.maps is None or len(self.rows) < _ENOUGH_ROWS:
            return False
        return self.own_sizes(root) == list(own)

    def _forget_row(self) -> None:
        """Drop the oldest row that is not the largest in any size."""
        high = tuple(map(max, *(root for root, _ in self.rows)))
        for index, (root, _) in enumerate(self.rows):
            if not any(map(operator.eq, root, high)):
                del self.rows[index]
                return
        del self.rows[0]

    def _waits(self) -> bool:
        """Whether another fit would be in vain: many were, and little is new."""
        if self.maps is None or self.n_failed < _MOST_FAILURES:
            return False
        return self.n_rows < 1.5 * self.n_fitted

    @property
    def follows_rules(self) -> bool:
        """Whether every event's sizes follow from the root's by a rule."""
        return all(rule.is_found for rules in self.rules() for rule in rules)

    def reaches_further(self, root: Sizes) -> bool:
        """Whether a size that never varied is larger now: rules take it as constant.

        Where other layers ran than before, a pattern begins anew with one step, while
        the series of its families know all shapes.
        """
        columns = zip(*(row for row, _ in self.rows), root, strict=True)
        return any(len(set(seen)) == 1 and now > seen[0] for *seen, now in columns)

    def own_sizes(self, root: Sizes) -> list[Sizes]:
        """Return every event's own sizes at the root's sizes."""
        done: dict[int, Sizes] = {}
        sizes = []
        for rules in self.rules():
            key = id(rules)
            if key not in done:
                done[key] = tuple(rule(root) for rule in rules)
            sizes.append(done[key])
        return sizes

    def rules(self) -> list[tuple[SizeRule, ...]]:
        """Return each event's rules, fitted if need be; equal histories share them."""
        if self.maps is not None:
            return self.maps
        roots = [root for root, _ in self.rows]
        found: dict[tuple[int, ...], SizeRule] = {}
        shared: dict[tuple[Sizes, ...], tuple[SizeRule, ...]] = {}
        maps = []
        for index in range(len(self.events)):
            history = tuple(own[index] for _, own in self.rows)
            if history not in shared:
                columns = [tuple(column) for column in zip(*history, strict=True)]
                for column in columns:
                    if column not in found:
                        found[column] = SizeRule(roots, column)
                shared[history] = tuple(found[column] for column in columns)
            maps.append(shared[history])
        has_failed = not all(rule.is_found for rule in found.values())
        self.n_failed = self.n_failed + 1 if has_failed else 0
        self.n_fitted = self.n_rows
        self.maps = maps
        self.layout = None
        return maps

    def grouped(self) -> Layout:
        """Return the events and gaps, those that share all their numbers together."""
        maps = self.rules()
        if self.layout is None:
            self.layout = _lay_out([event[3] for event in self.events], maps)
        return self.layout


@dataclass(slots=True)
class Layout:
    """Where in the series' values each event's numbers stand."""

    classes: list[tuple[int, Neighbours]]
    """(an event of the class, the families of its neighbours)."""
    of_event: NDArray[np.intp]
    gaps: list[tuple[int, int]]
    """(family before, family after)."""
    of_gap: NDArray[np.intp]


def _lay_out(families: Sequence[int], maps: Sequence[tuple[SizeRule, ...]]) -> Layout:
    around = [NO_FAMILY, *families, NO_FAMILY]
    classes: dict[tuple[int, Neighbours, int], int] = {}
    members: list[tuple[int, Neighbours]] = []
    of_event = []
    for index, family in enumerate(families):
        neighbours = (around[index], around[index + 2])
        key = (family, neighbours, id(maps[index]))
        if key not in classes:
            classes[key] = len(members)
            members.append((index, neighbours))
        of_event.append(classes[key])
    pairs = list(zip([NO_FAMILY, *families], families, strict=False))
    gaps = list(dict.fromkeys(pairs))
    return Layout(
        members,
        np.array(of_event, dtype=np.intp),
        gaps,
        np.array([gaps.index(pair) for pair in pairs], dtype=np.intp),
    )


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


def actions_by_unit(
    pattern: Pattern, actions: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Sort a plan's actions by unit and call.

    Other calls made no gradients, as in frozen layers, and save nothing if they are
    kept.
    """
    by_unit = [[KEEP] * n_calls for n_calls in pattern.calls]
    for (_, unit, call, _), action in zip(pattern.events, actions, strict=True):
        by_unit[unit][call] = action
    return tuple(tuple(calls) for calls in by_unit)
