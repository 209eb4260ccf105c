"""What a kept layer holds beyond what was counted: learned, predicted, and freed.

Note: [Uncounted]
In a step that recomputes everything each input of a layer is held from its forward to
its backward. A kept layer may free its input (under autocast, BERT's saves only a copy
of it). So the model also learns the change of the level from a kept layer's entry to
the next layer's entry, minus what was counted of both. A tensor that several layers
read (a mask, a position bias) is freed after the last of them if, and only if, all of
them are kept. So the last layer's value is learned separately if all layers before it
are kept. If such a tensor is freed later, or with some of them recomputed, the
prediction counts it for longer than it is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mimose.cost.copies import copies_in_gap
from mimose.cost.model import CostModel, numbers
from mimose.cost.pattern import LayerCall, Neighbours, neighbours_of
from mimose.cost.quantity import Quantity, QuantityName
from mimose.types import Measured, SegmentSample, Sizes, StepInput, StepSample


def uncounted(
    family: str, neighbours: Neighbours, action: str, *, all_kept: bool = False
) -> Quantity:
    """Return the quantity.

    Args:
        family: The layer's family.
        neighbours: Those of the call.
        action: The call's action.
        all_kept: Whether all layers before it are kept, too.
    """
    name: QuantityName = "uncounted if all are kept" if all_kept else "uncounted"
    return Quantity("retained", family, name, action, neighbours)


def uncounted_readings(
    model: CostModel,
    step_input: StepInput,
    ran: Sequence[LayerCall],
    calls: Sequence[Measured],
    gaps: Sequence[Quantity],
    sample: StepSample,
) -> Iterator[tuple[Quantity, Sizes, float]]:
    """Yield what calls that were not recomputed have shown.

    Args:
        model: What was learned.
        step_input: The step's input.
        ran: The calls.
        calls: What was measured of them.
        gaps: The retained bytes of the gap before each call, and of the head.
        sample: The samples of the step's segments.
    """
    actions, all_kept = [call.action for call in calls], True
    segments: list[SegmentSample] = [*sample.gaps, sample.head]
    places = neighbours_of(ran)
    for at, (own, call) in enumerate(zip(ran, calls, strict=True)):
        retained, action = segments[at + 1].retained_bytes, call.action
        all_kept = all_kept and action == model.menu.first
        spec, after = model.menu.spec(action), places[at][1]
        if retained is None or spec.recomputes or not (after or at + 1 == len(calls)):
            continue  # the last one: another forward follows
        sizes, counted = numbers(call.sizes), call.held_bytes.get(action)
        is_again = action == model.menu.first or spec.rebuilds
        if counted is None or (is_again and model.is_read_again(call)):
            # The gap contains what was not counted.
            held = Quantity("exact", own.family, "held", action)
            retained += (counted or 0.0) - model.predict(held, sizes)
        retained -= model.predict(gaps[at + 1], step_input.sizes)
        retained += copies_in_gap(model, ran, actions, at, sample.copies_end)
        is_last_of_all = all_kept and after != own.family
        quantity = uncounted(own.family, places[at], action, all_kept=is_last_of_all)
        yield quantity, sizes, float(round(retained))  # predictions have fractions


def uncounted_bytes(
    model: CostModel,
    family: str,
    neighbours: Neighbours,
    sizes: Sizes,
    action: str,
    *,
    all_kept: bool = False,
) -> float:
    """Return what a call holds beyond what was counted.

    Until enough steps have shown it, it is at least 0 and at most the highest reading.

    Args:
        model: What was learned.
        family: The call's family.
        neighbours: Those of the call.
        sizes: The call's sizes.
        action: The call's action.
        all_kept: Whether all layers before it are kept, too.
    """
    quantity = uncounted(family, neighbours, action, all_kept=all_kept)
    value, series = model.predict(quantity, sizes), model.series.get(quantity)
    if not model.why_unknown(quantity, sizes):
        return value
    if all_kept:
        return uncounted_bytes(model, family, neighbours, sizes, action)
    return max(0.0, min(value, series.most)) if series else 0.0
