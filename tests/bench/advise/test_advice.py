"""The answer, from readings made by hand."""

import math
from dataclasses import replace

import pytest

from mimose.bench.advise.advice import advise_on
from mimose.bench.advise.measured import Timed
from mimose.bench.advise.models import steady
from mimose.bench.advise.ties import spread

MIB = 2**20


def _large_fixed_time(line, measurements, budget_mib, **changes):
    """Return what makes a step's fixed time worth sharing out."""
    return measurements(
        line("none", 10, 100, 0.01, 1.0, **changes),
        line("full", 2, 100, 0.013, 1.0, **changes),
        budget_mib=budget_mib,
    )


def test_a_larger_batch_pays_where_time_is_fixed(line, measurements):
    """Best throughputs are of the largest batches: 50 / 1.65 over 10 / 1.1."""
    advice = advise_on(_large_fixed_time(line, measurements, 200))
    full = advice.of("full")
    assert advice.of("none").largest_batch == 10
    assert full.largest_batch == 50
    # 50 / 1.65 over 10 / 1.1
    assert full.ratio == pytest.approx(3.33, abs=0.02)
    assert full.verdict == "raises"
    assert full.p_score > advice.p_point
    assert (advice.free.name, advice.free.batch) == ("full", 50.0)
    assert advice.at_sample.name == "full"


def test_it_hurts_where_time_is_not(line, measurements):
    """Recomputing costs what larger batches cannot win back."""
    advice = advise_on(
        measurements(
            line("none", 10, 100, 0.1, 0.01),
            line("full", 2, 100, 0.13, 0.01),
            budget_mib=500,
        )
    )
    assert advice.of("full").verdict == "lowers"
    assert advice.of("full").p_score < advice.p_point
    assert advice.at_sample.name == "none"
    assert not advice.at_sample.is_tie


def test_noise_gives_no_verdict(line, measurements):
    """Two methods that are as fast are told apart by nobody."""
    advice = advise_on(
        measurements(
            line("none", 10, 100, 0.1, 0.01, noise=0.02),
            line("sdpa", 10, 100, 0.1001, 0.01, noise=0.02),
            budget_mib=500,
        )
    )
    assert advice.of("sdpa").verdict == ""
    assert "within 1% of plain" in advice.of("sdpa").no_verdict
    assert advice.at_sample.is_tie


def test_of_those_that_are_as_fast_plain_training_is_chosen(line, measurements):
    """A method that is faster by less than the noise is no reason for a change."""
    advice = advise_on(
        measurements(
            line("none", 10, 100, 0.1, 0.01, noise=0.02),
            line("sdpa", 10, 100, 0.0999, 0.01, noise=0.02),
            budget_mib=500,
        )
    )
    choice = advice.at_sample
    assert choice.is_tie
    assert (choice.name, choice.runner_up) == ("none", "sdpa")
    assert choice.runner_up_samples_per_second > choice.samples_per_second


def test_a_noisy_machine_gives_no_verdict(line, measurements):
    """Rounds that differ by more than the methods do say nothing."""
    advice = advise_on(
        measurements(
            line("none", 10, 100, 0.01, 1.0, noise=0.1),
            line("full", 9.3, 100, 0.01, 1.0, noise=-0.1),
            budget_mib=300,
        )
    )
    assert advice.of("full").ratio > 1.02
    assert advice.of("full").verdict == ""
    assert "inside the noise" in advice.of("full").no_verdict


def test_few_rounds_give_no_verdict(line, measurements):
    """Three readings do not bound what they vary about."""
    advice = advise_on(_large_fixed_time(line, measurements, 200, rounds=3))
    assert "3 rounds are too few" in advice.of("full").no_verdict


def test_only_one_method_fits(line, measurements):
    """The ratio is infinite, and there is no runner-up."""
    advice = advise_on(_large_fixed_time(line, measurements, 105))
    assert advice.of("none").largest_batch == 0
    assert advice.of("full").ratio == math.inf
    assert advice.free.name == "full"
    assert advice.free.runner_up == ""


def test_nothing_fits(line, measurements):
    """Then there is no choice."""
    advice = advise_on(_large_fixed_time(line, measurements, 50))
    assert advice.free is None
    assert advice.at_sample is None


def test_another_budget_is_answered_from_the_same_readings(line, measurements):
    """Another budget is answered from the same readings."""
    found = _large_fixed_time(line, measurements, 200)
    assert advise_on(found, 300 * MIB).of("none").largest_batch == 20


def test_lossy_methods_are_not_recommended(line, measurements):
    """Lossy methods are not recommended."""
    advice = advise_on(
        measurements(
            line("none", 10, 100, 0.1, 0.5),
            line("pool", 1, 100, 0.05, 0.5),
            budget_mib=400,
        )
    )
    assert advice.of("pool").verdict == "raises"
    assert advice.free.name == "none"


def test_the_answer_flips_where_the_models_cross(line, measurements):
    """Just there the two are as fast."""
    advice = advise_on(_large_fixed_time(line, measurements, 400))
    names = [(flip.before, flip.after) for flip in advice.flips]
    assert names[0] == ("", "full")
    for flip in advice.flips[1:]:
        rates = [
            steady(each, None).best(flip.memory_bytes, whole=False).samples_per_second
            for each in advice.measurements.methods
        ]
        assert rates[0] == pytest.approx(rates[1], rel=0.02)


def test_the_spread_is_that_of_the_median(line):
    """The spread is that of the median."""
    assert spread(line("none", 1, 1, 1, 1, noise=0.0)) == 0.0
    assert spread(line("none", 1, 1, 1, 1, rounds=0)) == math.inf
    noisy = spread(line("none", 1, 1, 1, 1, noise=0.1))
    assert 0.01 < noisy < 0.05


# ------------------------------------------------------------------ lengths


def _with_lengths(measured, seconds_per_token):
    timed = tuple(
        Timed(batch=16, length=n, rounds=(seconds_per_token * n + 0.1,) * 7)
        for n in (32, 64, 96, 128)
    )
    return replace(measured, timed=measured.timed + timed)


def test_lengths_that_come_are_answered_for(line, measurements):
    """Batches that do not fit are counted; the fastest that fits all is the best."""
    lengths = (32, 40, 48, 64, 128)
    plain = line("none", 10, 100, 0.1, 0.01, lengths=(32, 64, 96, 128))
    full = line("full", 2, 100, 0.13, 0.01, lengths=(32, 64, 96, 128))
    found = measurements(
        _with_lengths(plain, 0.010),
        _with_lengths(full, 0.013),
        budget_mib=200,
        lengths=lengths,
    )
    answer = advise_on(found).lengths
    by_name = {each.name: each for each in answer.methods}
    # A text of n tokens takes 10 * 16 * n / 128 MiB above 100: up to 80 fit.
    assert by_name["none"].n_fit == 4
    assert by_name["full"].n_fit == 5
    assert answer.best == "full"
    assert by_name["full"].seconds == pytest.approx(0.013 * sum(lengths) + 0.5)
    assert answer.most_tokens == pytest.approx(1280, rel=0.15)
    roomy = advise_on(found, 300 * MIB).lengths
    assert (roomy.best, roomy.runner_up, roomy.is_tie) == ("none", "full", False)
    assert "will come" in str(advise_on(found))


def test_lengths_without_timings_are_said_to_be_unknown(line, measurements):
    """Lengths without timings are said to be unknown."""
    found = measurements(line("none", 10, 100, 0.1, 0.01), budget_mib=200, lengths=(5,))
    advice = advise_on(found)
    assert advice.lengths is None
    assert "no method was timed at enough of them (it takes 3)" in " ".join(
        str(advice).split()
    )
