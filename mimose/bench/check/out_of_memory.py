"""Whether memory that runs out is paid for once, and changes no result."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mimose.bench.check.exactness import be_deterministic, same_weights
from mimose.bench.check.line import Line, equal, told
from mimose.bench.check.training import Training, jumping, measure_room
from mimose.bench.proofs.common import MIB
from mimose.session import attach

_STEPS = 48
_SHARE, _LEFT = 1.2, 0.6
"""Of the growth of plain training: what the budget leaves, and what there is later."""


def limit_falls(device: torch.device) -> Iterator[Line]:
    """Take memory away in mid-run, and count the steps that fail from then on."""
    be_deterministic()
    bare, again = (_bare_weights(device) for _ in range(2))
    training = Training(device)
    room = measure_room(training)
    lengths = jumping(training.scale, _STEPS)
    with attach(training.model, room.budget(_SHARE), meter=training.meter) as session:
        training.run = session.step
        list(training.train(lengths[: _STEPS // 2]))
        put_back = training.reserved.wall(room.budget(_LEFT))
        failures = [_failures(training, n) for n in lengths[_STEPS // 2 :]]
        put_back()
    failed = sum(count > 0 for count in failures)
    room_mib = (room.budget(_SHARE) - room.budget(_LEFT)) / MIB
    yield told("memory taken away in mid-run", f"{room_mib:.0f} MiB")
    yield equal("steps in which it ran out", 1, failed)
    yield told("out-of-memory errors in them", sum(failures))
    what = f"weights after {_STEPS} steps, memory taken away in mid-run"
    yield same_weights(what, bare, again, training.weights())


CHECKS = (limit_falls,)


def _bare_weights(device: torch.device) -> list[torch.Tensor]:
    training = Training(device)
    measure_room(training)
    list(training.train(jumping(training.scale, _STEPS)))
    return training.weights()


def _failures(training: Training, length: int) -> int:
    before = training.reserved.usage().n_ooms
    list(training.train((length,)))
    return training.reserved.usage().n_ooms - before
