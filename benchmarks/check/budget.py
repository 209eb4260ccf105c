"""Whether jumping lengths stay within half of what plain training grows by."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.check.line import Line, at_most, judged, none_over, told
from benchmarks.check.training import (
    DeviceLoop,
    Room,
    Subject,
    jumping,
    measure_room,
    subjects,
)
from benchmarks.proofs.numbers import MIB
from mimose.session import Session, attach

_STEPS = 60
_SHARE = 0.5


def kept(device: torch.device) -> Iterator[Line]:
    """Train every model there is."""
    for subject in subjects():
        yield from _kept(device, subject)


CHECKS = (kept,)


def _kept(device: torch.device, subject: Subject) -> Iterator[Line]:
    training = DeviceLoop(device, subject)
    room = measure_room(training)
    before = training.reserved.usage()
    with attach(training.model, room.budget(_SHARE), meter=training.meter) as session:
        training.run = session.step
        steps = training.train(jumping(training.scale, _STEPS))
        peaks = [measured.peak_bytes for measured in steps]
        after = training.reserved.usage()
        name = subject.name
        over = sum(peak > session.budget_bytes for peak in peaks)
        yield none_over(name, over, _STEPS)
        failed = after.n_ooms - before.n_ooms
        yield told(f"{name}: out-of-memory errors, their steps run again", failed)
        retries = after.n_retries - before.n_retries
        yield told(f"{name}: flushes of the allocator", retries)
        yield from _session_told(name, session, room)


def _session_told(name: str, session: Session, room: Room) -> Iterator[Line]:
    summary = session.summary()
    n_planned = summary.phases.get("plan", 0)
    least = _STEPS // 2
    yield judged(f"{name}: planned steps", f"≥ {least}", n_planned, n_planned >= least)
    yield told(
        f"{name}: growth of plain training, and allowed",
        f"{room.growth_bytes / MIB:.0f} MiB, {_SHARE:.0%}",
    )
    used = room.used(summary.peak_bytes, session.budget_bytes)
    yield at_most(f"{name}: of the allowed growth used", 1.0, used, "{:.1%}")
    yield told(
        f"{name}: reserved for each requested byte", f"{summary.fragmentation:.3f}"
    )
