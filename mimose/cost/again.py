"""Steps in which several backwards go through the same graphs.

Note: [Several backwards]
What the last backward does is the layers' backward; all before it is part of the loss,
from the last forward's end to that backward's first gradient. How far the loss rises
then depends on the plan. Where a graph is retained, as much is rebuilt in the first
backward as in the second, whatever was kept. Where the first backward makes a graph of
its own (`create_graph`), that holds all that the layers would have held: then the loss
rises to one level under every plan, and the less over its start the more is kept.

So R0, the rise where nothing is kept, and R1, where everything is, are learned, and a
plan's lies between them by its share of what can be kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from mimose.cost.model import CostModel, head_key
from mimose.cost.windows import has_several_backwards
from mimose.types import StepInput

_LEAST_SHARE = 0.25
"""Steps that keep less tell nothing of R1."""


def kept_bytes(
    model: CostModel, facts: StepInput, actions: Sequence[str]
) -> tuple[float, float]:
    """Return what a plan holds beyond the least, and what the most would.

    Args:
        model: What was learned.
        facts: The step's context, which is known, and its sizes.
        actions: The plan's, one an event.
    """
    pattern, menu = model.pattern(facts), model.menu
    known: dict[tuple[object, ...], float] = {}

    def held(family: str, sizes: tuple[int, ...], action: str) -> float:
        key = family, sizes, action
        if key not in known:
            known[key] = model.exact(family, "held", action).predict(sizes)
        return known[key]

    kept = most = 0.0
    own = pattern.own_sizes(facts.sizes)
    for event, sizes, action in zip(pattern.events, own, actions, strict=True):
        least = held(event.family, sizes, menu.least)
        kept += held(event.family, sizes, action) - least
        most += held(event.family, sizes, menu.first) - least
    return kept, most


def rise_of_all(
    model: CostModel, facts: StepInput, actions: Sequence[str], excess: float
) -> float | None:
    """Return R1 by one step's reading; None where that tells nothing of it.

    Args:
        model: What was learned.
        facts: The step's.
        actions: As they ran.
        excess: How far its loss rose.
    """
    kept, most = kept_bytes(model, facts, actions)
    least = model.excess(*head_key(facts, "loss", model.menu.least))
    if least.doubt(facts.sizes) or kept < _LEAST_SHARE * most or most <= 0.0:
        return None
    r0 = least.predict(facts.sizes)
    return max(0.0, r0 - max(0.0, r0 - excess) * most / kept)


def fall(model: CostModel, facts: StepInput) -> float:
    """Return by how much less the loss rises if all is kept, R0 less R1."""
    if not has_several_backwards(facts.context):
        return 0.0
    least, first = (
        model.excess(*head_key(facts, "loss", action))
        for action in (model.menu.least, model.menu.first)
    )
    if first.doubt(facts.sizes) or least.doubt(facts.sizes):
        return 0.0
    return max(0.0, least.predict(facts.sizes) - first.predict(facts.sizes))


def fall_under(model: CostModel, facts: StepInput, actions: Sequence[str]) -> float:
    """Return by how much less the loss rises under a plan than if nothing is kept.

    Args:
        model: What was learned.
        facts: The step's.
        actions: The plan's, one an event.
    """
    most_less = fall(model, facts)
    if not most_less:
        return 0.0
    kept, most = kept_bytes(model, facts, actions)
    return most_less * kept / most if most > 0.0 else 0.0


def planned_rise(
    model: CostModel, facts: StepInput, excess: float, room_bytes: float
) -> float:
    """Return a rise of the loss, alike for all plans, under which those fit that do.

    With K kept the loss rises to ``least + K + R0 - slope K``. That is within the
    budget where ``K <= (room - R0) / (1 - slope)``, which a rise of ``room`` less that
    says as well.

    Args:
        model: What was learned.
        facts: The step's.
        excess: R0.
        room_bytes: Of the budget, where the loss begins and nothing is kept.
    """
    less = fall(model, facts)
    if not less or room_bytes <= excess:
        return excess
    first = model.menu.first
    n_events = len(model.pattern(facts).events)
    _, most = kept_bytes(model, facts, [first] * n_events)
    slope = min(1.0, less / most) if most > 0.0 else 0.0
    if slope >= 1.0:
        return 0.0
    return min(excess, max(0.0, room_bytes - (room_bytes - excess) / (1.0 - slope)))
