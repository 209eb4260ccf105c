"""Yes, no or not known, from measurements made by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mimose.bench.advise.advice import advise_on
from mimose.bench.advise.measure import MORE, Measured
from mimose.bench.advise.text import headline

LATE = Measured(method="full", why_not=f"no time was left to measure it: {MORE}")


@pytest.fixture
def plain(line):
    """Return plain training: 10 MiB and 10 ms a sample over 100 MiB and 100 ms."""
    return line("plain", 10, 100, 0.01, 0.1)


@pytest.fixture
def full(line):
    """Return a method of a quarter of the memory, and half as slow again."""
    return line("full", 2.5, 100, 0.015, 0.1)


def test_a_batch_that_fits_is_trained_as_it_is(plain, full, measurements):
    """Recomputing is slower at the same batch, and no more is asked."""
    advice = advise_on(measurements(plain, full, budget_mib=400))
    assert ("no", ()) == (advice.answer, advice.use)
    assert "plain" == advice.at_sample.name
    assert headline(advice).startswith("No: train as you do")


def test_a_batch_that_does_not_fit_needs_the_fastest_that_makes_it(
    plain, full, line, measurements
):
    """Of two with which it fits, the faster one."""
    slow = line("selective", 2.5, 100, 0.03, 0.1)
    advice = advise_on(measurements(plain, slow, full, budget_mib=200))
    assert ("yes", ("full",)) == (advice.answer, advice.use)
    assert advice.of("plain").fits is False
    assert math.isinf(advice.of("plain").sample_seconds)
    assert advice.of("full").sample_seconds == pytest.approx(0.34, rel=1e-3)
    assert headline(advice).startswith("Yes: use full")


@pytest.mark.parametrize(
    ("budget_mib", "answer", "use"),
    [(400, "no", ()), (200, "not known", ("full",)), (259.5, "not known", ())],
)
def test_what_is_not_known_is_not_taken_for_a_no(
    plain, measurements, budget_mib, answer, use
):
    """A method nobody measured might help, but only where the batch does not fit.

    Within one MiB a CPU does not say whether it fits.
    """
    advice = advise_on(measurements(plain, LATE, budget_mib=budget_mib))
    assert (answer, use) == (advice.answer, advice.use)


@pytest.mark.parametrize(("name", "budget_mib"), [("full", 200), ("accumulate", 400)])
def test_more_time_is_asked_for_only_where_it_helps(
    plain, measurements, name, budget_mib
):
    """Else the reason is told: twice the minutes do not mend an error."""

    def first_line(why):
        method = Measured(method=name, why_not=why)
        return headline(advise_on(measurements(plain, method, budget_mib=budget_mib)))

    failed, late = first_line("OddError: 7"), first_line(f"late: {MORE}")
    assert "OddError: 7" in failed
    assert "10 minutes" not in failed
    assert "10 minutes" in late


def test_a_larger_batch_shares_out_the_fixed_time(line, measurements):
    """PAPAYA's case: a long fixed part makes the saving method faster at its best."""
    plain = line("plain", 10, 100, 0.001, 0.5)
    full = line("full", 2.5, 100, 0.0015, 0.5)
    advice = advise_on(measurements(plain, full, budget_mib=180))
    found = advice.of("full")
    assert 8 == advice.of("plain").best_batch
    assert (32, "raises") == (found.best_batch, found.verdict)
    assert found.interval[0] <= found.ratio <= found.interval[1]
    assert found.ratio == pytest.approx((32 / 0.548) / (8 / 0.508), rel=1e-3)


def test_gradients_that_change_are_no_answer(plain, line, measurements):
    """However fast it is."""
    lossy = line("pool", 1, 100, 0.001, 0.1)
    lossy = dataclasses.replace(lossy, is_exact=False)
    advice = advise_on(measurements(plain, lossy, budget_mib=200))
    assert "no" == advice.answer
    assert "raises" == advice.of("pool").verdict


def test_a_session_without_a_plan_needs_more_than_it_said(plain, line, measurements):
    """What an allocator takes beyond its tensors is in no plan that is foretold."""
    planned = line("mimose", 2.5, 100, 0.012, 0.1)
    told = advise_on(measurements(plain, planned, budget_mib=200)).of("mimose")
    steps = [
        dataclasses.replace(e, rounds=None if e.batch == 32 else e.rounds)
        for e in planned.steps
    ]
    planned = dataclasses.replace(planned, steps=tuple(steps))
    found = advise_on(measurements(plain, planned, budget_mib=200)).of("mimose")
    assert told.largest_batch == 40
    assert found.largest_batch < 32
