"""Steps that show actions of which little is known."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TypeAlias

from mimose.cost.model import CostModel
from mimose.planners import Menu, Plan
from mimose.policy.decision import Decision
from mimose.records import TRIED
from mimose.types import StepInput

Tries: TypeAlias = tuple[tuple[str, ...], ...]
"""By event, actions of which too little is known."""


def worth_trying(tries: Tries, menu: Menu, plan: Plan) -> Tries:
    """Return what there is to try beside a plan.

    Lossy actions change gradients as they are tried: not where all can be kept.

    Args:
        tries: By event, actions of which too little is known.
        menu: The actions in use.
        plan: The step's.
    """
    if not menu.lossy or any(action != menu.first for action in plan.actions):
        return tries
    return tuple(
        tuple(action for action in each if action not in menu.lossy) for each in tries
    )


def trying(
    model: CostModel, facts: StepInput, decision: Decision, tries: Tries
) -> Decision:
    """Have a step show actions of which little is known.

    Layers that the plan keeps run under them, equal ones under different ones, so that
    more actions take few steps more. They hold no more than what they stand in for, so
    the budget is kept; but nothing is predicted of such a step. While plans are
    measured anyway every second one should do so, else every one.

    Args:
        model: What was learned.
        facts: The step's context.
        decision: What it would do.
        tries: What there is to try.

    Returns:
        What it does; the same decision where there is nothing to try.
    """
    chosen = decision.chosen
    if not any(tries) or chosen is None:
        return decision
    actions = list(chosen.plan.actions)
    turns: Counter[tuple[str, ...]] = Counter()
    for at, unknown in enumerate(tries):
        if unknown and actions[at] == model.menu.first:
            actions[at] = unknown[turns[unknown] % len(unknown)]
            turns[unknown] += 1
    if not turns:
        return decision
    by_unit = model.pattern(facts).by_unit
    stand_in = replace(
        chosen,
        plan=replace(chosen.plan, actions=tuple(actions)),
        by_unit=by_unit(actions, otherwise=model.menu.first),
        parts={},
    )
    pairs = zip(actions, chosen.plan.actions, strict=True)
    tried = {own for own, planned in pairs if own != planned}
    names = [name for name in model.menu.names if name in tried]
    return replace(
        decision,
        chosen=stand_in,
        is_measured=True,
        growth_bytes=None,
        reason=f"{', '.join(names)} {TRIED}",
    )
