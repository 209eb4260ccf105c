"""One measured step taken into the cost model.

Note: [Least]
What a layer holds, and how far it rises, is learned from every measured step. What runs
between the layers, and what backwards leave, is learned from steps that recompute all:
there every input of a layer is held from its forward to its backward, whoever made it.
A kept layer may let go of its input (under autocast BERT's saves a copy of it alone).
So what the level says of a kept layer from its entry to the next one's, beyond what was
counted of both, is learned, too. What several layers read (a mask, a position bias)
goes behind the last of them if all of them are kept, and only then. So what a last one
shows is learned apart where all before it are kept. What goes later than that, or
without some of them, is counted longer than it is held.

Note: [Copies]
Within a context autocast casts each trained weight once and keeps the copy. A kept
layer's copies are among what it holds: its graph saves them. A recomputed layer's are
not, yet stay until the context ends, before the backward most often; its recomputation
makes others. By Note: [Least] all copies are in the gaps, and all go with the context.
So where a plan is judged, what kept layers hold was counted twice until then
(`mimose.cost.problem`). Where the context ends behind the root, that is in the midst of
the loss. How far this rises is counted from where all copies have gone.
Of BERT-large copies are a twentieth of the growth, of T5-large a tenth.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from mimose.cost.model import (
    AGAIN,
    CostModel,
    Key,
    backward_key,
    backward_sizes,
    beyond_key,
    ends_stack,
    gap_key,
    head_key,
    numbers,
)
from mimose.cost.pattern import Calls, Event, Pattern, around_of, gaps_of
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
    calls: Calls,
    between: tuple[Calls, ...] = (),
) -> CostModel:
    """Return the model that has taken in one measured step.

    Args:
        model: What was learned before.
        facts: What was known of the step before it ran.
        events: The events, as they ran.
        sample: What their segments say.
        released_bytes: Outputs of an earlier step that were freed between the
            root's exit and the first gradient; not this step's doing.
        calls: How often each layer was called.
        between: The same where each forward but the last has ended.
    """
    before = model.patterns.get(facts.context)
    ran = tuple(
        Event(e.name, e.layer, e.call, sys.intern(e.family), e.part) for e in events
    )
    pattern = before.including(ran, calls, between) if before else None
    if pattern is None:
        pattern = Pattern(ran, calls=calls, between=between, structure=facts.structure)
    own = {e.place: numbers(m.sizes) for e, m in zip(ran, events, strict=True)}
    sizes = tuple(own.get(event.place, ()) for event in pattern.events)
    pattern = pattern.taken_in(facts.sizes, sizes, calls)
    pattern = pattern.told(is_ordered=sample.is_ordered, copies_end=sample.copies_end)
    copied = {e.family: e.copied_bytes for e in events if e.copied_bytes}
    model = replace(model, copied={**model.copied, **copied})
    others = {c: p for c, p in model.patterns.items() if c != facts.context}
    patterns = {**others, facts.context: pattern}
    taken = _Readings(facts)
    taken.add_events(ran, events, sample.events)
    if ran_least(model, events):
        taken.add_rest(ran, events, sample, released_bytes, model.kinds["net"].noise)
    else:
        taken.add_beyond(model, ran, events, sample)
    if sample.copies_end == "loss" and sample.loss is not None:
        gone = model.copies_gone(ran, [event.action for event in events])
        taken.add_rise(sample.loss, released_bytes, gone, model.kinds["net"].noise)
    learned = model.with_readings(
        taken.by_key, n_steps=model.n_steps + 1, patterns=patterns
    )
    if before is not None and _plans_for_the_same(before, pattern):
        return learned
    return learned.distrusted()  # plans were made for other events


def ran_least(model: CostModel, events: Sequence[Measured]) -> bool:
    """Whether every event ran under the least of the actions that its layer may have.

    Args:
        model: Knows what layers may do.
        events: Of one step.
    """
    least = model.menu.least
    return all(
        event.action in (least, model.allowed(event.layer)[-1]) for event in events
    )


def _plans_for_the_same(before: Pattern, pattern: Pattern) -> bool:
    """Whether plans made so far speak of all that may run."""
    is_same = before.events == pattern.events and before.between == pattern.between
    return is_same and before.calls == pattern.calls


def _with_released(
    loss: SegmentSample, released_bytes: float, noise_bytes: float
) -> SegmentSample:
    """Return a loss as if no outputs of an earlier step had gone in it.

    They go as the root's new outputs take their names, before the loss's peak, if it
    rises at all. Learned as it was read, a loss outside of the model was predicted 22%
    too low, and differed from batch to batch by what the one before had returned.
    """
    net, excess, backward = loss.net_bytes, loss.excess_bytes, loss.backward_bytes
    if net is not None:
        net += released_bytes
    if excess is not None and excess > noise_bytes:
        excess += released_bytes
    if backward is not None:
        backward += released_bytes
    return SegmentSample(net, excess, backward)


def _own_forward(event: Measured, sample: EventSample) -> dict[str, float]:
    """Return how far forwards rose, by action; `AGAIN` in place of what did not run.

    A recomputation shows about what keeping takes, but not all that callers hold.
    """
    told = sample.forward_excess_bytes
    return {(a if a == event.action else AGAIN): n for a, n in told.items()}


class _Readings:
    """What one step says, by series.

    Args:
        facts: What was known of the step before it ran.
    """

    def __init__(self, facts: StepInput) -> None:
        self._facts = facts
        self.by_key: dict[Key, list[tuple[Sizes, float]]] = {}

    def _add(self, key: Key, sizes: Sizes, value: float | None) -> None:
        """Take note of a reading; None where a segment was disturbed."""
        if value is not None:
            self.by_key.setdefault(key, []).append((sizes, value))

    def add_events(
        self,
        ran: Sequence[Event],
        events: Sequence[Measured],
        samples: Sequence[EventSample],
    ) -> None:
        """Sort what layers hold and take, by family and action."""
        around = around_of(ran)
        for sample in samples:
            event, family = events[sample.event], ran[sample.event].family
            sizes = numbers(event.sizes)
            for kind, what, told in (
                ("exact", "held", sample.held_bytes),
                ("exact", "host", event.host_bytes),
                ("exact", "cost", sample.cost),
                ("excess", "forward", _own_forward(event, sample)),
            ):
                for action, value in told.items():
                    self._add((kind, family, what, action), sizes, value)
            own_output = event.kept_output_bytes
            self._add(("exact", family, "own output"), sizes, own_output)
            key = backward_key(self._facts, family, around[sample.event])
            behind = backward_sizes(self._facts, sizes, around[sample.event])
            for action, excess in sample.backward_excess_bytes.items():
                self._add(("excess", *key, action), behind, excess)

    def add_rest(
        self,
        ran: Sequence[Event],
        events: Sequence[Measured],
        sample: StepSample,
        released_bytes: float,
        noise_bytes: float,
    ) -> None:
        """Sort what backwards leave, and what runs between layers: Note: [Least]."""
        facts, around = self._facts, around_of(ran)
        for each in sample.events:
            key = backward_key(facts, ran[each.event].family, around[each.event])
            own = numbers(events[each.event].sizes)
            behind = backward_sizes(facts, own, around[each.event])
            for left in each.backward_net_bytes.values():
                self._add(("net", *key), behind, left)
        for pair, segment in zip(gaps_of(ran), sample.gaps, strict=True):
            self._add_segment(gap_key(facts, pair), segment)
        self._add_segment(head_key(facts, "head"), sample.head)
        if sample.loss is not None:
            loss = _with_released(sample.loss, released_bytes, noise_bytes)
            self._add_segment(head_key(facts, "loss"), loss)

    def add_beyond(
        self,
        model: CostModel,
        ran: Sequence[Event],
        events: Sequence[Measured],
        sample: StepSample,
    ) -> None:
        """Sort what layers that were kept hold beyond what was counted: Note: [Least].

        Args:
            model: Knows what was counted, and what gaps leave where all is recomputed.
            ran: The events, as they ran.
            events: What was measured of each.
            sample: What their segments say.
        """
        facts, around = self._facts, around_of(ran)
        keys = [
            *(gap_key(facts, pair) for pair in gaps_of(ran)),
            head_key(facts, "head"),
        ]
        segments = [*sample.gaps, sample.head]
        copied = sum(map(model.copied_bytes, ran))
        gone = model.copies_gone(ran, [event.action for event in events])
        are_kept = True
        for at, event in enumerate(events):
            net, action = segments[at + 1].net_bytes, event.action
            is_last = at + 1 == len(events)
            are_kept = are_kept and action == model.menu.first
            if net is None or not model.keeps_copies(action):
                continue
            if not (around[at][1] or is_last):
                continue  # what is behind it is another forward
            family, sizes = ran[at].family, numbers(event.sizes)
            if action not in event.held_bytes:  # then the segment has all of it
                net -= model.exact(family, "held", action).predict(sizes)
            net -= model.net(*keys[at + 1]).predict(facts.sizes)
            if sample.copies_end:
                net += model.copied_bytes(ran[at])
            if is_last and sample.copies_end == "head":
                net -= copied - gone
            of_all = are_kept and ends_stack(family, around[at])
            key = "net", *beyond_key(family, around[at], of_all=of_all), action
            self._add(key, sizes, float(round(net)))  # predictions have fractions

    def add_rise(
        self,
        loss: SegmentSample,
        released_bytes: float,
        gone_bytes: float,
        noise_bytes: float,
    ) -> None:
        """Take in how far a loss rises once all copies have gone: Note: [Copies].

        One that does not rise at all may have been lower as they went. Where the root
        returns it as a number, its backward tells.
        """
        loss = _with_released(loss, released_bytes, noise_bytes)
        excess, backward = loss.excess_bytes, loss.backward_bytes
        if excess is not None and excess <= noise_bytes:
            excess = backward
        if excess is not None:
            key = "excess", *head_key(self._facts, "rise")
            self._add(key, self._facts.sizes, excess + gone_bytes)

    def _add_segment(self, key: Key, sample: SegmentSample) -> None:
        self._add(("net", *key), self._facts.sizes, sample.net_bytes)
        self._add(("excess", *key), self._facts.sizes, sample.excess_bytes)
