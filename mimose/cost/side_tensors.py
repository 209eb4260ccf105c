"""Tensors that several layers read and none of them makes.

Note: [Side tensors]
What runs between layers makes tensors that several layers read and none of them makes:
a mask, a position bias. A recomputed reader holds them from its forward to its
backward; a kept one only if it saves them. By convention they count as held in every
plan, from where they are made to the backward of their first reader, and the judge
takes them off where all readers are kept. So gaps and heads are learned from steps in
which some reader of each was recomputed, and the layers' net changes from steps in
which the first reader was. Learned from all steps, T5's peaks were predicted up to 5%
too low. Where others hold on to one (a model to all its hidden states, until the last
is there), it goes no sooner than they let go of it: taken off behind its last reader
all the same, DeBERTa's peaks were predicted 3% too low. (Kept is whatever ran under the
menu's first action; of any other a reader is taken to hold them.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from mimose.cost.model import CostModel
from mimose.cost.patterns import Pattern, Place, SideTensor
from mimose.cost.sequences import Event
from mimose.types import Measured, StepInput

Readers = tuple[int, ...]
"""Positions of the events that read a side tensor, among those that run."""


class Sides(NamedTuple):
    """What a step tells of side tensors, by their readers."""

    n_bytes: dict[Readers, int]
    n_passed: dict[Readers, int]
    """Events behind the last of them that are left before others let go of it."""


def measured_sides(events: Sequence[Measured]) -> Sides | None:
    """Sum up, by readers, the storages that none of the readers would hold.

    Args:
        events: Of one step.

    Returns:
        None where a kept event's forward was not watched.
    """
    if any(not event.held_bytes for event in events):
        return None
    n_bytes: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for index, event in enumerate(events):
        for key, size in event.inputs.items():
            n_bytes[key] = size
            readers.setdefault(key, []).append(index)
    saved = set().union(*(event.saved_inputs for event in events))
    sides = Sides({}, {})
    for key, read_by in readers.items():
        if key not in saved:
            group = tuple(read_by)
            sides.n_bytes[group] = sides.n_bytes.get(group, 0) + n_bytes[key]
            n_passed = events[group[-1]].passed.get(key, 0)
            sides.n_passed[group] = max(sides.n_passed.get(group, 0), n_passed)
    return sides


def side_tensors(model: CostModel, facts: StepInput) -> list[SideTensor]:
    """Return what a plan that keeps all the readers does not hold.

    Args:
        model: What was learned.
        facts: The step's context, which is known, and its sizes.
    """
    found = []
    pattern = model.pattern(facts)
    for group, readers in _with_choice(model, pattern):
        series = model.exact(facts.context, "side", group)
        if not series.doubt(facts.sizes):
            passed = model.exact(facts.context, "side passes", group).medians()
            goes_before = readers[-1] + 1 + int(max((n for _, n in passed), default=0))
            if goes_before <= len(pattern.events) + 1:
                n_bytes = series.predict(facts.sizes)
                found.append(SideTensor(readers, n_bytes, goes_before))
    return found


def settled_events(model: CostModel, pattern: Pattern) -> set[int]:
    """Return the positions of the events about which there is no choice.

    A unit that is always kept holds what it saves, and nothing else in any plan.

    Args:
        model: What was learned.
        pattern: The events.
    """
    return {i for i, e in enumerate(pattern.events) if model.is_settled(e.unit)}


def with_choice(model: CostModel, pattern: Pattern) -> list[Readers]:
    """Return the groups of readers, those left out about which there is no choice."""
    return [readers for _, readers in _with_choice(model, pattern)]


def _with_choice(
    model: CostModel, pattern: Pattern
) -> Iterator[tuple[tuple[Place, ...], Readers]]:
    """Yield each group as the pattern names it, and those who run and have a choice."""
    settled = settled_events(model, pattern)
    index = {event.place: i for i, event in enumerate(pattern.events)}
    for group in pattern.sides:
        found = (index[place] for place in group if place in index)
        readers = tuple(reader for reader in found if reader not in settled)
        if readers:
            yield group, readers


def known_sides(
    pattern: Pattern,
    known: Collection[Place],
    ran: Sequence[Event],
    measured: Mapping[Readers, int],
) -> tuple[Pattern, dict[tuple[Place, ...], int]]:
    """Tell which of a pattern's side tensors a step has shown.

    Where some readers did not run, the others tell which one it is. An event that no
    step had before is taken to read what is read by those that it reads with.

    Args:
        pattern: Of the context, the step's events included.
        known: The events of the steps before.
        ran: The step's events.
        measured: Bytes by positions among these.

    Returns:
        The pattern that knows the step's, and their bytes.
    """
    places = {event.place for event in ran}
    shown = [tuple(p for p in group if p in places) for group in pattern.sides]
    found = {at: 0 for at, group in enumerate(shown) if group}
    sides = list(pattern.sides)
    for readers, n_bytes in measured.items():
        own = tuple(ran[reader].place for reader in readers)
        old = tuple(place for place in own if place in known)
        alike = [at for at, group in enumerate(shown) if old and group == old]
        if len(alike) > 1:  # nobody can tell which
            for at in alike:
                found.pop(at, None)
        elif alike:
            (at,) = alike
            together = {*sides[at], *own}
            sides[at] = tuple(e.place for e in pattern.events if e.place in together)
            found[at] += n_bytes
        else:
            found[len(sides)] = n_bytes
            sides.append(own)
    told = pattern.told(sides=tuple(dict.fromkeys(sides)))
    return told, {sides[at]: n_bytes for at, n_bytes in found.items()}


def releases_sides(
    sides: Sequence[Readers], events: Sequence[Measured], first: str
) -> bool:
    """Whether side tensors went in the forward, before any backward needed them."""
    return any(
        all(events[reader].action == first for reader in readers) for readers in sides
    )


def holds_sides_to_the_end(
    sides: Sequence[Readers], events: Sequence[Measured], first: str
) -> bool:
    """Whether side tensors were held up to their first readers' backward."""
    return all(events[readers[0]].action != first for readers in sides)
