"""Whether memory that runs out is paid for once, and changes no result."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.check.exactness import be_deterministic, same_weights
from benchmarks.check.line import Line, at_most, told
from benchmarks.check.training import DeviceLoop, jumping, measure_room
from mimose.session import attach

_STEPS = 32
_SHARE, _LEFT = 1.2, 0.6
"""Of the growth of plain training: what the budget leaves, and what there is later."""


def limit_falls(device: torch.device) -> Iterator[Line]:
    """Take memory away in mid-run, and count the steps that fail from then on."""
    be_deterministic()
    failures: list[int] = []
    what = f"weights after {_STEPS} steps, memory taken away in mid-run"
    same = same_weights(
        what, lambda: _weights(device, failures), lambda: _bare_weights(device)
    )
    failed = sum(count > 0 for count in failures)
    what = "steps in which memory ran out, once there was less"
    yield at_most(what, 1, failed, "{}")
    yield told("out-of-memory errors in them", sum(failures))
    yield same


CHECKS = (limit_falls,)


def _bare_weights(device: torch.device) -> list[torch.Tensor]:
    training = DeviceLoop(device)
    measure_room(training)
    list(training.train(jumping(training.scale, _STEPS)))
    return training.weights()


def _weights(device: torch.device, failures: list[int]) -> list[torch.Tensor]:
    """Train under a session; append the failures of each step with less memory."""
    training = DeviceLoop(device)
    room = measure_room(training)
    lengths = jumping(training.scale, _STEPS)
    with attach(training.model, room.budget(_SHARE), meter=training.meter) as session:
        training.run = session.step
        list(training.train(lengths[: _STEPS // 2]))
        put_back = training.reserved.wall(room.budget(_LEFT))
        try:
            failures += [_failures(training, n) for n in lengths[_STEPS // 2 :]]
        finally:
            put_back()
    return training.weights()


def _failures(training: DeviceLoop, length: int) -> int:
    before = training.reserved.usage().n_ooms
    list(training.train((length,)))
    return training.reserved.usage().n_ooms - before
