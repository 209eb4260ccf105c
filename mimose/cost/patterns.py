"""Which events run in a context, and how their own sizes follow from the batch's."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from mimose.cost.layout import Layout, lay_out_events
from mimose.cost.sequences import (
    CallCounts,
    Calls,
    Event,
    merged,
    ran_of,
)
from mimose.cost.size_rules import Fixed, SizeRule, fit_rules
from mimose.types import Sizes

_MOST_ROWS = 64
"""Measured steps whose sizes are remembered."""
_ENOUGH_ROWS = 16
"""So many, and steps that the rules foretell are not remembered any more."""
_MOST_SEQUENCES = 256
"""Sequences of a pattern that are remembered."""
_MOST_FAILURES = 8
"""Fits that found no rule; then the next waits until there is half as much again."""


Place: TypeAlias = tuple[int, int]
"""Of an event: its unit and call."""


class Row(NamedTuple):
    """The sizes of one measured step."""

    root: Sizes
    own: tuple[Sizes, ...]
    """Every event's; () of one that did not run."""
    calls: Calls = ()
    """How often each unit was called."""


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
    fixed: list[Fixed]
    """For each event, root sizes that were the same in all steps that tell of it."""


@dataclass(frozen=True)
class Pattern:
    """The events of one context, in the order in which they run; immutable.

    Not every step runs all of them: Note: [Optional events].

    Rules are fitted by the first reader and remembered, as in
    Note: [Fits are made when asked for].
    """

    events: tuple[Event, ...]
    rows: tuple[Row, ...] = ()
    """Of the steps measured, a bounded number."""
    sides: tuple[tuple[Place, ...], ...] = ()
    """The readers of each `SideTensor`."""
    is_ordered: bool = True
    copies_end: str = ""
    """Where autocast's copies of weights go: see `mimose.cost.copies`."""
    high: Sizes = ()
    """The largest of each root size measured."""
    calls: Calls = ()
    """How often each unit is called at the most."""
    between: tuple[Calls, ...] = ()
    """How often it was called so far where each forward but the last has ended."""
    seen: tuple[tuple[Sizes, Calls], ...] = ()
    """Root sizes and calls of steps not measured, in which more ran than foretold."""
    n_to_measure: int = 0
    """Steps to be measured at the most, until one runs what no measured one has."""
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
            "seen": self.seen,
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
            seen=as_tuples(state["seen"]),
            structure=str(state["structure"]),
            n_rows=len(state["rows"]),
        )

    # ------------------------------------------------------------------ sequences

    def including(
        self, ran: tuple[Event, ...], calls: Calls, between: tuple[Calls, ...] = ()
    ) -> Pattern | None:
        """Return the pattern that has another sequence as well.

        Args:
            ran: The events, as they ran.
            calls: How often each unit was called.
            between: The same where each forward but the last has ended.

        Returns:
            None where they cannot be put into one order: Note: [Optional events].
        """
        if (ran, calls, between) == (self.events, self.calls, self.between):
            return self
        if between or self.between:
            return None
        events = merged(self.events, ran)
        if events is None or ran_of(events, calls) != ran:
            return None
        most = tuple(map(max, calls, self.calls))
        if events == self.events:
            return self if most == self.calls else self.told(calls=most)
        index = {event.place: i for i, event in enumerate(self.events)}
        moved = [index.get(event.place) for event in events]
        rows = tuple(
            row._replace(own=tuple(() if i is None else row.own[i] for i in moved))
            for row in self.rows
        )
        return replace(self, events=events, rows=rows, calls=most, _kept_rules=None)

    def ran(self, calls: Calls) -> Pattern:
        """Return the pattern of the events of steps with so many calls alone.

        It is there to be read; its rows are those of all events.

        Args:
            calls: How often each unit is called.
        """
        if calls == self.calls or not calls:
            return self
        found = self._sequences.get(calls)
        if found is None:
            events = ran_of(self.events, calls)
            if len(events) == len(self.events):
                found = self.told(calls=calls)
            else:
                places = {event.place for event in events}
                ran = [event.place in places for event in self.events]
                maps = list(itertools.compress(self.rules, ran))
                fixed = list(itertools.compress(self._rules.fixed, ran))
                layout = lay_out_events(events, maps)
                rules = _Rules(maps, self._rules.tries, layout, fixed)
                found = replace(self, events=events, calls=calls, _kept_rules=rules)
            if len(self._sequences) >= _MOST_SEQUENCES:
                self._sequences.clear()
            self._sequences[calls] = found
        return found

    def expected(self, root: Sizes) -> Pattern:
        """Return the pattern of the events that may run at these sizes.

        Args:
            root: The root's sizes.
        """
        return self.ran(tuple(map(min, self.calls, self.counts(root))))

    def lacks_some(self, root: Sizes) -> bool:
        """Whether more events are foretold at these sizes than were ever measured.

        Args:
            root: The root's sizes.
        """
        return self.counts.exceed(root, self.calls)

    @property
    def varies(self) -> bool:
        """Whether steps of the same sizes run different events."""
        return self.counts.vary

    @cached_property
    def _sequences(self) -> dict[Calls, Pattern]:
        return {}

    @cached_property
    def counts(self) -> CallCounts:
        """How often units are called."""
        told = [(row.root, row.calls) for row in self.rows if row.calls]
        told.extend(self.seen)
        if not told:
            return CallCounts([()], [self.calls])
        return CallCounts(*zip(*told, strict=True))

    def missing(self, root: Sizes, calls: Calls) -> Pattern:
        """Return the pattern that knows of a step in which more ran than foretold.

        Args:
            root: The root's sizes.
            calls: How often each unit was called.
        """
        is_new = any(map(operator.gt, calls, self.calls))
        return self.told(
            seen=(*self.seen, (root, calls))[-_ENOUGH_ROWS:],
            n_to_measure=_ENOUGH_ROWS if is_new else self.n_to_measure,
        )

    @property
    def is_missing(self) -> bool:
        """Whether something has run that no measured step ran, and is waited for."""
        most = map(max, *(calls for _, calls in self.seen), self.calls)
        return self.n_to_measure > 0 and tuple(most) != self.calls

    # ------------------------------------------------------------------ sizes

    def taken_in(
        self, root: Sizes, own: tuple[Sizes, ...], calls: Calls = ()
    ) -> Pattern:
        """Return the pattern with the sizes of one more measured step.

        Args:
            root: The root's.
            own: Every event's own; () of one that did not run.
            calls: How often each unit was called.
        """
        high = tuple(map(max, root, self.high or root))
        row = Row(root, own, calls)
        n_to_measure = max(0, self.n_to_measure - 1)
        if row in self.rows or self._foretells(row):
            return self.told(high=high, n_to_measure=n_to_measure)
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
            n_to_measure=n_to_measure,
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
        pairs = zip(self.own_sizes(row.root), row.own, strict=True)
        if any(own and own != foretold for foretold, own in pairs):
            return False
        return not row.calls or not any(
            map(operator.gt, row.calls, self.counts(row.root))
        )

    @cached_property
    def _rules(self) -> _Rules:
        """The rules of every event; equal histories share them."""
        if self._kept_rules is not None:
            return self._kept_rules
        roots = [row.root for row in self.rows]
        histories = list(zip(*(row.own for row in self.rows), strict=True))
        maps, fixed, are_found = fit_rules(self.families, roots, histories)
        tries = _Tries(self.n_rows, 0 if are_found else self._tries.n_failed + 1)
        layout = lay_out_events(self.events, maps)
        return _Rules(maps, tries, layout, fixed)

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
            _ = self._rules, self.counts

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

        Events that ran in few steps have their sizes from these alone.
        """
        return any(
            seen is not None and now > seen
            for fixed in set(self._rules.fixed)
            for seen, now in zip(fixed, root, strict=bool(fixed))
        )

    def own_sizes(self, root: Sizes) -> list[Sizes]:
        """Return every event's own sizes at the root's sizes."""
        done: dict[int, Sizes] = {}
        sizes = []
        for rules in self.rules:
            key = id(rules)
            if key not in done:
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
    n_ran = [sum(map(bool, own)) for own in zip(*(r.own for r in rows), strict=True)]
    for index, row in enumerate(rows):
        is_only = any(n == 1 and own for n, own in zip(n_ran, row.own, strict=True))
        if not is_only and not any(map(operator.eq, row.root, high)):
            return rows[:index] + rows[index + 1 :]
    return rows[1:]


class SideTensor(NamedTuple):
    """A tensor that events read and would not hold if they were kept.

    The measured steps recompute everything, and hold it for the recomputations. Under
    a plan that keeps all its readers it goes once others let go of it.
    """

    readers: tuple[int, ...]
    """Positions of the events that read it, of those that run."""
    n_bytes: float
    goes_before: int
    """The position of the event that is entered next when others have let go of it; of
    the root's exit the number of events, and one more behind that."""


def as_tuples(value: Any) -> Any:
    """Turn lists, as JSON brings them back, into tuples, however nested."""
    return tuple(map(as_tuples, value)) if isinstance(value, (list, tuple)) else value
