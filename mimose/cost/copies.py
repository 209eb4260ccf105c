"""The copies of weights that autocast makes, and keeps until its context ends.

Note: [Copies]
Within a context autocast casts each trained weight once and keeps the copy. A kept
layer's copies are among what it holds: its graph saves them. A recomputed layer's are
not, yet stay until the context ends, before the backward most often; its recomputation
makes new ones in a context of its own. So after a recomputed layer's forward the level
is higher by its copies than by what it holds, and after a kept one's it is not.

The planning problem takes the safe side: what lies behind a layer grows by the copies,
whatever becomes of the layer, and all go with the context. Samples of kept layers are
put on that footing (`evened`), and where a plan is judged what was counted twice is
taken off (`mimose.cost.growth`). Copies of biases, which no graph saves, are taken for
held until the backward; they are small.

Where the context ends behind the root, recomputed layers' copies go in the midst of
the loss (`gone_bytes`), and its peak may come before that or after. With R0 the excess
of a step that keeps nothing and R1 that of one that keeps everything, any other's is
``max(R0, R1 - gone)``. So R0 and R1 are learned; a step between the two tells R1 where
its excess is above R0, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from mimose.cost.model import CostModel
from mimose.types import SegmentSample, StepInput, StepSample


def copied_bytes(model: CostModel, unit: int, family: str) -> float:
    """Return a call's copies of weights; a unit that is always kept is alike."""
    return 0.0 if model.is_settled(unit) else model.copied.get(family, 0.0)


def copies(model: CostModel, facts: StepInput) -> list[float]:
    """Return each event's copies of weights.

    Those that outlive the forward are left out.

    Args:
        model: What was learned.
        facts: Of a step whose context is known.
    """
    pattern = model.pattern(facts)
    if not pattern.copies_end:
        return [0.0] * len(pattern.events)
    return [copied_bytes(model, event.unit, event.family) for event in pattern.events]


def gone_before_loss(model: CostModel, facts: StepInput) -> float:
    """Return the copies that go before the loss's peak."""
    pattern = model.pattern(facts)
    if pattern.copies_end != "loss":
        return 0.0
    units = [event.unit for event in pattern.events]
    return gone_bytes(list(zip(units, copies(model, facts), strict=True)), ())


def gone_bytes(copied: Sequence[tuple[int, float]], kept: Collection[int]) -> float:
    """Return the copies that go where the context ends: no graph saves them.

    Args:
        copied: By event, the unit and its copies.
        kept: The units of which some call is kept.
    """
    return sum({unit: n for unit, n in copied if n and unit not in kept}.values())


def evened(
    sample: StepSample, kept_bytes: Sequence[float], gone: float, least_excess: float
) -> StepSample:
    """Put a step's samples on the footing of one that recomputes everything.

    Args:
        sample: What was measured.
        kept_bytes: By event, the copies of those that were kept under a plan.
        gone: The bytes of the other layers' copies.
        least_excess: What the loss's of a step that keeps nothing may read.
    """
    total = sum(kept_bytes)
    if not total or not sample.copies_end:
        return sample
    segments = [*sample.gaps, sample.head]
    for index, n_bytes in enumerate(kept_bytes):
        segments[index + 1] = _raised(segments[index + 1], n_bytes, n_bytes)
    *gaps, head = segments
    loss = sample.loss
    if sample.copies_end == "head":
        head = _raised(head, -total, 0.0)
    elif loss is not None:
        loss = _raised(loss, -total, gone)
        excess = loss.excess_bytes
        if gone and excess is not None and excess - gone <= least_excess:
            loss = replace(loss, excess_bytes=None)
    return replace(sample, gaps=tuple(gaps), head=head, loss=loss)


def _raised(
    segment: SegmentSample, net_bytes: float, excess_bytes: float
) -> SegmentSample:
    net, excess = segment.net_bytes, segment.excess_bytes
    return replace(
        segment,
        net_bytes=None if net is None else net + net_bytes,
        excess_bytes=None if excess is None else excess + excess_bytes,
    )
