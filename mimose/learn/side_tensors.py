"""Tensors that several layers read and none of them makes.

Note: [Side tensors]
What runs between layers makes tensors that several layers read and none of them makes:
a mask, a position bias. A recomputed reader holds them from its forward to its
backward; a kept one only if it saves them. By convention they count as held in every
plan, from where they are made to the backward of their first reader, and the judge
takes them off where all readers are kept. So gaps and heads are learned from steps in
which some reader of each was recomputed, and the layers' net changes from steps in
which the first reader was. Learned from all steps, T5's peaks were predicted up to 5%
too low. (Kept is whatever ran under the menu's first action; of any other a reader is
taken to hold them.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mimose.learn.model import CostModel
from mimose.learn.patterns import Pattern, SideTensor
from mimose.types import Measured, StepInput

Readers = tuple[int, ...]
"""Positions of the events that read a side tensor."""


def measured_sides(events: Sequence[Measured]) -> Mapping[Readers, int] | None:
    """Sum up, by readers, the storages that none of the readers would hold.

    Args:
        events: Of one step.

    Returns:
        Bytes; None where a kept event's forward was not watched.
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
    totals: dict[Readers, int] = {}
    for key, read_by in readers.items():
        if key not in saved:
            group = tuple(read_by)
            totals[group] = totals.get(group, 0) + n_bytes[key]
    return totals


def side_tensors(model: CostModel, facts: StepInput) -> list[SideTensor]:
    """Return what a plan that keeps all the readers does not hold.

    Args:
        model: What was learned.
        facts: The step's context, which is known, and its sizes.
    """
    found = []
    pattern = model.patterns[facts.context]
    settled = settled_events(model, pattern)
    for group in pattern.sides:
        readers = tuple(reader for reader in group if reader not in settled)
        series = model.exact(facts.context, "side", group)
        if readers and not series.doubt(facts.sizes):
            found.append(SideTensor(readers, series.predict(facts.sizes)))
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
    settled = settled_events(model, pattern)
    left = [
        tuple(reader for reader in readers if reader not in settled)
        for readers in pattern.sides
    ]
    return [readers for readers in left if readers]


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
