"""What a method does at any memory and batch, by lines and by plans."""

import math
from dataclasses import replace

import pytest

from mimose.bench.advise.measured import AtSize, Foretold, Measured, Timed, Weighed
from mimose.bench.advise.models import Curve, longest, planned, steady
from mimose.predictors import Residuals

MIB = 2**20


def _foretold(batch, length=None, scale=1.0):
    """Return plans that add 0.1 s a sample where all is recomputed."""
    return Foretold(
        batch=batch,
        length=length,
        least_bytes=(100 + 2 * batch * scale) * MIB,
        keep_bytes=(100 + 10 * batch * scale) * MIB,
        seconds=tuple(0.1 * batch * scale * (8 - i) / 8 for i in range(9)),
    )


def _planned(line, unplanned=()):
    """Return a method that plans within 200 MiB."""
    plain = steady(line("none", 10, 100, 0.2, 0.5, noise=0.0), None)
    timed = (
        Timed(batch=4, length=None, rounds=(1.05 * 1.3,) * 5),
        Timed(batch=8, length=None, rounds=(1.05 * 2.1,) * 5),
    )
    measured = Measured(
        method="mimose",
        weighed=(
            Weighed(batch=8, length=None, peak_bytes=1, reserved_bytes=1, seconds=1),
        ),
        timed=timed,
        foretold=tuple(map(_foretold, (2, 8, 32))),
        unplanned=unplanned,
    )
    return planned(measured, plain, 200 * MIB)


@pytest.fixture
def plan(line):
    """Return a method that plans within 200 MiB."""
    return _planned(line)


def test_a_plan_costs_nothing_where_all_fits(plan):
    """A plan costs nothing where all fits."""
    assert plan.rates == pytest.approx((0.0, 1.05, 1.05))
    assert plan.step_seconds(8, 200 * MIB) == pytest.approx(1.05 * 2.1)


def test_a_plan_adds_what_was_foretold(plan):
    """A plan adds what was foretold."""
    # Of 20 samples 140 to 300 MiB: 220 is half way, and half of all is recomputed.
    assert plan.step_seconds(20, 220 * MIB) == pytest.approx(1.05 * (4.5 + 1.0))


def test_the_largest_batch_of_plans(plan):
    """The largest batch of plans."""
    assert plan.largest_batch(200 * MIB) == 50.0
    assert plan.largest_batch(101 * MIB) == 0.0
    assert plan.step_seconds(51, 200 * MIB) == math.inf
    assert plan.best(101 * MIB).samples_per_second == 0.0


def test_a_batch_without_a_plan_does_not_fit(line):
    """A batch for which a session made no plan does not fit, whatever was foretold."""
    found = _planned(line, unplanned=(AtSize(batch=32, length=None),))
    assert found.largest_batch(200 * MIB) == 31.0
    assert found.largest_batch(200 * MIB * 200 / 164) == 49.0


def test_the_best_batch_of_plans_is_one_that_was_timed_or_the_largest(plan):
    """Between those that were timed a session may have other plans."""
    best = plan.best(200 * MIB)
    rates = {each: each / plan.step_seconds(each, 200 * MIB) for each in (4, 8, 16)}
    assert plan.farthest == 16.0
    assert best.batch == max(rates, key=lambda each: rates[each])
    assert best.samples_per_second == rates[best.batch]


def test_plans_are_doubted_where_they_were_not_timed(line):
    """By as much as they were off where they were timed, on average."""
    found = _planned(line)
    off = replace(found, residuals=Residuals.of([4, 8], [1.0, 1.0], [1.1, 0.9]))
    assert off.doubt(8) == 0.0
    assert off.doubt(6) == pytest.approx(0.1)


def test_what_the_allocator_takes_counts(line):
    """What the allocator takes counts."""
    measured = line("none", 10, 100, 0.2, 0.5)
    more = [
        Weighed(
            batch=each.batch,
            length=None,
            peak_bytes=each.peak_bytes,
            reserved_bytes=round(1.25 * each.peak_bytes),
            seconds=1.0,
        )
        for each in measured.weighed
    ]
    measured = Measured(method="none", weighed=tuple(more), timed=measured.timed)
    assert steady(measured, None).largest_batch(500 * MIB) == 30.0


def test_too_few_readings_are_no_model(line):
    """Too few readings are no model."""
    assert steady(line("none", 1, 1, 1, 1, batches=(2,)), None) is None
    assert steady(line("none", 1, 1, 1, 1, rounds=0), None) is None


def test_the_longest_input_by_lines_and_by_plans(line):
    """The longest input by lines and by plans."""
    measured = line("none", 1, 100, 0.1, 0.1, lengths=(32, 64, 96, 128))
    assert longest(measured, 132 * MIB, 132 * MIB) == pytest.approx(256, abs=1)
    assert longest(measured, 10 * MIB, 132 * MIB) == 0.0
    assert longest(line("none", 1, 100, 0.1, 0.1), 132 * MIB, 132 * MIB) is None
    rows = tuple(_foretold(16, length, length / 64) for length in (32, 64, 128))
    assert (
        longest(Measured(method="mimose", foretold=rows), 132 * MIB, 132 * MIB) == 64.0
    )


def test_a_curve_goes_through_a_parabola():
    """A curve goes through a parabola."""
    lengths = (16, 32, 64, 128)
    curve = Curve.fitted(lengths, [3 + 2 * x + 0.5 * x * x for x in lengths])
    assert curve.predict(100) == pytest.approx(3 + 200 + 5000)


def test_a_sessions_own_time_of_each_step_is_told_apart(line):
    """A session's own time of a step is told apart from what grows with the batch."""
    plain = steady(line("none", 10, 100, 0.2, 0.5, noise=0.0), None)
    batches = (2, 4, 8)
    timed = tuple(
        Timed(batch=b, length=None, rounds=(0.3 + 1.1 * (0.5 + 0.2 * b),) * 5)
        for b in batches
    )
    step = Weighed(batch=8, length=None, peak_bytes=1, reserved_bytes=1, seconds=1)
    measured = Measured(
        method="mimose",
        weighed=(step,),
        timed=timed,
        foretold=tuple(map(_foretold, (2, 8, 32))),
    )
    found = planned(measured, plain, 1000 * MIB)
    assert found.rates == pytest.approx((0.3, 1.1, 1.1))
    assert found.step_seconds(16, 1000 * MIB) == pytest.approx(0.3 + 1.1 * 3.7)


def test_what_plans_add_has_a_rate_of_its_own(line):
    """What plans add may take longer than the session thinks; plain steps do not."""
    plain = steady(line("none", 10, 100, 0.2, 0.5, noise=0.0), None)
    rows = tuple(map(_foretold, (2, 8, 32, 64)))
    step = Weighed(batch=64, length=None, peak_bytes=1, reserved_bytes=1, seconds=1)
    bare = Measured(method="mimose", weighed=(step,), foretold=rows)
    one = (Timed(batch=2, length=None, rounds=(1.0,)),)
    asked = planned(replace(bare, timed=one), plain, 200 * MIB)
    timed = tuple(
        Timed(batch=b, length=None, rounds=(0.1 + 1.1 * p + 2.5 * added,) * 5)
        for b in (2, 8, 20, 32, 40)
        for p, added in [asked.bare_seconds(b, 200 * MIB)]
    )
    found = planned(replace(bare, timed=timed), plain, 200 * MIB)
    assert found.rates == pytest.approx((0.1, 1.1, 2.5))


def test_plans_begin_where_the_allocator_has_no_room_for_plain_training(line):
    """A session keeps what plain training keeps, and the allocator takes as much."""
    plain = steady(line("none", 15, 150, 0.2, 0.5, noise=0.0), None)
    step = Weighed(batch=8, length=None, peak_bytes=1, reserved_bytes=1, seconds=1)
    asked = planned(
        Measured(
            method="mimose",
            weighed=(step,),
            timed=(Timed(batch=2, length=None, rounds=(1.0,)),),
            foretold=tuple(map(_foretold, (2, 8, 32))),  # 100 MiB + 10 a sample
        ),
        plain,
        300 * MIB,
    )
    assert asked.bare_seconds(9, 300 * MIB)[1] == pytest.approx(0.0)  # 285 MiB
    assert asked.bare_seconds(12, 300 * MIB)[1] > 0.0  # 220 MiB of tensors would
    assert asked.largest_batch(300 * MIB) == 50.0  # 1.5 * (100 + 2 * 50) MiB


def test_a_batch_in_parts_is_a_multiple_of_them(line):
    """A batch in parts is a multiple of them, in what fits and in what is best."""
    model = steady(line("accumulate", 10, 100, 0.2, 0.5, noise=0.0), None)
    for budget in (100 + 10 * 27, 100 + 10 * 24):
        assert model.largest_batch(budget * MIB) == 24.0
        assert model.best(budget * MIB).batch == 24.0
    assert model.largest_batch(130 * MIB) == 0.0
    assert model.best(130 * MIB).samples_per_second == 0.0
    assert model.step_seconds(3, 340 * MIB) == math.inf
    assert model.largest_batch(130 * MIB, whole=False) == 0.0
