"""One measured step taken into the cost model.

Note: [Least]
What a layer holds, and how far it rises, is learned from every measured step. What runs
between the layers, and what backwards leave, is learned from steps that recompute all:
there every input of a layer is held from its forward to its backward.
A kept layer may free its input (under autocast BERT's saves a copy of it alone).
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
    """Return the model that has taken in one measured step.

    Args:
        model: What was learned before.
        step_input: What was known of the step before it ran.
        calls: The calls, as they ran.
        sample: What their segments say.
        released_bytes: Outputs of an earlier step that were freed between the
            root's exit and the first gradient; not this step's doing.
        counts: How often each layer was called.
        between: The same where each forward but the last has ended.
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
    copied = {e.family: e.copied_bytes for e in calls if e.copied_bytes}
    model = replace(model, copied={**model.copied, **copied})
    others = {c: p for c, p in model.patterns.items() if c != step_input.context}
    patterns = {**others, step_input.context: pattern}
    taken = _Readings(step_input)
    taken.add_calls(ran, calls, sample.calls)
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


def ran_least(model: CostModel, calls: Sequence[Measured]) -> bool:
    """Whether every call ran under the least of the actions that its layer may have.

    Args:
        model: Knows what layers may do.
        calls: Of one step.
    """
    least = model.menu.least
    return all(call.action in (least, model.allowed(call.layer)[-1]) for call in calls)


def _plans_for_the_same(before: Pattern, pattern: Pattern) -> bool:
    """Whether plans made so far speak of all that may run."""
    is_same = before.calls == pattern.calls and before.between == pattern.between
    return is_same and before.counts == pattern.counts


def _with_released(
    loss: SegmentSample, released_bytes: float, noise_bytes: float
) -> SegmentSample:
    """Return a loss as if no outputs of an earlier step had gone in it.

    They go as the root's new outputs take their names, before the loss's peak, if it
    rises at all. Learned as it was read, a loss outside of the model was predicted 22%
    too low, and differed from batch to batch by what the one before had returned.
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
    """Return how far forwards rose, by action; `AGAIN` in place of what did not run.

    A recomputation shows about what keeping takes, but not all that callers hold.
    """
    values = sample.forward_transient_bytes
    return {(a if a == call.action else AGAIN): n for a, n in values.items()}


class _Readings:
    """What one step says, by series.

    Args:
        step_input: What was known of the step before it ran.
    """

    def __init__(self, step_input: StepInput) -> None:
        self._step_input = step_input
        self.by_key: dict[Key, list[tuple[Sizes, float]]] = {}

    def _add(self, key: Key, sizes: Sizes, value: float | None) -> None:
        """Record a reading; None where a segment was disturbed."""
        if value is not None:
            self.by_key.setdefault(key, []).append((sizes, value))

    def add_calls(
        self,
        ran: Sequence[LayerCall],
        calls: Sequence[Measured],
        samples: Sequence[CallSample],
    ) -> None:
        """Sort what layers hold and take, by family and action."""
        around = around_of(ran)
        for sample in samples:
            call, family = calls[sample.call], ran[sample.call].family
            sizes = numbers(call.sizes)
            for kind, what, values in (
                ("exact", "held", sample.held_bytes),
                ("exact", "host", call.host_bytes),
                ("exact", "cost", sample.cost),
                ("transient", "forward", _own_forward(call, sample)),
            ):
                for action, value in values.items():
                    self._add((kind, family, what, action), sizes, value)
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
        """Sort what backwards leave, and what runs between layers: Note: [Least]."""
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
        """Sort what layers that were kept hold beyond what was counted: Note: [Least].

        Args:
            model: Knows what was counted, and what gaps leave where all is recomputed.
            ran: The calls, as they ran.
            calls: What was measured of each.
            sample: What their segments say.
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
            if retained is None or not model.keeps_copies(action):
                continue
            if not (around[at][1] or is_last):
                continue  # what is behind it is another forward
            family, sizes = ran[at].family, numbers(call.sizes)
            if action not in call.held_bytes:  # then the segment has all of it
                retained -= model.exact(family, "held", action).predict(sizes)
            retained -= model.retained(*keys[at + 1]).predict(step_input.sizes)
            if sample.copies_end:
                retained += model.copied_bytes(ran[at])
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
        """Take in how far a loss rises once all copies have gone: Note: [Copies].

        One that does not rise at all may have been lower as they went. Where the root
        returns it as a number, its backward tells.
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
