"""Autocast's copies of weights: learned, predicted, and counted once.

Note: [Copies]
Within an autocast context, autocast casts each trained weight once and keeps the copy.
What a kept layer holds includes its copies, because its graph saves them. `selective`
drops most of them. The copies that no graph saves stay until the context ends, usually
before the backward; a recomputation makes new ones. What runs between layers is learned
from steps that recompute everything (`mimose.cost.measured`), so all copies are in the
gaps, and are freed with the context. So until then, copies that a graph saves are
counted twice, and are taken off here. If the context ends after the model's forward,
that is in the middle of the loss. The loss's transient peak counts from the level
without all copies. Copies are a twentieth of the growth of BERT-large, a tenth of
T5-large's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mimose.cost.model import CostModel
from mimose.cost.pattern import LayerCall, Pattern
from mimose.cost.quantity import of_end
from mimose.types import Measured, SegmentSample, StepInput


def copies_held(
    model: CostModel, calls: Sequence[Measured]
) -> Mapping[str, Mapping[str, float]]:
    """Return the bytes of copies that calls hold, by family and action.

    Args:
        model: What was known of them before.
        calls: The calls of a measured step.
    """
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
    known = model.copied
    return {
        **known,
        **{name: {**known.get(name, {}), **h} for name, h in found.items()},
    }


def copies_in_gap(
    model: CostModel,
    calls: Sequence[LayerCall],
    actions: Sequence[str],
    at: int,
    copies_end: str,
) -> float:
    """Return the copies by which a gap differs if the call before it keeps them.

    Args:
        model: What was learned.
        calls: The calls of a step.
        actions: Their actions.
        at: The index of the call before the gap.
        copies_end: The segment in which copies are freed: see `Pattern.copies_end`.
    """
    if not copies_end:
        return 0.0
    own = copied_bytes(model, calls[at], actions[at])
    if at + 1 == len(calls) and copies_end == "head":
        made = sum(copied_bytes(model, call) for call in calls)
        own -= made - copies_gone(model, calls, actions)
    return own


def peak_without_copies(
    model: CostModel,
    calls: Sequence[LayerCall],
    actions: Sequence[str],
    loss: SegmentSample,
    noise_bytes: float,
) -> float | None:
    """Return the loss's transient peak without all copies; None if it was not read.

    If the loss has no peak, its level may have been lower when the copies were freed.
    If the model returns the loss, its backward shows the peak.

    Args:
        model: What was learned.
        calls: The calls of the step.
        actions: Their actions.
        loss: The loss segment.
        noise_bytes: The noise of a reading.
    """
    transient = loss.transient_bytes
    if transient is not None and transient <= noise_bytes:
        transient = loss.backward_bytes
    if transient is None:
        return None
    return transient + copies_gone(model, calls, actions)


def copied_bytes(model: CostModel, call: LayerCall, action: str | None = None) -> float:
    """Return the copies of weights in what a call holds.

    It is 0 if its layer is always kept.

    Args:
        model: What was learned.
        call: The call.
        action: Its action; by default the first.
    """
    first = model.menu.first
    is_settled = len(model.allowed(call.layer)) == 1
    if is_settled or model.menu.spec(action or first).recomputes:
        return 0.0
    held = model.copied.get(call.family, {})
    return held.get(action or first, held.get(first, 0.0))


def copies_gone(
    model: CostModel, calls: Sequence[LayerCall], actions: Sequence[str]
) -> float:
    """Return the bytes of copies that are freed with their context.

    These are copies that no graph saves.

    Args:
        model: What was learned.
        calls: The calls of a step.
        actions: Their actions.
    """
    made: dict[int, float] = {}
    held: dict[int, float] = {}
    for call, action in zip(calls, actions, strict=True):
        made[call.layer] = copied_bytes(model, call)
        own = copied_bytes(model, call, action)
        held[call.layer] = max(own, held.get(call.layer, 0.0))
    return sum(made.values()) - sum(held.values())


def most_after_copies(
    model: CostModel, step_input: StepInput, calls: Sequence[LayerCall], rise: float
) -> float:
    """Return the loss's transient peak after all copies are freed.

    Args:
        model: What was learned.
        step_input: The step's context and sizes.
        calls: The calls of the step.
        rise: The loss's transient peak over the level with the copies.
    """
    late = rise + sum({e.layer: copied_bytes(model, e) for e in calls}.values())
    read = of_end("transient", step_input, "loss without copies")
    if not model.why_unknown(read, step_input.sizes):
        late = min(late, model.predict(read, step_input.sizes))
    return late


def counted_twice(
    model: CostModel, pattern: Pattern, actions: Sequence[str]
) -> NDArray[np.float64]:
    """Return (C,) the copies of each call that a problem counts twice under a plan."""
    if not pattern.copies_end:
        return np.zeros(len(actions))
    pairs = zip(pattern.calls, actions, strict=True)
    return np.array([copied_bytes(model, call, action) for call, action in pairs])
