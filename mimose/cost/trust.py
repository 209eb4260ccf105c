"""Says whether predictions at some sizes can be trusted, and why not."""

from __future__ import annotations

from collections.abc import Iterator

from mimose.cost.layer import layer_classes
from mimose.cost.model import CostModel
from mimose.cost.pattern import Pattern
from mimose.cost.quantity import Quantity, QuantityKind, of_end, of_gap
from mimose.types import Sizes, StepInput


def why_unknown(model: CostModel, step_input: StepInput) -> str:
    """Return why no plan can be trusted at these sizes; "" if one can.

    Args:
        model: What was learned.
        step_input: The step's context and sizes.
    """
    if step_input.context not in model.patterns:
        return "nothing was measured with such inputs yet"
    if not step_input.counts and model.patterns[step_input.context].lacks_some(
        step_input.sizes
    ):
        return "more layers run at such sizes than in the steps measured"
    pattern = model.pattern(step_input)
    if not pattern.calls:
        return "no layer took part in the backward of such steps"
    if not pattern.is_ordered:
        return "gradients do not arrive in the reverse order of the layers"
    if not pattern.follows_rules:
        return "the sizes of the layers' inputs do not follow from the batch's sizes"
    for name, key, sizes in _needed(model, step_input, pattern):
        reason = model.why_unknown(key, sizes)
        if reason:
            return f"{name}: {reason}"
    return ""


def extrapolation_ratio(model: CostModel, step_input: StepInput) -> float:
    """Return the relative distance of sizes beyond the measured range."""
    high = model.pattern(step_input).high
    pairs = zip(step_input.sizes, high, strict=True)
    return max(0.0, *(size / max(1, most) - 1.0 for size, most in pairs))


def _needed(
    model: CostModel, step_input: StepInput, pattern: Pattern
) -> Iterator[tuple[str, Quantity, Sizes]]:
    """Yield each series that a plan needs, with its name for messages and its sizes."""
    for layer in layer_classes(model, step_input, pattern):
        yield from layer.needed()
    kinds: tuple[QuantityKind, ...] = ("retained", "transient")
    for kind in kinds:
        for pair in pattern.layout.gaps:
            between = of_gap(kind, step_input, pair)
            yield "between the layers", between, step_input.sizes
        yield "the head", of_end(kind, step_input, "head"), step_input.sizes
        yield "the loss", of_end(kind, step_input, "loss"), step_input.sizes


def unknown_actions(
    model: CostModel, step_input: StepInput
) -> tuple[tuple[str, ...], ...]:
    """Return for each call the actions that must still be measured.

    They are between the first and the least action. A call that a plan keeps can run
    under one of them, because that holds no more. Calls of one class have the same.

    Args:
        model: What was learned.
        step_input: The step's context and sizes.
    """
    pattern, between = model.pattern(step_input), model.menu.names[1:-1]
    if not between:
        return ((),) * len(pattern.calls)
    found = []
    for layer in layer_classes(model, step_input, pattern):
        allowed = model.allowed(layer.call.layer)
        found.append(tuple(a for a in between if a in allowed and layer.lacks(a)))
    return tuple(found[number] for number in pattern.layout.of_call)
