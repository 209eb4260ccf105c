"""The times of one step's calls, taken in by family, action and sizes."""

from __future__ import annotations

from collections.abc import Mapping

from mimose.learn.costs import call_work
from mimose.learn.model import CostModel
from mimose.learn.seconds import FORWARD, Timings
from mimose.types import StepInput, TimedEvent


def tell(
    timings: Timings,
    model: CostModel,
    facts: StepInput,
    events: Mapping[tuple[int, int], TimedEvent],
    *,
    has_forwards: bool = True,
) -> None:
    """Tell how long each call of a step took.

    The forward of what is not recomputed says what recomputing it would take.

    Args:
        timings: Takes it in.
        model: What was learned of bytes and FLOPs; it knows the step's pattern.
        facts: What was known of the step before it ran.
        events: By unit and call.
        has_forwards: Whether forwards took as long as they do in any step.
    """
    pattern = model.pattern(facts)
    own = pattern.own_sizes(facts.sizes)
    for event, sizes in zip(pattern.events, own, strict=True):
        timed = events.get((event.unit, event.call))
        if timed is None:
            continue
        told = [(timed.action, timed.action, timed.seconds.added)]
        is_recomputed = model.menu.spec(timed.action).recomputes
        if has_forwards and not is_recomputed and timed.seconds.forward > 0.0:
            told.append((FORWARD, model.menu.least, timed.seconds.forward))
        for name, action, seconds in told:
            key, work = (event.family, name), None
            if not timings.knows(key, sizes):
                work = call_work(model, event.family, action, sizes)
            timings.add(key, sizes, seconds, work)
