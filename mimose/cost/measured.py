"""Teaches the cost model one measured step.

Note: [Least]
Each measured step shows what a layer holds and its transient peaks. Only steps that
recompute everything show what runs between layers and what backwards retain: there
every input of a layer is held from its forward to its backward.
A kept layer may free its input (under autocast, BERT's saves only a copy of it). So the
model also learns what a kept layer holds beyond what was counted: the change of the
level from its entry to the next layer's entry, minus what was counted of both. A tensor
that several layers read (a mask, a position bias) is freed after the last of them if,
and only if, all of them are kept. So the last layer's value is learned separately if
all layers before it are kept. If such a tensor is freed later, or with some of them
recomputed, the prediction counts it for longer than it is held.

Note: [Copies]
Within an autocast context, autocast casts each trained weight once and keeps the copy.
What a kept layer holds includes its copies, because its graph saves them. `selective`
drops most of them. The copies that no graph saves stay until the context ends, usually
before the backward; a recomputation makes new ones. By Note: [Least] all copies are in
the gaps, and are freed with the context. So until then, copies that a graph saves are
counted twice, and `mimose.cost.problem` takes them off. If the context ends after the
model's forward, that is in the middle of the loss. The loss's transient peak counts
from the level without all copies. Copies are a twentieth of the growth of BERT-large, a
tenth of T5-large's.
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
from mimose.cost.pattern import CallCounts, LayerCall, Pattern, around_of, gaps_of
from mimose.types import (
    CallSample,
    Measured,
    SegmentSample,
    Sizes,
    StepInput,
    StepSample,
)


def with_step(
    model: CostModel,
    step_input: StepInput,
    calls: Sequence[Measured],
    sample: StepSample,
    released_bytes: float,
    counts: CallCounts,
    between: tuple[CallCounts, ...] = (),
) -> CostModel:
    """Return the model that has learned from one measured step.

    Args:
        model: The model before.
        step_input: The step's context and sizes.
        calls: The calls, in the order in which they ran.
        sample: The samples of all segments.
        released_bytes: Outputs of an earlier step that were freed between the end of
            the forward and the first gradient. They are not part of this step's cost.
        counts: How often each layer was called.
        between: The same at the end of each forward but the last.
    """
    before = model.patterns.get(step_input.context)
    ran = tuple(
        LayerCall(e.name, e.layer, e.number, sys.intern(e.family), e.part)
        for e in calls
    )
    pattern = before.including(ran, counts, between) if before else None
    if pattern is None:
        pattern = Pattern(
            ran, counts=counts, between=between, structure=step_input.structure
        )
    own = {e.place: numbers(m.sizes) for e, m in zip(ran, calls, strict=True)}
    sizes = tuple(own.get(call.place, ()) for call in pattern.calls)
    pattern = pattern.taken_in(step_input.sizes, sizes, counts)
    pattern = pattern.with_fields(
        is_ordered=sample.is_ordered, copies_end=sample.copies_end
    )
    model = replace(model, copied={**model.copied, **_copied(model, calls)})
    others = {c: p for c, p in model.patterns.items() if c != step_input.context}
    patterns = {**others, step_input.context: pattern}
    taken = _Readings(step_input)
    taken.add_calls(ran, calls, sample.calls, model)
    if ran_least(model, calls):
        taken.add_rest(
            ran, calls, sample, released_bytes, model.kinds["retained"].noise
        )
    else:
        taken.add_beyond(model, ran, calls, sample)
    if sample.copies_end == "loss" and sample.loss is not None:
        gone = model.copies_gone(ran, [call.action for call in calls])
        taken.add_rise(sample.loss, released_bytes, gone, model.kinds["retained"].noise)
    learned = model.with_readings(
        taken.by_key, n_steps=model.n_steps + 1, patterns=patterns
    )
    if before is not None and _plans_for_the_same(before, pattern):
        return learned
    return learned.distrusted()  # plans were made for other calls


def _copied(model: CostModel, calls: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Return the bytes of copies that calls hold, by family and action."""
    first, found = model.menu.first, dict[str, dict[str, float]]()
    for call in calls:
        if not call.copied_bytes:
            continue
        held = found.setdefault(call.family, {first: call.copied_bytes})
        if call.action != first and not model.menu.spec(call.action).recomputes:
            own = call.copied_bytes - call.dropped_copies
            held[call.action] = min(own, held.get(call.action, own))
    return {
        name: {**model.copied.get(name, {}), **held} for name, held in found.items()
    }


def ran_least(model: CostModel, calls: Sequence[Measured]) -> bool:
    """Whether each call ran under the least action that its layer allows.

    Args:
        model: Knows the allowed actions.
        calls: The calls of one step.
    """
    least = model.menu.least
    return all(call.action in (least, model.allowed(call.layer)[-1]) for call in calls)


def _plans_for_the_same(before: Pattern, pattern: Pattern) -> bool:
    """Whether two patterns have the same calls, so that plans stay valid."""
    is_same = before.calls == pattern.calls and before.between == pattern.between
    return is_same and before.counts == pattern.counts


def _with_released(
    loss: SegmentSample, released_bytes: float, noise_bytes: float
) -> SegmentSample:
    """Return a loss segment as if it had freed no outputs of an earlier step.

    They are freed when the user's variables get the new outputs, before the peak of the
    loss, if it has one. Without this correction, a loss outside the model was predicted
    22% too low, and depended on the outputs of the batch before.
    """
    retained, transient, backward = (
        loss.retained_bytes,
        loss.transient_bytes,
        loss.backward_bytes,
    )
    if retained is not None:
        retained += released_bytes
    if transient is not None and transient > noise_bytes:
        transient += released_bytes
    if backward is not None:
        backward += released_bytes
    return SegmentSample(retained, transient, backward)


def _own_forward(call: Measured, sample: CallSample) -> dict[str, float]:
    """Return forward transient peaks by action; `AGAIN` for actions that did not run.

    A recomputation shows about the peak of a kept forward, without what callers hold.
    """
    values = sample.forward_transient_bytes
    return {(a if a == call.action else AGAIN): n for a, n in values.items()}


class _Readings:
    """The readings of one step, by series.

    Args:
        step_input: The step's context and sizes.
    """

    def __init__(self, step_input: StepInput) -> None:
        self._step_input = step_input
        self.by_key: dict[Key, list[tuple[Sizes, float]]] = {}

    def _add(self, key: Key, sizes: Sizes, value: float | None) -> None:
        """Record a reading; None if its segment was disturbed."""
        if value is not None:
            self.by_key.setdefault(key, []).append((sizes, value))

    def add_calls(
        self,
        ran: Sequence[LayerCall],
        calls: Sequence[Measured],
        samples: Sequence[CallSample],
        model: CostModel,
    ) -> None:
        """Add what layers hold and take, by family and action."""
        around, first = around_of(ran), model.menu.first
        for sample in samples:
            call, family = calls[sample.call], ran[sample.call].family
            sizes, held = numbers(call.sizes), dict(sample.held_bytes)
            if model.reruns(call) and not model.menu.spec(call.action).recomputes:
                # Autocast casts an input once in a recomputation, where it is a leaf,
                # and for each reader in a forward. The readings would not agree.
                held.pop(first, None)
            for kind, what, values in (
                ("exact", "held", held),
                ("exact", "host", call.host_bytes),
                ("exact", "cost", sample.cost),
                ("transient", "forward", _own_forward(call, sample)),
            ):
                for action, value in values.items():
                    self._add((kind, family, what, action), sizes, value)
            if call.moved_bytes:
                moved = "exact", family, "moved", call.action
                self._add(moved, sizes, call.moved_bytes)
            own_output = call.kept_output_bytes
            self._add(("exact", family, "own output"), sizes, own_output)
            key = backward_key(self._step_input, family, around[sample.call])
            behind = backward_sizes(self._step_input, sizes, around[sample.call])
            for action, transient in sample.backward_transient_bytes.items():
                self._add(("transient", *key, action), behind, transient)

    def add_rest(
        self,
        ran: Sequence[LayerCall],
        calls: Sequence[Measured],
        sample: StepSample,
        released_bytes: float,
        noise_bytes: float,
    ) -> None:
        """Add what backwards retain, and what runs between layers: Note: [Least]."""
        step_input, around = self._step_input, around_of(ran)
        for each in sample.calls:
            key = backward_key(step_input, ran[each.call].family, around[each.call])
            own = numbers(calls[each.call].sizes)
            behind = backward_sizes(step_input, own, around[each.call])
            for left in each.backward_retained_bytes.values():
                self._add(("retained", *key), behind, left)
        for pair, segment in zip(gaps_of(ran), sample.gaps, strict=True):
            self._add_segment(gap_key(step_input, pair), segment)
        self._add_segment(head_key(step_input, "head"), sample.head)
        if sample.loss is not None:
            loss = _with_released(sample.loss, released_bytes, noise_bytes)
            self._add_segment(head_key(step_input, "loss"), loss)

    def add_beyond(
        self,
        model: CostModel,
        ran: Sequence[LayerCall],
        calls: Sequence[Measured],
        sample: StepSample,
    ) -> None:
        """Add what kept layers hold beyond what was counted: Note: [Least].

        Args:
            model: Knows what was counted, and the gaps of steps that recompute all.
            ran: The calls, in the order in which they ran.
            calls: The measurements of each.
            sample: The samples of all segments.
        """
        step_input, around = self._step_input, around_of(ran)
        keys = [
            *(gap_key(step_input, pair) for pair in gaps_of(ran)),
            head_key(step_input, "head"),
        ]
        segments = [*sample.gaps, sample.head]
        copied = sum(map(model.copied_bytes, ran))
        gone = model.copies_gone(ran, [call.action for call in calls])
        are_kept = True
        for at, call in enumerate(calls):
            retained, action = segments[at + 1].retained_bytes, call.action
            is_last = at + 1 == len(calls)
            are_kept = are_kept and action == model.menu.first
            if retained is None or model.menu.spec(action).recomputes:
                continue
            if not (around[at][1] or is_last):
                continue  # another forward follows
            family, sizes = ran[at].family, numbers(call.sizes)
            counted = call.held_bytes.get(action)
            if counted is None or (action == model.menu.first and model.reruns(call)):
                # The gap contains what was not counted.
                known = model.exact(family, "held", action).predict(sizes)
                retained += (counted or 0.0) - known
            retained -= model.retained(*keys[at + 1]).predict(step_input.sizes)
            if sample.copies_end:
                retained += model.copied_bytes(ran[at], action)
            if is_last and sample.copies_end == "head":
                retained -= copied - gone
            of_all = are_kept and ends_stack(family, around[at])
            key = "retained", *beyond_key(family, around[at], of_all=of_all), action
            self._add(key, sizes, float(round(retained)))  # predictions have fractions

    def add_rise(
        self,
        loss: SegmentSample,
        released_bytes: float,
        gone_bytes: float,
        noise_bytes: float,
    ) -> None:
        """Add the loss's transient peak without all copies: Note: [Copies].

        If the loss has none, its level may have been lower when the copies were freed.
        If the model returns the loss, its backward shows the peak.
        """
        loss = _with_released(loss, released_bytes, noise_bytes)
        transient, backward = loss.transient_bytes, loss.backward_bytes
        if transient is not None and transient <= noise_bytes:
            transient = backward
        if transient is not None:
            key = "transient", *head_key(self._step_input, "rise")
            self._add(key, self._step_input.sizes, transient + gone_bytes)

    def _add_segment(self, key: Key, sample: SegmentSample) -> None:
        self._add(("retained", *key), self._step_input.sizes, sample.retained_bytes)
        self._add(("transient", *key), self._step_input.sizes, sample.transient_bytes)
