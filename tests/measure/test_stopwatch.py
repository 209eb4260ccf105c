"""Stopwatches: what is added, what is left out, and what has not happened yet."""

import pytest
import torch

from mimose.measure import stopwatch
from mimose.measure.stopwatch import UNTIMED, EventStopwatch, HostStopwatch


@pytest.fixture
def now(monkeypatch):
    """Return a list of the moments to come."""
    moments: list[float] = []
    monkeypatch.setattr(stopwatch.time, "thread_time", lambda: moments.pop(0))
    monkeypatch.setattr(HostStopwatch, "start", lambda _: moments.pop(0))
    return moments


def test_the_forward_is_left_out(now):
    """Around a forward of 5 s, 1 s before and 2 s after it are added."""
    now[:] = [0.0, 1.0, 6.0, 8.0]
    watch = HostStopwatch()
    entered = watch.start()
    forward = watch.start()
    watch.leave_out(forward)
    watch.stop(entered)
    assert (3.0, 5.0) == watch.read()


def test_places_add_up(now):
    """What runs again in backward is added to what the forward took longer."""
    now[:] = [0.0, 1.0, 10.0, 12.5]
    watch = HostStopwatch()
    for _ in range(2):
        watch.stop(watch.start())
    assert (3.5, 0.0) == watch.read()


def test_a_spoilt_call_says_so():
    """Its seconds are there, and teach nothing."""
    watch = HostStopwatch()
    assert not watch.is_spoilt
    watch.spoil()
    assert watch.is_spoilt


def test_nothing_is_timed():
    """The one that times nothing takes all of it."""
    UNTIMED.stop(UNTIMED.start())
    UNTIMED.leave_out(UNTIMED.start())
    UNTIMED.spoil()


class FakeEvent:
    """An event of a stream that is behind."""

    happened = False
    clock = 0.0

    def __init__(self, device, enable_timing):
        assert enable_timing
        self.device = device

    def record(self):
        """Take note of the moment."""
        FakeEvent.clock += 1.0
        self.moment = FakeEvent.clock

    def query(self):
        """Tell whether it has happened."""
        return FakeEvent.happened

    def elapsed_time(self, other):
        """Return milliseconds."""
        assert FakeEvent.happened
        return other.moment - self.moment


def test_events_are_read_when_they_have_happened(monkeypatch):
    """Until then nothing is known, and nobody waits."""
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "happened", False)
    watch = EventStopwatch(torch.device("cpu"))
    entered = watch.start()
    watch.leave_out(watch.start())
    watch.stop(entered)
    assert watch.read() is None
    FakeEvent.happened = True
    assert pytest.approx((2e-3, 1e-3)) == watch.read()
