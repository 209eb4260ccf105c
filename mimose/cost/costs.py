"""What actions cost: FLOPs that are counted, and bytes by the FLOPs they are worth."""

from __future__ import annotations

from collections.abc import Sequence

from mimose.cost.model import CostModel, numbers
from mimose.planners import ActionSpec
from mimose.types import CostOf, Sizes, StepInput, Uncounted

_COPIED = 48.0
"""Bytes that are rebuilt while one is copied to the host and none is computed: 3 TB/s,
2.5 bytes moved for each, beside 25 GB/s."""


def call_cost(
    model: CostModel, family: str, spec: ActionSpec, sizes: Sizes, freed_bytes: float
) -> float:
    """Return what an action costs on one call, in FLOPs.

    Args:
        model: What was learned.
        family: The call's.
        spec: The action.
        sizes: The call's own.
        freed_bytes: What it holds less than if it is kept.
    """
    counted = model.exact(family, "cost", spec.name)
    if not len(counted):
        counted = model.exact(family, "whole cost", spec.name)
    flops = counted.predict(sizes)
    if spec.replays:
        times = _COPIED if "transfer" in spec.resources else 1.0
        flops += times * model.byte_flops * max(0.0, freed_bytes)
    return flops or 1.0


def exact_cost(model: CostModel, cost_of: CostOf) -> int | None:
    """Return the FLOPs of one call under an action; None if they are not known."""
    family, action, sizes = cost_of
    return model.exact(family, "cost", action).exact(numbers(sizes))


def extra_flops(
    model: CostModel, facts: StepInput, actions: Sequence[str]
) -> tuple[tuple[int, ...], Uncounted]:
    """Return the FLOPs that a plan adds to each event, and which are not known yet.

    Args:
        model: What was learned.
        facts: The step's context and exact sizes.
        actions: The plan's, one an event.

    Returns:
        What is known, 0 for the others, and what is still to count.
    """
    pattern = model.pattern(facts)
    own = pattern.own_sizes(facts.sizes)
    added = []
    unknown: dict[tuple[int, int], CostOf] = {}
    known: dict[CostOf, int | None] = {}  # equal layers cost the same
    for event, sizes, action in zip(pattern.events, own, actions, strict=True):
        added.append(0)
        if action == model.menu.first or model.menu.spec(action).replays:
            continue  # what is rebuilt is counted as it runs
        cost_of = event.family, action, sizes
        if cost_of not in known:
            known[cost_of] = exact_cost(model, cost_of)
        flops = known[cost_of]
        if flops is None:
            unknown[event.unit, event.call] = cost_of
        else:
            added[-1] = flops
    return tuple(added), unknown
