"""Teaches the cost model one measured step.

Note: [Least]
Each measured step shows what a layer holds and its transient peaks. Only steps that
recompute everything show what runs between layers and what backwards retain: there
every input of a layer is held from its forward to its backward.
What kept layers change of that is in `mimose.cost.uncounted`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mimose.cost.copies import copies_held, peak_without_copies
from mimose.cost.model import CostModel, numbers
from mimose.cost.pattern import CallCounts, LayerCall, Pattern, gaps_of, neighbours_of
from mimose.cost.quantity import (
    AGAIN,
    Quantity,
    QuantityKind,
    QuantityName,
    backward_sizes,
    of_backward,
    of_end,
    of_gap,
)
from mimose.cost.uncounted import uncounted_readings
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
    copied = copies_held(model, step.calls)
    seen = {call.family: call.precision for call in step.calls if call.precision}
    scale = max(model.scale, step.growth_bytes)
    precisions = {**model.precisions, **seen}
    model = replace(model, copied=copied, scale=scale, precisions=precisions)
    others = {c: p for c, p in model.patterns.items() if c != step_input.context}
    learned = model.with_readings(
        _Readings(model, step, ran).by_quantity,
        n_steps=model.n_steps + 1,
        patterns={**others, step_input.context: pattern},
    )
    now = pattern.calls, pattern.between, pattern.counts
    if before and (before.calls, before.between, before.counts) == now:
        return learned
    return learned.distrusted()  # plans were made for other calls


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
        self.by_quantity: dict[Quantity, list[tuple[Sizes, float]]] = {}
        self._model, self._step, self._ran = model, step, ran
        noise = model.kinds["retained"].noise
        step_input, sample, loss = step.step_input, step.sample, step.sample.loss
        if loss is not None:
            loss = _with_released(loss, step.released_bytes, noise)
        is_least = ran_least(model, step.calls)
        self._add_calls(is_least=is_least)
        if is_least:
            self._add_between("retained")
            self._add_between("transient")
            if loss is not None:
                retained = of_end("retained", step_input, "loss")
                self._add(retained, step_input.sizes, loss.retained_bytes)
                transient = of_end("transient", step_input, "loss")
                self._add(transient, step_input.sizes, loss.transient_bytes)
        else:
            gaps = self._between("retained")
            for reading in uncounted_readings(
                model, step_input, ran, step.calls, gaps, sample
            ):
                self._add(*reading)
        if sample.copies_end == "loss" and loss is not None:
            actions = [call.action for call in step.calls]
            peak = peak_without_copies(model, ran, actions, loss, noise)
            read = of_end("transient", step_input, "loss without copies")
            self._add(read, step_input.sizes, peak)

    def _add(self, quantity: Quantity, sizes: Sizes, value: float | None) -> None:
        """Record a reading; None if its segment was disturbed."""
        if value is not None:
            self.by_quantity.setdefault(quantity, []).append((sizes, value))

    def _between(self, kind: QuantityKind) -> list[Quantity]:
        """Return a quantity of the gap before each call, and of the head."""
        step_input = self._step.step_input
        gaps = [of_gap(kind, step_input, pair) for pair in gaps_of(self._ran)]
        return [*gaps, of_end(kind, step_input, "head")]

    def _add_between(self, kind: Literal["retained", "transient"]) -> None:
        """Add what runs between layers: Note: [Least]."""
        sample, sizes = self._step.sample, self._step.step_input.sizes
        segments = [*sample.gaps, sample.head]
        for quantity, segment in zip(self._between(kind), segments, strict=True):
            is_retained = kind == "retained"
            n_bytes = segment.retained_bytes if is_retained else segment.transient_bytes
            self._add(quantity, sizes, n_bytes)

    def _add_calls(self, *, is_least: bool) -> None:
        """Add what layers hold and take, by family and action.

        What backwards retain only if all ran under the least action: Note: [Least].
        """
        model, step_input = self._model, self._step.step_input
        places = neighbours_of(self._ran)
        for sample in self._step.sample.calls:
            call, family = self._step.calls[sample.call], self._ran[sample.call].family
            neighbours, sizes = places[sample.call], numbers(call.sizes)
            held = dict(sample.held_bytes)
            # A recomputation shows about the peak of a kept forward, without what
            # callers hold.
            forward = {
                (action if action == call.action else AGAIN): value
                for action, value in sample.forward_transient_bytes.items()
            }
            cost, moved = dict(sample.cost), dict(call.moved_bytes)
            if model.is_read_again(call):
                held.pop(model.menu.first, None)
                if model.menu.spec(call.action).rebuilds:
                    for each in (held, cost, moved):
                        each.pop(call.action, None)
            exact: dict[QuantityName, Mapping[str, float]] = {"held": held}
            exact |= {"host": call.host_bytes, "cost": cost, "moved": moved}
            for name, values in exact.items():
                for action, value in values.items():
                    self._add(Quantity("exact", family, name, action), sizes, value)
            for action, value in forward.items():
                own = Quantity("transient", family, "forward", action)
                self._add(own, sizes, value)
            own_output = Quantity("exact", family, "own output")
            self._add(own_output, sizes, call.kept_output_bytes)
            largest = Quantity("exact", family, "largest")
            self._add(largest, sizes, call.largest_bytes or None)
            behind = backward_sizes(step_input, sizes, neighbours)
            for action, transient in sample.backward_transient_bytes.items():
                own = of_backward("transient", step_input, family, neighbours, action)
                self._add(own, behind, transient)
            left = of_backward("retained", step_input, family, neighbours)
            for retained in sample.backward_retained_bytes.values() if is_least else ():
                self._add(left, behind, retained)
