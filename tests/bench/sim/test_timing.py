"""On the device plans are timed by events, which are read when they have happened."""

from __future__ import annotations

import time

import pytest
import torch

import mimose
from mimose.measure.stopwatch import EventStopwatch

pytestmark = pytest.mark.sim


def test_events_tell_times(sim):
    """What lies between is positive, and nobody waits for it."""
    watch = EventStopwatch(torch.device("sim"))
    before = sim.waits()
    entered = watch.start()
    torch.ones(100, 100, device="sim").mm(torch.ones(100, 100, device="sim"))
    watch.leave_out(entered)
    torch.ones(100, 100, device="sim").mm(torch.ones(100, 100, device="sim"))
    watch.stop(entered)
    added, forward = watch.read()
    assert added > 0.0
    assert forward > 0.0
    assert before == sim.waits()


def test_the_clock_is_what_the_process_computes(sim):
    """What other programs take meanwhile is none of the device's time."""
    watch = EventStopwatch(torch.device("sim"))
    entered = watch.start()
    time.sleep(0.2)
    watch.stop(entered)
    added, _ = watch.read()
    assert added < 0.1


def test_the_first_steps_are_timed_and_then_one_in_five(toys, monkeypatch):
    """Their times arrive one step later here: the record is told of them then."""
    late = _be_late(monkeypatch)
    model = toys.chain(4, width=64).to("sim")
    planner = toys.FixedActions(1, 1, 0, 0)
    with mimose.attach(model, "1GiB", planner=planner, cost="seconds") as session:
        for n in range(100):
            late.clear()
            model(toys.inputs(8 * (1 + n % 6), width=64).to("sim")).sum().backward()
    told = [r for r in session.records if r.extra_seconds is not None]
    steps = [record.step for record in told]
    first = [step for step in steps if step < 64]
    assert {step % 5 for step in first} == {0, 1, 2, 3, 4}
    assert first[-1] == 63
    assert [step for step in steps if step >= 64] == list(range(65, 99, 5))
    assert all(record.extra_seconds > 0.0 for record in told)
    assert session._engine.learner.model.seconds is not None


def _be_late(monkeypatch):
    """Let no event have happened in the step that it is of."""
    asked, read = set(), EventStopwatch.read

    def later(self):
        if id(self) not in seen:
            seen[id(self)] = self
            asked.add(id(self))
        return None if id(self) in asked else read(self)

    seen: dict[int, EventStopwatch] = {}
    monkeypatch.setattr(EventStopwatch, "read", later)
    return asked
