"""Whether batches with and without a mask, by turns, are each predicted."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.check.line import Line, none_over
from benchmarks.check.prediction import errors_told
from benchmarks.check.training import PADDED, DeviceLoop, jumping, measure_room
from mimose.session import attach

_STEPS = 80
_SHARE = 0.6


def alternating(device: torch.device) -> Iterator[Line]:
    """Train on both kinds of batches."""
    training = DeviceLoop(device)
    budget_bytes = measure_room(training).budget(_SHARE)
    over = 0
    with attach(training.model, budget_bytes, meter=training.meter) as session:
        for index, length in enumerate(jumping(training.scale, _STEPS)):
            batch = training.batch(length, like=PADDED if index % 2 else None)
            over += training.step(batch).peak_bytes > budget_bytes
    name = "padded and not, by turns"
    yield none_over(name, over, _STEPS)
    yield from errors_told(name, session.records)


CHECKS = (alternating,)
