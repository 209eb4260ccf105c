"""How much more is reserved than allocated; the environment says by which segments."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.check.line import Line, at_most, none_over, told
from benchmarks.check.training import DeviceLoop, jumping, measure_room
from mimose.measure.meters.usage import has_expandable_segments
from mimose.session import attach

_STEPS = 40
_SHARE = 0.5
_EXPANDABLE_BAR = 1.25


def reserved_over_allocated(device: torch.device) -> Iterator[Line]:
    """Compare peaks of reserved and allocated bytes, plain and under a budget."""
    training = DeviceLoop(device)
    yield _ratio("plain training", _train(training), _EXPANDABLE_BAR)
    budget_bytes = measure_room(training).budget(_SHARE)
    with attach(training.model, budget_bytes, meter=training.meter) as session:
        yield _ratio("under mimose", _train(training))
        summary = session.summary()
    yield none_over(_segments(), summary.steps_over, _STEPS)
    yield told(f"{_segments()}: flushes of the allocator", summary.flushes)


CHECKS = (reserved_over_allocated,)


def _train(training: DeviceLoop) -> float:
    """Return the highest reserved over the highest allocated bytes."""
    training.reserved.give_back()
    training.reserved.forget_usage()
    usages = [
        training.reserved.usage()
        for _ in training.train(jumping(training.scale, _STEPS))
    ]
    reserved = max(usage.reserved_peak_bytes for usage in usages)
    return reserved / max(usage.allocated_peak_bytes for usage in usages)


def _segments() -> str:
    return (
        "expandable segments" if has_expandable_segments() else "segments of fixed size"
    )


def _ratio(how: str, ratio: float, limit: float | None = None) -> Line:
    what = f"{_segments()}, {how}: reserved over allocated peak"
    if limit is not None and has_expandable_segments():
        return at_most(what, limit, ratio, "{:.3f}")
    return told(what, f"{ratio:.3f}")
