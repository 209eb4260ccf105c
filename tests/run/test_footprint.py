"""What is held of the device against the budget, by a scripted allocator."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")

from mimose.measure.meters import AllocatorMeter  # noqa: E402
from mimose.measure.meters.usage import Usage, has_expandable_segments  # noqa: E402 (behind importorskip)
from mimose.run.allocator_footprint import ReservedFootprint, make_footprint  # noqa: E402
from mimose.run.footprint import Footprint  # noqa: E402

MIB = 2**20


class _Scripted(AllocatorMeter):
    """An allocator whose numbers a test sets; free blocks can be given back."""

    def __init__(self, requested=10, reserved=10):
        self.now = Usage(*[requested * MIB] * 4, *[reserved * MIB] * 2, 0, 0)
        self._reserved_peak_bytes = self._allocated_peak_bytes = 0
        self.n_given_back = 0
        self.stuck_bytes = 0
        """Free parts of segments that something lives in: they stay."""

    def set(self, **mebibytes):
        for name, value in mebibytes.items():
            is_bytes = name.endswith("_bytes")
            self.now = self.now._replace(**{name: value * MIB if is_bytes else value})

    def grow(self, requested, reserved):
        """Let a step grow by this, and end; what it reserved stays."""
        low = self.now.requested_bytes // MIB
        high = self.now.reserved_bytes // MIB + reserved
        self.set(
            requested_peak_bytes=low + requested,
            reserved_bytes=high,
            reserved_peak_bytes=high,
        )

    def reset_peak(self):
        now = self.now
        self.now = now._replace(
            requested_peak_bytes=now.requested_bytes,
            reserved_peak_bytes=now.reserved_bytes,
            allocated_peak_bytes=now.allocated_bytes,
        )

    def give_back(self):
        self.n_given_back += 1
        left = self.now.allocated_bytes + self.stuck_bytes
        self.now = self.now._replace(reserved_bytes=left)

    def _look(self):
        usage = self.now
        self._reserved_peak_bytes = max(
            self._reserved_peak_bytes, usage.reserved_peak_bytes
        )
        return usage


def _step(footprint, meter, requested, reserved, key="key"):
    """Run one predicted step."""
    start, _ = footprint.begin(0.0)
    footprint.make_room(float(requested * MIB), key)
    meter.grow(requested, reserved)
    peaks = footprint.fold()
    footprint.observe(peaks.level_bytes - start)
    return peaks


def test_an_allocator_has_a_reserved_footprint():
    """And a meter of one's own, with one number, a plain one."""

    class Plain(_Scripted):
        """The same under another name: no allocator's meter."""

    meter = _Scripted()
    assert type(make_footprint(Plain(), 100 * MIB)) is ReservedFootprint
    meter_of_levels = type("_", (), {})()
    for name in ("live_bytes", "peak_bytes", "rough_peak_bytes"):
        setattr(meter_of_levels, name, lambda: 5 * MIB)
    meter_of_levels.reset_peak = lambda: None
    assert type(make_footprint(meter_of_levels, 100 * MIB)) is Footprint
    assert 10 * MIB == meter.live_bytes()


def test_the_level_leaves_room_for_fragmentation():
    """What a step may grow by is what the limit leaves, divided by the ratio."""
    footprint = ReservedFootprint(_Scripted(), 100 * MIB)
    start, _ = footprint.begin(0.0)
    expected = 10 * MIB + 88 * MIB / footprint.ratio.value  # but for a segment
    assert expected == footprint.level_budget(start)
    assert pytest.approx(footprint.ratio.value) == footprint.reserved_ratio(start)


def test_the_ratio_is_learned_from_steps_without_free_blocks():
    """Forty steps that reserve a fifth more than they grow by."""
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 100 * MIB)
    for index in range(40):
        _step(footprint, meter, 50, 60, key=index)
        meter.give_back()
    assert 1.2 == pytest.approx(footprint.ratio.value, abs=0.01)


def test_a_repeated_plan_may_reserve_more():
    """What came between may have split its blocks, until repeats have shown otherwise.

    Ninety reserved leave eight, and a segment; a growth of sixty may take nine.
    """
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 100 * MIB)
    _step(footprint, meter, 60, 80, key="plan")
    given_back = meter.n_given_back
    _step(footprint, meter, 60, 0, key="plan")
    assert given_back + 1 == meter.n_given_back


def test_free_parts_of_segments_in_use_are_the_steps_own():
    """A step reserves sixty beyond what lives, however many of them are there already.

    Counted from where it starts it would take forty with twenty there, and pass the
    limit with fewer.
    """
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 100 * MIB)
    for index in range(40):
        meter.stuck_bytes = (14 if index > 35 else 20) * MIB
        meter.give_back()
        taken = 60 - meter.stuck_bytes // MIB
        _step(footprint, meter, 50, taken, key=index)
    meter.give_back()
    start, _ = footprint.begin(0.0)
    growth = footprint.level_budget(start) - start
    assert 60 * growth / 50 == pytest.approx(90 * MIB, rel=0.1)
    assert 60 * growth / 50 <= 90 * MIB


def test_free_blocks_are_given_back_where_a_step_could_pass_the_limit():
    """Sixty reserved and fifty to come do not go into a hundred."""
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 100 * MIB)
    _step(footprint, meter, 40, 50, key="one")
    given_back = meter.n_given_back
    peaks = _step(footprint, meter, 45, 50, key="other")
    assert given_back + 1 == meter.n_given_back
    assert 60 * MIB == peaks.reserved_bytes
    assert 1 == footprint.n_given_back


def test_they_stay_where_the_same_step_has_run_before():
    """Its blocks are there, whatever the sum says."""
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 100 * MIB)
    _step(footprint, meter, 60, 70, key="same")
    given_back = meter.n_given_back
    for _ in range(5):
        _step(footprint, meter, 60, 0, key="same")
    assert given_back == meter.n_given_back


def test_they_stay_where_there_is_room_for_both():
    """Thirty reserved and thirty more stay far below a hundred."""
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 100 * MIB)
    for key in range(2):
        _step(footprint, meter, 10, 10, key=key)
    assert 1 == meter.n_given_back  # as the footprint was made


def test_running_out_lowers_the_limit():
    """Below what was reserved when the allocation failed."""
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 100 * MIB)
    start, _ = footprint.begin(0.0)
    before = footprint.level_budget(start)
    meter.grow(40, 50)
    meter.set(n_ooms=1)
    footprint.ran_out()
    assert footprint.limit.bytes < 60 * MIB
    meter.give_back()
    start, _ = footprint.begin(0.0)
    assert footprint.level_budget(start) < before
    low = footprint.limit.bytes
    meter.grow(20, 20)
    footprint.begin(0.0)  # the same failure is not counted twice
    assert low == footprint.limit.bytes


def test_running_out_unseen_is_found_at_the_next_step():
    """In a backward of a plain loop nobody tells; the allocator's counter does."""
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 100 * MIB)
    footprint.begin(0.0)
    meter.grow(40, 50)
    meter.set(n_ooms=1)
    footprint.begin(0.0)
    assert footprint.limit.bytes < 60 * MIB


def test_peaks_are_those_over_all_resets():
    """A measured step starts a new peak at each boundary."""
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 100 * MIB)
    footprint.begin(0.0)
    meter.grow(40, 50)
    meter.read()
    meter.reset_peak()
    meter.set(reserved_bytes=20, reserved_peak_bytes=20)
    assert 60 * MIB == footprint.fold().reserved_bytes
    assert 60 * MIB == footprint.highest_bytes(0)


def test_expandable_segments_are_told_of_once(caplog, monkeypatch):
    """Where free blocks go again and again, and segments do not grow."""
    monkeypatch.setattr(
        "mimose.run.allocator_footprint.has_expandable_segments", lambda: False
    )
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 100 * MIB)
    with caplog.at_level(logging.WARNING):
        for key in range(30):
            _step(footprint, meter, 50, 60, key=key)
    told = [r for r in caplog.records if "expandable_segments:True" in r.message]
    assert 1 == len(told)


def test_growing_segments_need_no_word(caplog, monkeypatch):
    """The settings say that they are there."""
    monkeypatch.setattr(
        "mimose.run.allocator_footprint.has_expandable_segments", lambda: True
    )
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 100 * MIB)
    with caplog.at_level(logging.WARNING):
        for key in range(30):
            _step(footprint, meter, 50, 60, key=key)
    assert [] == caplog.records


@pytest.mark.parametrize("text", ["", "expandable_segments: True", "max_split_size:9"])
def test_settings_say_whether_segments_grow(monkeypatch, text):
    """From the environment; torch's own answer would read it once and for all."""
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", text)
    assert ("expandable" in text) == has_expandable_segments()


def test_blocks_of_before_say_nothing_of_what_can_be_had():
    """The limit fell below what was reserved: what the failed step got counts."""
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 200 * MIB)
    _step(footprint, meter, 90, 100, key="one")
    footprint.begin(0.0)
    meter.set(reserved_bytes=70, n_ooms=1)  # after the allocator's own retry
    footprint.ran_out()
    assert 0.98 * 70 * MIB == pytest.approx(footprint.limit.bytes)


def test_the_optimizers_step_is_part_of_what_a_step_reserves():
    """What it took beyond the backward is counted with each step's growth."""
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 200 * MIB)
    _step(footprint, meter, 50, 50, key="first")
    reserved = meter.now.reserved_bytes // MIB + 10
    meter.set(reserved_bytes=reserved, reserved_peak_bytes=reserved)
    footprint.optimizer_stepped()
    for index in range(40):
        meter.give_back()
        _step(footprint, meter, 50, 50, key=index)
    assert 1.2 == pytest.approx(footprint.ratio.value, abs=0.01)


def test_what_runs_between_steps_teaches_nothing():
    """An evaluation may reserve what it likes."""
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 200 * MIB)
    for index in range(20):
        _step(footprint, meter, 50, 50, key=index)
        meter.give_back()
    before = footprint.ratio.value
    meter.set(reserved_peak_bytes=900)
    footprint.begin(0.0)
    assert before == footprint.ratio.value


def test_a_failure_that_somebody_caught_is_none():
    """The step went on to the end of its backward."""
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 100 * MIB)
    for index in range(8):
        start, _ = footprint.begin(0.0)
        footprint.make_room(float(40 * MIB), index)
        meter.grow(40, 50)
        meter.set(n_ooms=index + 1)
        footprint.observe(footprint.fold().level_bytes - start)
        meter.give_back()
    footprint.begin(0.0)
    assert not footprint.limit.is_lowered


def test_blocks_that_others_gave_back_are_not_relied_on():
    """After the user's own `empty_cache` a plan's blocks are gone."""
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 100 * MIB)
    _step(footprint, meter, 60, 70, key="long")
    _step(footprint, meter, 60, 0, key="long")
    meter.give_back()
    _step(footprint, meter, 20, 30, key="short")
    given_back = meter.n_given_back
    _step(footprint, meter, 60, 70, key="long")
    assert given_back + 1 == meter.n_given_back


def test_a_closed_footprint_tells_of_its_session_alone():
    """What the process reserves later is none of the session's doing."""
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 100 * MIB)
    _step(footprint, meter, 40, 50)
    footprint.is_closed = True
    meter.set(reserved_peak_bytes=900)
    assert 60 * MIB == footprint.highest_bytes(0)


def test_its_state_goes_with_the_sessions():
    """A resumed run knows the ratio."""
    meter = _Scripted()
    footprint = ReservedFootprint(meter, 100 * MIB)
    _step(footprint, meter, 40, 50)
    other = ReservedFootprint(_Scripted(), 100 * MIB)
    other.load_state_dict(footprint.state_dict())
    assert footprint.ratio.value == other.ratio.value
