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
from dataclasses import dataclass, replace

from mimose.cost.model import (
    AGAIN,
    CostModel,
    Key,
    backward_key,
    backward_sizes,
    beyond_key,
    gap_key,
    head_key,
    numbers,
)
from mimose.cost.pattern import CallCounts, LayerCall, Pattern, around_of, gaps_of
from mimose.types import Measured, SegmentSample, Sizes, StepInput, StepSample


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What a measured step has shown."""

    step_input: StepInput
    calls: Sequence[Measured]
    """In the order in which they ran."""
    sample: StepSample
    """The samples of all segments."""
    released_bytes: float
    """Outputs of an earlier step that were freed between the end of the forward and the
    first gradient. They are not part of this step's cost."""
    counts: CallCounts
    """How often each layer was called."""
    between: tuple[CallCounts, ...] = ()
    """The same at the end of each forward but the last."""
    growth_bytes: float = 0.0
    """Its growth, or what it could be under another plan."""


def with_step(model: CostModel, step: MeasuredStep) -> CostModel:
    """Return the model that has learned from one measured step."""
    step_input, sample = step.step_input, step.sample
    counts, between = step.counts, step.between
    before = model.patterns.get(step_input.context)
    ran = tuple(
        LayerCall(e.name, e.layer, e.number, sys.intern(e.family), e.part)
        for e in step.calls
    )
    pattern = before.including(ran, counts, between) if before else None
    if pattern is None:
        pattern = Pattern(
            ran, counts=counts, between=between, structure=step_input.structure
        )
    own = {e.place: numbers(m.sizes) for e, m in zip(ran, step.calls, strict=True)}
    sizes = tuple(own.get(call.place, ()) for call in pattern.calls)
    pattern = pattern.taken_in(step_input.sizes, sizes, counts)
    counted = {e.place for e, m in zip(ran, step.calls, strict=True) if m.held_bytes}
    pattern = replace(
        pattern,
        is_ordered=sample.is_ordered,
        copies_end=sample.copies_end,
        counted=tuple(sorted(counted.union(pattern.counted))),
    )
    copied = {**model.copied, **_copied(model, step.calls)}
    seen = {call.family: call.precision for call in step.calls if call.precision}
    scale = max(model.scale, step.growth_bytes)
    precisions = {**model.precisions, **seen}
    model = replace(model, copied=copied, scale=scale, precisions=precisions)
    others = {c: p for c, p in model.patterns.items() if c != step_input.context}
    learned = model.with_readings(
        _Readings(model, step, ran).by_key,
        n_steps=model.n_steps + 1,
        patterns={**others, step_input.context: pattern},
    )
    now = pattern.calls, pattern.between, pattern.counts
    if before and (before.calls, before.between, before.counts) == now:
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
            held.setdefault(call.action, call.copied_bytes)
        for action, dropped in call.dropped_copies.items():
            own = call.copied_bytes - dropped
            held[action] = min(own, held.get(action, own))
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


def _with_released(
    loss: SegmentSample, released_bytes: float, noise_bytes: float
) -> SegmentSample:
    """Return a loss segment as if it had freed no outputs of an earlier step.

    They are freed when the user's variables get the new outputs, before the peak of the
    loss, if it has one. Without this correction, a loss outside the model was predicted
    22% too low, and depended on the outputs of the batch before.
    """
    backward, transient = loss.backward_bytes, loss.transient_bytes
    if transient is not None and transient > noise_bytes:
        transient += released_bytes
    return SegmentSample(
        None if loss.retained_bytes is None else loss.retained_bytes + released_bytes,
        transient,
        None if backward is None else backward + released_bytes,
    )


class _Readings:
    """The readings of one step, by series.

    Args:
        model: The model, which knows the copies of this step.
        step: The step.
        ran: Its calls.
    """

    def __init__(
        self, model: CostModel, step: MeasuredStep, ran: Sequence[LayerCall]
    ) -> None:
        self.by_key: dict[Key, list[tuple[Sizes, float]]] = {}
        self._model, self._step, self._ran = model, step, ran
        self._around, self._noise = around_of(ran), model.kinds["retained"].noise
        step_input, sample, loss = step.step_input, step.sample, step.sample.loss
        if loss is not None:
            loss = _with_released(loss, step.released_bytes, self._noise)
        gaps = [gap_key(step_input, pair) for pair in gaps_of(ran)]
        between = [*gaps, head_key(step_input, "head")]
        segments = [*sample.gaps, sample.head]
        is_least = ran_least(model, step.calls)
        self._add_calls(is_least=is_least)
        if is_least:
            for key, segment in zip(between, segments, strict=True):
                self._add_segment(key, segment)
            if loss is not None:
                self._add_segment(head_key(step_input, "loss"), loss)
        else:
            self._add_beyond(between, segments)
        if sample.copies_end == "loss" and loss is not None:
            self._add_rise(loss)

    def _add(self, key: Key, sizes: Sizes, value: float | None) -> None:
        """Record a reading; None if its segment was disturbed."""
        if value is not None:
            self.by_key.setdefault(key, []).append((sizes, value))

    def _add_segment(self, key: Key, segment: SegmentSample) -> None:
        """Add what runs between layers: Note: [Least]."""
        sizes = self._step.step_input.sizes
        self._add(("retained", *key), sizes, segment.retained_bytes)
        self._add(("transient", *key), sizes, segment.transient_bytes)

    def _add_calls(self, *, is_least: bool) -> None:
        """Add what layers hold and take, by family and action.

        What backwards retain only if all ran under the least action: Note: [Least].
        """
        model, step_input = self._model, self._step.step_input
        for sample in self._step.sample.calls:
            call, family = self._step.calls[sample.call], self._ran[sample.call].family
            around, sizes = self._around[sample.call], numbers(call.sizes)
            held = dict(sample.held_bytes)
            # A recomputation shows about the peak of a kept forward, without what
            # callers hold.
            forward = {
                (action if action == call.action else AGAIN): value
                for action, value in sample.forward_transient_bytes.items()
            }
            cost, moved = dict(sample.cost), dict(call.moved_bytes)
            if self._is_known_again(call):
                held.pop(model.menu.first, None)
                if model.menu.spec(call.action).rebuilds:
                    for each in (held, cost, moved):
                        each.pop(call.action, None)
            for kind, what, values in (
                ("exact", "held", held),
                ("exact", "host", call.host_bytes),
                ("exact", "cost", cost),
                ("exact", "moved", moved),
                ("transient", "forward", forward),
            ):
                for action, value in values.items():
                    self._add((kind, family, what, action), sizes, value)
            self._add(("exact", family, "own output"), sizes, call.kept_output_bytes)
            largest = call.largest_bytes or None
            self._add(("exact", family, "largest"), sizes, largest)
            key = backward_key(step_input, family, around)
            behind = backward_sizes(step_input, sizes, around)
            for action, transient in sample.backward_transient_bytes.items():
                self._add(("transient", *key, action), behind, transient)
            for left in sample.backward_retained_bytes.values() if is_least else ():
                self._add(("retained", *key), behind, left)

    def _is_known_again(self, call: Measured) -> bool:
        """Whether recomputations show what a call holds that does not recompute.

        Autocast casts an input once in a recomputation, where it is a leaf, and for
        each reader in a forward. The readings would not agree.
        """
        model = self._model
        return model.reruns(call) and not model.menu.spec(call.action).recomputes

    def _add_beyond(
        self, between: Sequence[Key], segments: Sequence[SegmentSample]
    ) -> None:
        """Add what kept layers hold beyond what was counted: Note: [Least].

        Args:
            between: The key of the gap before each call, and of the head.
            segments: Their samples.
        """
        model, calls = self._model, self._step.calls
        copies_end, are_kept = self._step.sample.copies_end, True
        for at, (ran, call) in enumerate(zip(self._ran, calls, strict=True)):
            retained, action = segments[at + 1].retained_bytes, call.action
            is_last = at + 1 == len(calls)
            are_kept = are_kept and action == model.menu.first
            if retained is None or model.menu.spec(action).recomputes:
                continue
            around, sizes = self._around[at], numbers(call.sizes)
            if not (around[1] or is_last):
                continue  # another forward follows
            counted = call.held_bytes.get(action)
            is_again = action == model.menu.first or model.menu.spec(action).rebuilds
            if counted is None or (is_again and self._is_known_again(call)):
                # The gap contains what was not counted.
                known = model.predict(("exact", ran.family, "held", action), sizes)
                retained += (counted or 0.0) - known
            key = "retained", *between[at + 1]
            retained -= model.predict(key, self._step.step_input.sizes)
            if copies_end:
                retained += model.copied_bytes(ran, action)
            if is_last and copies_end == "head":
                copied = sum(map(model.copied_bytes, self._ran))
                retained -= copied - self._copies_gone()
            of_all = are_kept and around[1] != ran.family
            key = "retained", *beyond_key(ran.family, around, of_all=of_all), action
            self._add(key, sizes, float(round(retained)))  # predictions have fractions

    def _add_rise(self, loss: SegmentSample) -> None:
        """Add the loss's transient peak without all copies: Note: [Copies].

        If the loss has none, its level may have been lower when the copies were freed.
        If the model returns the loss, its backward shows the peak.
        """
        transient = loss.transient_bytes
        if transient is not None and transient <= self._noise:
            transient = loss.backward_bytes
        if transient is not None:
            key = "transient", *head_key(self._step.step_input, "rise")
            transient += self._copies_gone()
            self._add(key, self._step.step_input.sizes, transient)

    def _copies_gone(self) -> float:
        actions = [call.action for call in self._step.calls]
        return self._model.copies_gone(self._ran, actions)
