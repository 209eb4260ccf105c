"""What actions cost: FLOPs that are counted, and seconds where times are learned."""

from __future__ import annotations

from collections.abc import Sequence

from mimose.learn.model import CostModel, numbers
from mimose.learn.seconds import Work
from mimose.planners import ActionSpec
from mimose.types import CostOf, Sizes, StepInput, Uncounted


def work_of(
    model: CostModel, family: str, spec: ActionSpec, sizes: Sizes, freed_bytes: float
) -> Work:
    """Return what an action does to one call, besides holding less.

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
    flops, freed = counted.predict(sizes), max(0.0, freed_bytes)
    return Work(flops, freed, spec.recomputes, spec.replays)


def cost_of(model: CostModel, family: str, action: str, work: Work) -> float:
    """Return what an action costs, in the one unit in which all costs are now.

    Args:
        model: What was learned.
        family: The call's.
        action: Under which it runs.
        work: What that does.
    """
    if model.seconds is None or not model.plans_by_seconds:
        return work.guess or 1.0
    return model.seconds.of(family, action, work)


def event_seconds(
    model: CostModel, facts: StepInput, actions: Sequence[str]
) -> list[float] | None:
    """Return the seconds that a plan adds to each event; None before any was timed.

    Args:
        model: What was learned.
        facts: The step's context and exact sizes.
        actions: The plan's, one an event.
    """
    seconds = model.seconds
    if seconds is None:
        return None
    pattern = model.pattern(facts)
    own = pattern.own_sizes(facts.sizes)
    added, known = [], dict[CostOf, float]()  # equal layers cost the same
    for event, sizes, action in zip(pattern.events, own, actions, strict=True):
        which = event.family, action, sizes
        if which not in known and action == model.menu.first:
            known[which] = 0.0
        elif which not in known:
            work = call_work(model, event.family, action, sizes)
            known[which] = seconds.of(event.family, action, work)
        added.append(known[which])
    return added


def call_work(model: CostModel, family: str, action: str, sizes: Sizes) -> Work:
    """Return what an action does to one call, by what is known of what it holds.

    Args:
        model: What was learned.
        family: The call's.
        action: Under which it runs.
        sizes: The call's own.
    """
    first, least, own = (
        model.exact(family, "held", name).predict(sizes)
        for name in (model.menu.first, model.menu.least, action)
    )
    freed = max(first, least) - own
    return work_of(model, family, model.menu.spec(action), sizes, freed)


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
