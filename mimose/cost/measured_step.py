"""One measured step taken into the cost model."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from mimose.cost.copies import copied_bytes, evened, gone_before_loss, gone_bytes
from mimose.cost.layout import gaps_of, neighbours_of
from mimose.cost.model import (
    CostModel,
    Key,
    backward_key,
    gap_key,
    head_key,
    is_turn,
    numbers,
)
from mimose.cost.patterns import Pattern
from mimose.cost.sequences import Calls, Event
from mimose.cost.side_tensors import (
    holds_sides_to_the_end,
    known_sides,
    measured_sides,
    releases_sides,
    with_choice,
)
from mimose.types import (
    EventSample,
    Measured,
    SegmentSample,
    Sizes,
    StepInput,
    StepSample,
)


def with_step(
    model: CostModel,
    facts: StepInput,
    events: Sequence[Measured],
    sample: StepSample,
    released_bytes: float,
    calls: tuple[int, ...],
    between: tuple[tuple[int, ...], ...] = (),
) -> CostModel:
    """Return the model that has taken in one measured step.

    Args:
        model: What was learned before.
        facts: What was known of the step before it ran.
        events: The events, as they ran.
        sample: What their segments say.
        released_bytes: Outputs of an earlier step that were freed between the
            root's exit and the first gradient; not this step's doing.
        calls: How often each unit was called.
        between: The same where each forward but the last has ended.
    """
    facts = facts._replace(calls=calls)
    before = model.patterns.get(facts.context)
    ran = tuple(
        Event(e.name, e.unit, e.call, sys.intern(e.family), e.part) for e in events
    )
    pattern = _pattern(before, facts, ran, events, sample, between)
    sides = measured_sides(events)
    known = {event.place for event in before.events} if before else ()
    pattern, side_bytes = known_sides(
        pattern, known, ran, sides.n_bytes if sides else {}
    )
    copied = dict(model.copied)
    for event in events:
        if event.copied_bytes:
            copied[event.family] = event.copied_bytes
    others = {c: p for c, p in model.patterns.items() if c != facts.context}
    seen = replace(
        model,
        n_steps=model.n_steps + 1,
        patterns={**others, facts.context: pattern},
        families=model.families.union(event.family for event in pattern.events),
        copied=copied,
    )
    noise = model.kinds["net"].noise
    sample = _with_released(sample, released_bytes, noise)
    sample = _evened(seen, facts, events, sample, noise)
    step = _Step(seen, facts, seen.pattern(facts), events)
    if sides is not None:
        for group, n_bytes in side_bytes.items():
            key = "exact", facts.context, "side", group
            step.add(key, facts.sizes, float(n_bytes))
            readers = tuple(i for i, e in enumerate(ran) if e.place in group)
            n_passed = float(sides.n_passed.get(readers, 0))
            key = "exact", facts.context, "side passes", group
            step.add(key, facts.sizes, n_passed)
    step.add_events(sample.events)
    step.add_outside(sample)
    learned = seen.with_readings(step.readings)
    if before is None or _plans_for_the_same(before, pattern):
        return learned
    return learned.distrusted()  # plans were made for other events, or another loss


def _pattern(
    before: Pattern | None,
    facts: StepInput,
    ran: tuple[Event, ...],
    events: Sequence[Measured],
    sample: StepSample,
    between: tuple[Calls, ...],
) -> Pattern:
    """Return the context's pattern with this step; another, if it cannot be in one."""
    calls = facts.calls
    pattern = before.including(ran, calls, between) if before else None
    if pattern is None:
        pattern = Pattern(ran, calls=calls, between=between, structure=facts.structure)
    own = {e.place: numbers(m.sizes) for e, m in zip(ran, events, strict=True)}
    sizes = tuple(own.get(event.place, ()) for event in pattern.events)
    pattern = pattern.taken_in(facts.sizes, sizes, calls)
    return pattern.told(is_ordered=sample.is_ordered, copies_end=sample.copies_end)


def _plans_for_the_same(before: Pattern, pattern: Pattern) -> bool:
    """Whether plans made so far speak of all that may run."""
    is_same = before.events == pattern.events and before.between == pattern.between
    return is_same and before.counts == pattern.counts


class _Step:
    """Sorts what a step says by series.

    Args:
        model: That knows the step's pattern.
        facts: What was known of the step before it ran.
        pattern: The context's.
        events: As they ran.
    """

    def __init__(
        self,
        model: CostModel,
        facts: StepInput,
        pattern: Pattern,
        events: Sequence[Measured],
    ) -> None:
        self._model = model
        self._facts = facts
        self._pattern = pattern
        self._events = events
        self._sides = with_choice(model, pattern)
        self.readings: dict[Key, list[tuple[Sizes, float]]] = {}

    def add(self, key: Key, sizes: Sizes, value: float | None) -> None:
        """Take note of a reading; None where a segment was disturbed."""
        if value is not None:
            self.readings.setdefault(key, []).append((sizes, value))

    def add_events(self, samples: Sequence[EventSample]) -> None:
        """Sort what is a layer's own, by family and action."""
        first = self._model.menu.first
        has_nets = holds_sides_to_the_end(self._sides, self._events, first)
        around = neighbours_of(self._pattern.events)
        for index, sample in enumerate(samples):
            event, family = self._events[index], self._pattern.events[index].family
            sizes = numbers(event.sizes)
            for action, held in sample.held_bytes.items():
                self.add(("exact", family, "held", action), sizes, held)
            for action, excess in sample.forward_excess_bytes.items():
                self.add(("excess", family, "forward", action), sizes, excess)
            for action, cost in sample.cost.items():
                self.add(("exact", family, "whole cost", action), sizes, cost)
            for action, n_bytes in event.host_bytes.items():
                self.add(("exact", family, "host", action), sizes, n_bytes)
            if not self._is_alike(index):
                continue
            key = backward_key(self._facts, family, around[index])
            if is_turn(around[index]):
                sizes = self._facts.sizes
            for action, excess in sample.backward_excess_bytes.items():
                self.add(("excess", *key, action), sizes, excess)
            if has_nets:
                for action, net in sample.backward_net_bytes.items():
                    self.add(("net", *key, action), sizes, net)

    def _is_alike(self, index: int) -> bool:
        """Whether a pair is like those that plans are made of.

        What lies in front decides which of the two frees the tensor between them, if
        it saves that at all.
        """
        event, behind = self._events[index], self._events[index - 1] if index else None
        if behind is None or behind.action == event.action:
            return True
        menu = self._model.menu
        if menu.hands_on(behind.action) == menu.hands_on(event.action):
            return True  # both hold what they return, if they save it, or neither
        return any(self._model.is_settled(e.unit) for e in (event, behind))

    def add_outside(self, sample: StepSample) -> None:
        """Sort what runs between and behind the events: Note: [Side tensors]."""
        facts, menu = self._facts, self._model.menu
        last = self._events[-1].action if self._events else menu.least
        is_told = not releases_sides(self._sides, self._events, menu.first)
        loss = sample.loss
        if loss is not None and gone_before_loss(self._model, facts):
            is_least = ran_least(self._model, self._events)
            which = menu.least if is_least else menu.first  # R0 or R1
            key = head_key(facts, "loss", which)
            self.add(("excess", *key), facts.sizes, loss.excess_bytes)
        elif loss is not None and is_told:
            key = head_key(facts, "loss", last)
            self.add(("excess", *key), facts.sizes, loss.excess_bytes)
        if not is_told:
            return
        if loss is not None:
            key = head_key(facts, "loss", last)
            self.add(("net", *key), facts.sizes, loss.net_bytes)
        pairs = gaps_of(self._pattern.events)
        for pair, measured in zip(pairs, sample.gaps, strict=True):
            self._add_segment(gap_key(facts, pair), measured)
        self._add_segment(head_key(facts, "head", last), sample.head)

    def _add_segment(self, key: Key, sample: SegmentSample) -> None:
        self.add(("net", *key), self._facts.sizes, sample.net_bytes)
        self.add(("excess", *key), self._facts.sizes, sample.excess_bytes)


def ran_least(model: CostModel, events: Sequence[Measured]) -> bool:
    """Whether every event ran under the least of the actions that its unit may have.

    Args:
        model: Knows what units may do.
        events: Of one step.
    """
    least = model.menu.least
    return all(
        event.action in (least, model.allowed(event.unit)[-1]) for event in events
    )


def _with_released(
    sample: StepSample, released_bytes: float, noise_bytes: float
) -> StepSample:
    """Put the loss on the footing of a step in which no earlier outputs went.

    They go as the root's new outputs take their names, before the loss's peak, if it
    rises at all. Learned as it was read, a loss outside of the model was predicted 22%
    too low, and differed from batch to batch by what the one before had returned.
    """
    loss = sample.loss
    if loss is None or not released_bytes:
        return sample
    net, excess = loss.net_bytes, loss.excess_bytes
    if net is not None:
        net += released_bytes
    if excess is not None and excess > noise_bytes:
        excess += released_bytes
    return replace(sample, loss=SegmentSample(net, excess))


def _evened(
    model: CostModel,
    facts: StepInput,
    events: Sequence[Measured],
    sample: StepSample,
    noise_bytes: float,
) -> StepSample:
    """Even out, for kept layers, what follows from autocast's copies."""
    first = model.menu.first
    copied = [copied_bytes(model, event.unit, event.family) for event in events]
    kept = [
        n_bytes if event.action == first and not event.call else 0.0
        for event, n_bytes in zip(events, copied, strict=True)
    ]
    if not sum(kept):
        return sample
    units = [event.unit for event in events]
    gone = gone_bytes(
        list(zip(units, copied, strict=True)),
        {event.unit for event in events if event.action == first},
    )
    least = model.excess(*head_key(facts, "loss", model.menu.least))
    most = math.inf  # where R0 is not known, nothing is told of R1
    if not least.doubt(facts.sizes):
        most = least.predict(facts.sizes) + 5 * noise_bytes + 1.0
    return evened(sample, kept, gone, most)
