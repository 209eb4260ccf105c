"""What happens between the last layer's forward and its backward: head and loss.

Note: [Last layer]
A last layer that saves its own output, as a ReLU does, keeps it through the head; one
that does not, or is recomputed, lets it go there. Behind its backward all is alike. So
a head has its numbers by the last layer's action, but a layer's net change in the
backward is that of a recomputed one, in whose head the output went; what a head holds
beyond that is there in the last layer's own backward alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from mimose.cost.copies import gone_before_loss
from mimose.cost.model import CostModel, head_key
from mimose.cost.patterns import Pattern
from mimose.cost.series import Series
from mimose.types import Sizes, StepInput

_FEW = 8
"""Readings of a head that are looked at where the other action's explain them."""


class Head(NamedTuple):
    """What happens between the last layer's forward and its backward."""

    net_bytes: float
    before_release_bytes: float
    """How far it rises over its start before the last step's outputs go."""
    after_release_bytes: float
    """The same after that, as if none of them went."""
    after_copies_bytes: float
    """The same once the copies of all layers are gone: see `mimose.cost.copies`."""


class Heads(NamedTuple):
    """What all heads come to, however the last layer was run."""

    net_bytes: float
    """Behind which the layers' backward begins: Note: [Last layer]."""
    excess_bytes: float
    """Of the head that takes most."""
    beyond_bytes: Mapping[str, float]
    """By the last layer's action, what is held beyond that net in its backward."""


def head(model: CostModel, facts: StepInput, action: str) -> Head:
    """Return what the head needs behind a last layer of some action.

    Args:
        model: What was learned.
        facts: The step's context, which is known, and its sizes.
        action: Of the last layer.
    """
    net, first, loss_net, loss_excess = _parts(model, facts, action)
    after = after_copies = net + loss_excess
    copies = gone_before_loss(model, facts)
    if copies:
        least, most = (
            model.excess(*head_key(facts, "loss", a))
            for a in (model.menu.least, model.menu.first)
        )
        if most.doubt(facts.sizes):
            excess = _by_other(model, facts, most, least, model.menu.first)
        else:
            excess = most.predict(facts.sizes)
        excess = min(max(excess, loss_excess), loss_excess + copies)
        after_copies = net + excess - copies
    return Head(net + loss_net, first, after, after_copies)


def heads(
    model: CostModel, facts: StepInput, pattern: Pattern, released_bytes: float
) -> Heads:
    """Return what all heads come to, however the last layer was run.

    Args:
        model: What was learned.
        facts: The step's context and sizes.
        pattern: The context's.
        released_bytes: Outputs of the last step that go in the loss.
    """
    actions = actions_of_last(model, pattern)
    found = []
    for action in actions:
        found.append(head(model, facts, action))
    excess = max(
        max(
            h.before_release_bytes,
            h.after_release_bytes - released_bytes,
            h.after_copies_bytes - released_bytes,
        )
        for h in found
    )
    lasting = found[-1].net_bytes
    beyond = {
        action: max(0.0, h.net_bytes - lasting)
        for action, h in zip(actions, found, strict=True)
    }
    return Heads(lasting, excess, beyond)


def actions_of_last(model: CostModel, pattern: Pattern) -> tuple[str, ...]:
    """Return what may happen to the last layer, what holds least last."""
    if not pattern.events:
        return (model.menu.least,)
    return model.allowed(pattern.events[-1].unit)


def head_series(
    model: CostModel, facts: StepInput, action: str
) -> tuple[tuple[str, Series], ...]:
    """Return net and excess of the head, then of the loss, with their names."""
    of_head, of_loss = (head_key(facts, part, action) for part in ("head", "loss"))
    least = head_key(facts, "loss", model.menu.least)
    excess_of = least if gone_before_loss(model, facts) else of_loss
    return (
        ("head", model.net(*of_head)),
        ("head", model.excess(*of_head)),
        ("loss", model.net(*of_loss)),
        ("loss", model.excess(*excess_of)),
    )


def _parts(model: CostModel, facts: StepInput, action: str) -> list[float]:
    """Predict net and excess of the head, then of the loss."""
    menu = model.menu
    other = menu.first if action == menu.least else menu.least
    pairs = zip(
        head_series(model, facts, action), head_series(model, facts, other), strict=True
    )
    found = []
    for (_, mine), (_, theirs) in pairs:
        if _is_told_by_other(facts.sizes, mine, theirs):
            found.append(_by_other(model, facts, mine, theirs, action))
        else:
            found.append(mine.predict(facts.sizes))
    return found


def _by_other(
    model: CostModel, facts: StepInput, mine: Series, theirs: Series, action: str
) -> float:
    """Predict what few steps tell of an action by what many tell of the other.

    Plans seldom recompute the last layer, and steps that only collect never keep
    it. What happens behind it is the same but for a constant, and but for a layer
    that saves its own output: kept, that stays beyond the head, where else it goes.
    Whether it does is what explains the few best. An excess is no less than any of
    them says, in proportion to the size that grew most or shrank least.
    """
    readings = mine.medians()[-_FEW:]
    if mine.is_excess:
        more = [
            (value - theirs.predict(sizes)) * _share(facts.sizes, sizes)
            for sizes, value in readings
        ]
        return theirs.predict(facts.sizes) + max([0.0, *more])
    pattern, least = model.pattern(facts), model.menu.least
    if not pattern.events:  # no layer ran, so no action tells them apart
        return theirs.predict(facts.sizes)
    rules = pattern.rules[-1]
    outputs = model.exact(pattern.events[-1].family, "held", least)

    def explained(sizes: Sizes, n_outputs: int) -> float:
        own = tuple(rule(sizes) for rule in rules)
        return theirs.predict(sizes) + n_outputs * outputs.predict(own)

    found = []
    for n_outputs in (0, -1 if action == least else 1):
        rest = [value - explained(sizes, n_outputs) for sizes, value in readings]
        constant = float(np.median(rest)) if rest else 0.0
        spread = round(max(rest) - min(rest)) if rest else 0
        found.append((spread, abs(constant), n_outputs, constant))
    _, _, n_outputs, constant = min(found)
    return explained(facts.sizes, n_outputs) + constant


def _is_told_by_other(sizes: Sizes, mine: Series, theirs: Series) -> bool:
    """Whether another action's readings of a head tell more than the action's own."""
    if not len(theirs):
        return False
    if not len(mine):
        return True
    if mine.doubt(sizes):
        return theirs.is_trusted or not theirs.doubt(sizes)
    is_rough = mine.noise == 0.0 and not mine.is_exact and not mine.has(sizes)
    return is_rough and not mine.is_excess and theirs.is_exact


def _share(sizes: Sizes, of: Sizes) -> float:
    """Return the largest ratio of a size to another shape's, of those that differ."""
    ratios = [a / max(1, b) for a, b in zip(sizes, of, strict=True) if a != b]
    return max(ratios, default=1.0)
