"""Which calls run in a context, and how their sizes follow from the batch's sizes.

Note: [Optional calls]
Layers may be dropped at random, and a tower may run once for each image of a batch. So
a context's pattern is the superset of all measured sequences, in one order, and a step
runs some of its calls. The counts of calls of each layer determine which: calls are
numbered, and a layer that is called less often omits its last calls. If that is not
true of a sequence, or no order contains it and the others, a new pattern with only this
sequence begins, and the others are measured again.

If a layer's count is one of the batch's sizes (the number of images), plans are made
for that many calls. Otherwise plans are made for the most calls seen so far, because a
step with fewer calls holds less. After a step with more calls, the next one is
measured.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mimose.predictors import SizeMap
from mimose.types import Sizes

CallCounts: TypeAlias = tuple[int, ...]
"""How often each layer is called, with calls without a gradient."""
Place: TypeAlias = tuple[int, int]
"""The layer and number of a call."""
Neighbours: TypeAlias = tuple[str, ...]
"""The families before and after a call in its forward, "" for none. The first gets the
call's gradient; the second made the gradient that the call gets. If several forwards
run before one backward, the forward's place follows: the first backward that reaches a
weight makes its gradient, and the others add to it."""

_MOST_ROWS = 64
"""The most measured steps whose sizes are stored."""
_ENOUGH_ROWS = 16
"""From this number on, steps that the rules predict are not stored."""
_MOST_SEQUENCES = 256
"""The most sequences of a pattern that are stored."""


class LayerCall(NamedTuple):
    """One call of a layer in a forward."""

    name: str
    """``name#call``."""
    layer: int
    number: int
    family: str
    part: int = 0
    """The index of its forward in the window."""

    @property
    def place(self) -> Place:
        """Its layer and number, which identify it in its context."""
        return self.layer, self.number


class Row(NamedTuple):
    """The sizes of one measured step."""

    root: Sizes
    own: tuple[Sizes, ...]
    """The sizes of each call; () for one that did not run."""
    counts: CallCounts = ()
    """How often each layer was called."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Classes of calls and of gaps that share all their numbers."""

    classes: list[tuple[int, Neighbours]]
    """For each class, a call of it and that call's neighbours."""
    of_call: NDArray[np.intp]
    """(C,) the class of each call."""
    gaps: list[Neighbours]
    """For each class of gaps, the families before and after it, and its forward."""
    of_gap: NDArray[np.intp]
    """(C,) the class of the gap before each call."""


@dataclass(frozen=True, slots=True)
class _Rules:
    """What follows from all rows, fitted once."""

    maps: list[tuple[SizeMap, ...]]
    """For each call, the rule of each of its sizes; equal ones are one object."""
    layout: Layout
    columns_of_counts: Mapping[int, int]
    """For layers whose count equals one of the model's sizes: which size."""
    varies: bool
    """Whether a layer's count varies and equals none of the sizes."""
    n_rows: int
    """Number of rows before the fit."""

    @property
    def are_found(self) -> bool:
        return all(rule.rule_ is not None for rules in self.maps for rule in rules)


@dataclass(frozen=True)
class Pattern:
    """The calls of one context, in the order in which they run; immutable.

    Not every step runs all of them: Note: [Optional calls]. The first reader fits and
    stores the rules; two threads that read at once fit the same rules twice.
    """

    calls: tuple[LayerCall, ...]
    rows: tuple[Row, ...] = ()
    """The rows of measured steps, a bounded number."""
    is_ordered: bool = True
    """Whether gradients arrive in the reverse order of the calls."""
    copies_end: str = ""
    """The segment in which autocast's copies of weights are freed: ``"head"`` or
    ``"loss"``; "" if later."""
    high: Sizes = ()
    """The largest measured value of each size of the model."""
    counts: CallCounts = ()
    """The most calls of each layer."""
    between: tuple[CallCounts, ...] = ()
    """The counts of calls at the end of each forward but the last."""
    varies: bool = False
    """Whether steps of the same sizes have run different calls."""
    is_short: bool = False
    """Whether a step ran more than any measured step."""
    structure: str = ""
    """The name of the structure of the model's arguments; contexts may share it."""
    n_rows: int = 0
    """Number of rows so far, with those dropped since."""
    counted: tuple[Place, ...] = ()
    """The calls whose held bytes were counted; others may only be recomputed."""
    _rules: _Rules | None = field(default=None, repr=False, compare=False)
    """What `rules` returns; None before the fit."""

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured, as JSON values; rules follow from it."""
        said = {name: getattr(self, name) for name in self.__dataclass_fields__}
        del said["_rules"]
        return said

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Pattern:
        """Make the pattern from what ``state_dict`` returned.

        Args:
            state: What it returned.
        """
        said = {name: as_tuples(value) for name, value in state.items()}
        said["calls"] = tuple(LayerCall(*each) for each in said["calls"])
        said["rows"] = tuple(Row(*row) for row in said["rows"])
        return cls(**said)

    def including(
        self,
        ran: tuple[LayerCall, ...],
        counts: CallCounts,
        between: tuple[CallCounts, ...] = (),
    ) -> Pattern | None:
        """Return the pattern that also contains another sequence.

        Args:
            ran: The calls, in the order in which they ran.
            counts: How often each layer was called.
            between: The same at the end of each forward but the last.

        Returns:
            None if no order contains all sequences: Note: [Optional calls].
        """
        if (ran, counts, between) == (self.calls, self.counts, self.between):
            return self
        if between or self.between:
            return None
        calls = _merged(self.calls, ran)
        if calls is None or _ran_of(calls, counts) != ran:
            return None
        most = tuple(map(max, counts, self.counts))
        if calls == self.calls:
            return self if most == self.counts else replace(self, counts=most)
        index = {call.place: i for i, call in enumerate(self.calls)}
        moved = [index.get(call.place) for call in calls]
        rows = tuple(
            row._replace(own=tuple(() if i is None else row.own[i] for i in moved))
            for row in self.rows
        )
        return replace(self, calls=calls, rows=rows, counts=most, _rules=None)

    def ran(self, counts: CallCounts) -> Pattern:
        """Return the pattern of only the calls that steps with these counts run.

        Use it only for reading, because its rows are those of all calls.

        Args:
            counts: How often each layer is called.
        """
        if counts == self.counts or not counts:
            return self
        found = self._sequences.get(counts)
        if found is None:
            calls, rules = _ran_of(self.calls, counts), self.rules
            if len(calls) == len(self.calls):
                found = replace(self, counts=counts)
            else:
                ran = [call.number < counts[call.layer] for call in self.calls]
                maps = list(itertools.compress(rules.maps, ran))
                rules = replace(rules, maps=maps, layout=_lay_out(calls, maps))
                found = replace(self, calls=calls, counts=counts, _rules=rules)
            if len(self._sequences) >= _MOST_SEQUENCES:
                self._sequences.clear()
            self._sequences[counts] = found
        return found

    @cached_property
    def _sequences(self) -> dict[CallCounts, Pattern]:
        return {}

    def expected(self, root: Sizes) -> Pattern:
        """Return the pattern of the calls that may run at these sizes.

        Args:
            root: The model's sizes.
        """
        return self.ran(tuple(map(min, self.counts, self._expected_counts(root))))

    def lacks_some(self, root: Sizes) -> bool:
        """Whether more calls run at these sizes, or have run, than were measured.

        Args:
            root: The model's sizes.
        """
        more = map(operator.gt, self._expected_counts(root), self.counts)
        return self.is_short or any(more)

    def _expected_counts(self, root: Sizes) -> CallCounts:
        counts = list(self.counts)
        if not self.varies:
            for layer, column in self.rules.columns_of_counts.items():
                counts[layer] = root[column]
        return tuple(counts)

    @property
    def may_vary(self) -> bool:
        """Whether steps of the same sizes may run different calls."""
        return self.varies or self.rules.varies

    def missing(self, counts: CallCounts) -> Pattern:
        """Return the pattern after a step in which more ran than predicted.

        Args:
            counts: How often each layer was called.
        """
        is_new = any(map(operator.gt, counts, self.counts))
        return replace(self, varies=True, is_short=self.is_short or is_new)

    def taken_in(
        self, root: Sizes, own: tuple[Sizes, ...], counts: CallCounts = ()
    ) -> Pattern:
        """Return the pattern with the sizes of one more measured step.

        Args:
            root: The model's sizes.
            own: The sizes of each call; () for one that did not run.
            counts: How often each layer was called.
        """
        high = tuple(map(max, root, self.high or root))
        row = Row(root, own, counts)
        if row in self.rows or self._predicts(row):
            return replace(self, high=high, is_short=False)
        rows: tuple[Row, ...] = (*self.rows, row)
        if len(rows) > _MOST_ROWS:
            at = oldest_small([row.root for row in rows])
            rows = rows[:at] + rows[at + 1 :]
        known, n_rows = self._rules, self.n_rows + 1
        # If a rule was not found, the next fit waits for 50% more rows.
        waits = known and not known.are_found and n_rows < 1.5 * known.n_rows
        return replace(
            self,
            rows=rows,
            high=high,
            n_rows=n_rows,
            is_short=False,
            _rules=known if waits else None,
        )

    def _predicts(self, row: Row) -> bool:
        """Whether the rules predict this row, so that it adds nothing."""
        if self._rules is None or len(self.rows) < _ENOUGH_ROWS:
            return False
        pairs = zip(self.own_sizes(row.root), row.own, strict=True)
        if any(own and own != predicted for predicted, own in pairs):
            return False
        return not any(map(operator.gt, row.counts, self._expected_counts(row.root)))

    @property
    def rules(self) -> _Rules:
        """What follows from its rows; fitted and stored if it is not known yet."""
        found = self._rules
        if found is None:
            found = self._fitted()
            object.__setattr__(self, "_rules", found)
        return found

    def _fitted(self) -> _Rules:
        """Fit the rules of each call; equal histories share them."""
        roots = [row.root for row in self.rows]
        histories = _filled(self.calls, [row.own for row in self.rows])
        found: dict[tuple[tuple[int, ...], tuple[bool, ...]], SizeMap] = {}
        shared: dict[tuple[Sizes, ...], tuple[SizeMap, ...]] = {}
        for history in histories:
            if history in shared:
                continue
            is_there = tuple(map(bool, history))
            known_roots = list(itertools.compress(roots, is_there))
            columns = zip(*filter(None, history), strict=True)
            keys = [(tuple(column), is_there) for column in columns]
            for key in keys:
                if key not in found:
                    found[key] = SizeMap().fit(known_roots, key[0])
            shared[history] = tuple(found[key] for key in keys)
        maps = [shared[history] for history in histories]
        columns_of_counts, varies = self._fitted_counts(roots)
        layout = _lay_out(self.calls, maps)
        return _Rules(maps, layout, columns_of_counts, varies, self.n_rows)

    def _fitted_counts(self, roots: Sequence[Sizes]) -> tuple[dict[int, int], bool]:
        """Return the size that equals each layer's count, and whether one has none."""
        columns = list(zip(*roots, strict=True))
        counts = zip(*(row.counts for row in self.rows), strict=True)
        moving = {u: own for u, own in enumerate(counts) if len(set(own)) > 1}
        found = {u: columns.index(own) for u, own in moving.items() if own in columns}
        return found, len(found) < len(moving)

    @property
    def layout(self) -> Layout:
        """The classes of calls and gaps that share all their numbers."""
        return self.rules.layout

    def make_rules(self) -> None:
        """Fit and store the rules before they are needed."""
        if self.rows:
            _ = self.rules

    @property
    def follows_rules(self) -> bool:
        """Whether the sizes of each call follow from the model's by a rule."""
        return self.rules.are_found

    def own_sizes(self, root: Sizes) -> list[Sizes]:
        """Return the sizes of each call at the model's sizes."""
        done: dict[int, Sizes] = {}
        for rules in self.rules.maps:
            if id(rules) not in done:
                done[id(rules)] = tuple(rule.predict_one(root) for rule in rules)
        return [done[id(rules)] for rules in self.rules.maps]

    def calls_until(self, part: int) -> int:
        """Return the number of calls that have run at the end of a forward.

        Args:
            part: The index of the forward in its window.
        """
        return sum(call.part <= part for call in self.calls)

    def by_layer(
        self, actions: Sequence[str], otherwise: str
    ) -> tuple[tuple[str, ...], ...]:
        """Sort a plan's actions by layer and call.

        Args:
            actions: One for each call.
            otherwise: For calls outside the plan: they made no gradients, as in frozen
                layers, and save nothing.
        """
        by_layer = [[otherwise] * n_calls for n_calls in self.counts]
        for call, action in zip(self.calls, actions, strict=True):
            by_layer[call.layer][call.number] = action
        return tuple(tuple(calls) for calls in by_layer)


# --------------------------------------------------------------------------- sequences


def _merged(
    known: Sequence[LayerCall], ran: Sequence[LayerCall]
) -> tuple[LayerCall, ...] | None:
    """Return a sequence that contains two, each in its order; None if there is none.

    Args:
        known: The sequence of all measured calls.
        ran: Another one.
    """
    families = {call.place: call.family for call in known}
    if any(families.get(e.place, e.family) != e.family for e in ran):
        return None
    found: list[LayerCall] = []
    left, right = list(reversed(known)), list(reversed(ran))
    of_known, of_ran = ({e.place for e in calls} for calls in (known, ran))
    while left and right:
        if left[-1].place == right[-1].place:
            found.append(left.pop())
            right.pop()
        elif right[-1].place not in of_known:
            # Between two shared calls, order by call number, then by layer.
            is_free = left[-1].place not in of_ran
            comes_first = is_free and _turn(left[-1]) < _turn(right[-1])
            found.append((left if comes_first else right).pop())
        elif left[-1].place not in of_ran:
            found.append(left.pop())
        else:
            return None
    return (*found, *reversed(left), *reversed(right))


def _turn(call: LayerCall) -> tuple[int, int]:
    return call.number, call.layer


def _ran_of(calls: Iterable[LayerCall], counts: CallCounts) -> tuple[LayerCall, ...]:
    """Return the calls of a step with these counts."""
    return tuple(call for call in calls if call.number < counts[call.layer])


# ------------------------------------------------------------------------------ layout


def neighbours_of(calls: Sequence[LayerCall]) -> list[Neighbours]:
    """Return the neighbours of each call in its forward."""
    last = calls[-1].part if calls else 0
    found: list[Neighbours] = []
    for before, call, after in zip(
        [None, *calls], calls, [*calls[1:], None], strict=False
    ):
        pair = (
            other.family if other is not None and other.part == call.part else ""
            for other in (before, after)
        )
        found.append((*pair, f"{call.part + 1}/{last + 1}") if last else (*pair,))
    return found


def gaps_of(calls: Sequence[LayerCall]) -> list[Neighbours]:
    """Return for each call the families around the gap before it, and its forward."""
    pairs = zip(calls, neighbours_of(calls), strict=True)
    return [(before, call.family, *which) for call, (before, _, *which) in pairs]


def _lay_out(calls: Sequence[LayerCall], maps: Sequence[tuple[SizeMap, ...]]) -> Layout:
    """Group calls and gaps that share all their numbers.

    Args:
        calls: The calls in their order.
        maps: For each, the rules of its sizes; equal ones are one object.
    """
    families, pairs = [call.family for call in calls], gaps_of(calls)
    kinds = list(zip(families, neighbours_of(calls), map(id, maps), strict=True))
    of_call, of_gap = list(dict.fromkeys(kinds)), list(dict.fromkeys(pairs))
    return Layout(
        [(kinds.index(kind), kind[1]) for kind in of_call],
        np.array([of_call.index(kind) for kind in kinds], dtype=np.intp),
        of_gap,
        np.array([of_gap.index(pair) for pair in pairs], dtype=np.intp),
    )


# -------------------------------------------------------------------------------- rows


def _filled(
    calls: Sequence[LayerCall], rows: Sequence[tuple[Sizes, ...]]
) -> list[tuple[Sizes, ...]]:
    """Return each call's sizes in all rows, completed from similar calls.

    Calls of one family share a rule if their sizes were equal in all steps that ran
    both. So the sizes of one complete those of the others.

    Args:
        calls: The calls of all rows.
        rows: The sizes of each call; () if it did not run.
    """
    histories = list(zip(*rows, strict=True))
    if all(own for row in rows for own in row):
        return histories
    groups: dict[str, list[list[Sizes]]] = {}
    member: list[list[Sizes]] = []
    for call, history in zip(calls, histories, strict=True):
        own_groups = groups.setdefault(call.family, [])
        group = next((g for g in own_groups if _is_alike(g, history)), None)
        if group is None:
            group = list(history)
            own_groups.append(group)
        else:
            group[:] = [old or own for old, own in zip(group, history, strict=True)]
        member.append(group)
    return [tuple(group) for group in member]


def _is_alike(group: Sequence[Sizes], history: Sequence[Sizes]) -> bool:
    both = [pair for pair in zip(group, history, strict=True) if all(pair)]
    return bool(both) and all(one == other for one, other in both)


def oldest_small(shapes: Sequence[Sizes]) -> int:
    """Return the index of the first shape that is the largest in no size, or 0."""
    high = tuple(map(max, *shapes))
    is_low = (n for n, s in enumerate(shapes) if not any(map(operator.eq, s, high)))
    return next(is_low, 0)


def as_tuples(value: Any) -> Any:
    """Turn nested lists, as JSON returns them, into tuples."""
    return tuple(map(as_tuples, value)) if isinstance(value, (list, tuple)) else value
