"""What an answer says of what is not known, or goes beyond what was measured."""

import json
import math
from dataclasses import replace

import pytest
from torch import nn

from mimose.bench.advise.advice import advise_on
from mimose.bench.advise.choice import choose
from mimose.bench.advise.flips import flips
from mimose.bench.advise.measured import Foretold, Measured, Timed
from mimose.bench.advise.memory import fitting
from mimose.bench.advise.methods import compares_samples
from mimose.bench.advise.models import steady
from mimose.bench.advise.page import page
from mimose.bench.advise.recipe import recipe, recommended
from mimose.bench.advise.ties import spread
from mimose.bench.advise.told import as_json
from mimose.bench.advise.words import table, text, verdict
from mimose.planners import Everywhere

MIB = 2**20
PLAIN = ("none", 40, 400, 0.02, 0.05)
FULL = ("full", 12, 400, 0.027, 0.05)
LEAN = ("lean", 24, 400, 0.0225, 0.05)


def _said(measured, **options):
    return "\n".join(verdict(advise_on(measured, **options)))


def _bent(measured):
    """Return a method whose seconds no line explains."""
    factors = (1.0, 3.0, 0.3, 2.5, 0.4)
    timed = tuple(
        Timed(batch=each.batch, length=None, rounds=tuple(f * s for s in each.rounds))
        for each, f in zip(measured.timed, factors, strict=True)
    )
    return replace(measured, timed=timed)


# ------------------------------------------------------------------ times


def test_only_known_times_make_a_winner(line, measurements):
    """Others that fit are named, with why nobody knows how fast they are."""
    failed = replace(line(*LEAN, rounds=0), stopped="its process ended")
    measured = measurements(line(*PLAIN), line(*FULL), failed, budget_mib=800)
    advice = advise_on(measured)
    assert advice.of("lean").fits_sample is True
    assert advice.of("none").fits_sample is False
    first = verdict(advice)[0]
    assert "The only one that fits of those whose time is known is full" in first
    assert "With lean it would fit too, but how fast is not known (lean: its" in first
    assert "Of the methods measured only" not in first


def test_one_method_alone_is_no_winner(line, measurements):
    """Where no other was measured nobody knows whether others fit."""
    said = _said(measurements(line(*PLAIN), budget_mib=1100))
    assert "no other was measured" in said
    assert "nothing else fits" not in said
    assert "only plain training fits" in said


def test_one_slow_step_is_told_of(line, measurements):
    """Where a single size ran, the reason is why there was no second one."""
    slow = line(*PLAIN, batches=(1,), rounds=1)
    slow = replace(slow, stopped="a step of 1 takes 3.0 s, too long")
    said = _said(measurements(slow, budget_mib=1100, n_rounds=1))
    assert "a step of 1 takes 3.0 s, too long" in said


def test_what_is_cut_in_parts_fits_in_whole_parts(line):
    """Also where only its memory is known: 31 would be four parts of 8, as 32 is."""
    found = fitting(
        line("accumulate", 10, 100, 1, 1, rounds=0), 30, 410 * MIB, 410 * MIB
    )
    assert found == (28.0, False)


def test_a_range_is_of_the_batches_that_are_named(line, measurements):
    """Not of those that fit far beyond: there the other one is faster."""
    measured = measurements(
        line("none", 10, 100, 0.10, 3.0),
        line("lean", 9, 100, 0.12, 0.5),
        budget_mib=10**5,
    )
    lean = advise_on(measured).of("lean")
    low, high = lean.interval
    assert low <= lean.ratio <= high
    assert lean.verdict == "raises"


def test_nothing_else_is_not_said_of_what_was_not_timed(line, measurements):
    """Where plain training holds not one sample, and lean was not timed."""
    measured = measurements(
        line(*PLAIN), line(*FULL), line(*LEAN, rounds=0), budget_mib=430
    )
    said = _said(measured)
    assert "nothing else fits" not in said
    assert "no other could be compared, for their time is not known (lean: too" in said


def test_nothing_fits_is_not_said_where_times_are_missing(line, measurements):
    """The only method that fits was not timed: it is named."""
    measured = measurements(line(*PLAIN), line(*FULL, rounds=0), budget_mib=700)
    first = verdict(advise_on(measured))[0]
    assert "No exact method that was measured makes it fit" not in first
    assert "With full it would fit, but how fast is not known" in first


def test_a_batch_that_ran_fits_whatever_the_line_says(line):
    """Bytes that no line explains still are bytes that were read."""
    bent = line(*FULL)
    weighed = [
        replace(
            each,
            peak_bytes=int(each.peak_bytes * f),
            reserved_bytes=int(each.peak_bytes * f),
        )
        for each, f in zip(bent.weighed, (2.0, 0.5, 3.0, 0.4, 1.0), strict=True)
    ]
    bent = replace(bent, weighed=tuple(weighed))
    assert math.isnan(fitting(bent, 32, 800 * MIB, 800 * MIB).largest)
    assert fitting(bent, 32, 800 * MIB, 800 * MIB).has_sample is True
    assert fitting(bent, 32, 100 * MIB, 800 * MIB).has_sample is False
    assert fitting(bent, 33, 800 * MIB, 800 * MIB).has_sample is False


def test_plans_that_were_not_timed_still_fit(line):
    """By what a session foretold, raised by what its steps took beyond the budget."""
    rows = tuple(
        Foretold(
            batch=x,
            length=None,
            least_bytes=(100 + 2 * x) * MIB,
            keep_bytes=(100 + 10 * x) * MIB,
            seconds=(0.1, 0.0),
        )
        for x in (2, 8, 32)
    )
    planned = replace(line("mimose", 1, 1, 1, 1, rounds=0), weighed=(), foretold=rows)
    assert fitting(planned, 16, 200 * MIB, 200 * MIB) == (50.0, True)
    assert fitting(planned, 16, 110 * MIB, 200 * MIB) == (5.0, False)


def test_the_largest_batch_needs_no_seconds(line, measurements):
    """It is told of a method whose seconds are refused, and of one without any."""
    bent = _bent(line(*FULL))
    assert steady(bent, None).fitted.seconds.refused
    measured = measurements(line(*PLAIN), bent, line(*LEAN, rounds=0), budget_mib=800)
    said = next(e for e in verdict(advise_on(measured)) if e.startswith("Largest"))
    assert "plain training fits 10" in said
    assert "full 33" in said
    assert "lean 16 (1.6 times)" in said


@pytest.mark.parametrize(
    ("stopped", "rounds", "why"),
    [
        ("a batch of 34 would not fit", 0, "too few of its steps were timed"),
        ("memory ran out", 0, "memory ran out"),
    ],
)
def test_why_no_larger_batch_ran_is_no_reason(line, measurements, stopped, rounds, why):
    """Only what took a method out of its turns is."""
    failed = replace(line(*FULL, rounds=rounds), stopped=stopped)
    n_rounds = 7 if why == stopped else 0
    advice = advise_on(
        measurements(line(*PLAIN), failed, budget_mib=800, n_rounds=n_rounds)
    )
    assert advice.of("full").no_time == why


def test_one_timed_size_is_too_few_whatever_stopped(line, measurements):
    """It took all its turns: the end of the batches tried says nothing of these."""
    few = replace(line(*FULL), stopped="a batch of 34 would not fit")
    few = replace(few, timed=few.timed[:1])
    advice = advise_on(measurements(line(*PLAIN), few, budget_mib=800))
    assert advice.of("full").no_time == "too few of its steps were timed"


def test_without_plain_times_a_method_is_not_blamed(line, measurements):
    """Its own seconds are known, and said to have nothing to be compared with."""
    measured = measurements(line(*PLAIN, rounds=0), line(*FULL), budget_mib=800)
    advice = advise_on(measured)
    assert advice.at_sample.name == "full"
    assert advice.of("full").no_verdict == "plain training's time is not known"


# ------------------------------------------------------------------ beyond


def test_every_rate_and_batch_beyond_what_was_timed_says_so(line, measurements):
    """The batch that is given, the one that may be chosen, and other memories."""
    measured = measurements(
        line(*PLAIN, batches=(1, 2, 4, 8)),
        line(*FULL, batches=(1, 2, 4, 8, 12)),
        budget_mib=1300,
    )
    said = verdict(advise_on(measured))
    first = said[0]
    assert "needs 1.02 GiB (estimated from batches up to 8)" in first
    assert "samples a second (estimated from batches up to 8)" in first
    chosen = next(e for e in said if e.startswith("If you may choose"))
    assert "16 (estimated from batches up to 8)" in chosen
    assert "24 (estimated from batches up to 12)" in chosen
    fewer = measurements(
        line(*PLAIN, batches=(1, 2, 3, 4)),
        line(*FULL, batches=(1, 2, 4, 8, 12)),
        budget_mib=1300,
    )
    flipped = next(e for e in verdict(advise_on(fewer)) if "depends on" in e)
    assert "plain training (estimated from batches up to 4)" in flipped


def test_what_is_far_beyond_the_batches_that_ran_is_not_told(line, measurements):
    """Of batches more than twice the largest timed no seconds are told."""
    advice = advise_on(
        measurements(line(*PLAIN, batches=(1, 2, 3, 4)), budget_mib=10_000)
    )
    assert advice.measurements.batch == 16
    assert math.isnan(advice.of("none").sample_seconds)
    assert advice.at_sample is None
    assert advice.free.batch == 8.0
    said = verdict(advice)[0]
    assert "makes it fit" not in said
    assert said.endswith("too far beyond the batches that ran to say more.")
    assert table(advice)[1][4] == "–"


def test_accumulation_is_no_answer_where_samples_are_compared(line, measurements):
    """With batch norms its gradients are others: it is told of, and never chosen."""
    accumulate = line("accumulate", 1, 100, 0.01, 0.1)
    alters = replace(accumulate, alters=True)
    as_usual = advise_on(measurements(line(*PLAIN), accumulate, budget_mib=800))
    advice = advise_on(measurements(line(*PLAIN), alters, budget_mib=800))
    assert as_usual.free.name == "accumulate"
    assert advice.free.name == "none"
    assert not advice.of("accumulate").is_exact
    assert compares_samples(nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)))
    assert not compares_samples(nn.LayerNorm(1))


def test_methods_that_follow_no_line_are_judged_where_they_were_timed(
    line, measurements
):
    """Of other batches nothing is told of them, not even of larger ones."""
    plain, full = line(*PLAIN), line(*FULL)
    bent = replace(
        full,
        timed=tuple(
            replace(
                each, rounds=tuple(r * (3.0 if i % 2 else 1.0) for r in each.rounds)
            )
            for i, each in enumerate(full.timed)
        ),
    )
    advice = advise_on(measurements(plain, bent, budget_mib=10_000))
    told = advice.of("full")
    assert advice.models["full"].fitted.seconds.refused
    assert told.best_batch <= told.timed_to
    assert told.verdict == "lowers"


def test_what_ran_but_was_not_timed_says_so(line, measurements):
    """Its memory was read, its seconds are estimated."""
    plain = line(*PLAIN)
    plain = replace(plain, timed=plain.timed[:3])  # up to 8
    first = verdict(advise_on(measurements(plain, line(*FULL), budget_mib=1200)))[0]
    assert "samples a second (estimated from batches up to 8)" in first
    assert "needs 1.02 GiB." in first


# ------------------------------------------------------------------ noise


def test_a_flip_inside_the_noise_is_none(line):
    """Only from where the difference is more than the noise is it one."""
    models = [steady(line(*each), None) for each in (PLAIN, FULL)]
    quiet = flips(models, {"none": 0.0, "full": 0.0}, 800 * MIB)
    noisy = flips(models, {"none": 0.2, "full": 0.2}, 800 * MIB)
    assert [flip.after for flip in quiet] == ["full", "none"]
    assert [flip.after for flip in noisy] == ["full"]


def test_with_too_few_readings_nothing_flips(line, measurements):
    """What is told is where something begins to fit, and what ties there."""
    measured = measurements(
        line(*PLAIN, rounds=3), line(*FULL, rounds=3), budget_mib=800, n_rounds=3
    )
    found = advise_on(measured).flips
    assert [flip.before for flip in found] == [""]


def test_ties_at_a_flip_are_named(line, measurements):
    """In words and in the picture: nobody can tell the two apart there."""
    measured = measurements(
        line(*PLAIN, noise=0.02),
        line("sdpa", 40, 400, 0.02, 0.05, noise=0.02),
        line(*FULL, noise=0.02),
        budget_mib=1000,
    )
    advice = advise_on(measured)
    last = advice.flips[-1]
    assert {last.after, *last.ties} == {"none", "sdpa"}
    names = "sdpa or plain training" if last.after == "sdpa" else "plain training or"
    assert f"from here on {names}" in page(advice).decode()


def test_one_size_with_few_readings_takes_no_verdict_away(line, measurements):
    """It is left out; where most sizes have few, none is left."""
    plain = line(*PLAIN)
    last = plain.timed[-1]
    short = replace(
        plain, timed=(*plain.timed[:-1], replace(last, rounds=last.rounds[:2]))
    )
    assert spread(short) == pytest.approx(spread(plain), rel=0.1)
    advice = advise_on(measurements(short, line(*FULL), budget_mib=1200))
    assert not advice.at_sample.is_tie
    assert advice.of("full").verdict == "lowers"
    few = tuple(replace(each, rounds=each.rounds[:2]) for each in plain.timed[:3])
    assert spread(replace(plain, timed=(*few, *plain.timed[3:]))) == math.inf


def test_too_few_readings_are_not_called_noise(line):
    """A choice says which of the two it is."""
    models = [steady(line(*each), None) for each in (PLAIN, FULL)]
    unknown = choose(models, {"none": math.inf, "full": 0.0}, 1200 * MIB, 16)
    known = choose(models, {"none": 0.0, "full": 0.0}, 1200 * MIB, 16)
    assert (unknown.is_tie, unknown.too_few) == (True, True)
    assert (known.is_tie, known.too_few) == (False, False)


# ------------------------------------------------------------------ lengths


def test_lengths_are_answered_without_plain_training(line, measurements):
    """Of the methods that were timed; plain training is said to be missing."""
    lengths = (32, 64, 96, 128)
    timed = tuple(
        Timed(batch=16, length=n, rounds=(0.013 * n + 0.1,) * 7) for n in lengths
    )
    full = line("full", 2, 100, 0.13, 0.01, lengths=lengths)
    full = replace(full, timed=full.timed + timed)
    plain = line("none", 10, 100, 0.1, 0.01, lengths=lengths)
    found = measurements(plain, full, budget_mib=200, lengths=(32, 64, 160))
    answer = advise_on(found).lengths
    assert (answer.best, answer.unknown) == ("full", ("none",))
    said = _said(found)
    assert "of those that were timed only with full (estimated from lengths" in said
    assert "On these lengths plain training could not be compared" in said


# ------------------------------------------------------------------ what to write


def test_a_recipe_is_what_was_measured(line, measurements):
    """In words, on the page and for a script."""
    measured = measurements(line(*PLAIN), line(*LEAN), budget_mib=800)
    advice = advise_on(measured)
    assert recommended(advice)[0] == "lean"
    call = (
        'mimose.attach(model, "800MiB", actions=("keep", "lean", "recompute"), '
        'planner=Everywhere("lean"))'
    )
    assert recipe("lean", 800 * MIB) == [
        "import mimose",
        "from mimose.planners import Everywhere",
        "",
        call,
    ]
    assert call in text(advice, 120)
    assert call in json.loads(json.dumps(as_json(advice)))["at_sample"]["code"]
    assert "Everywhere(&quot;lean&quot;)" in page(advice).decode()
    assert eval(call.split("planner=")[1][:-1], {"Everywhere": Everywhere})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mimose", 'mimose.attach(model, "2GiB", actions="exact")'),
        ("full", 'mimose.attach(model, "2GiB", planner="full")'),
        ("sdpa", 'model.set_attn_implementation("sdpa")'),
        ("accumulate", "    (loss_of(part) / 4).backward()"),
    ],
)
def test_every_way_to_train_is_written_out(name, said):
    """With the options that it was measured with."""
    assert said in recipe(name, 2 * 2**30)


def test_a_budget_is_rounded_down():
    """What is written is never more than what was asked about."""
    assert '"484MiB"' in recipe("full", 484 * MIB + 700_000)[-1]


# ------------------------------------------------------------------ notes


def test_notes_stand_at_the_top(line, measurements):
    """In words, and set off on the page."""
    note = "the model returns no loss: the mean of its output was trained"
    measured = measurements(line(*PLAIN), line(*FULL), budget_mib=800, notes=(note,))
    advice = advise_on(measured)
    assert verdict(advice)[0] == f"Please note: {note}."
    assert f'<p class="note"><strong>Please note: {note}.' in page(advice).decode()
    html = page(advice).decode()
    assert html.index('<p class="verdict">Yes') < html.index('<p class="note">')


# ------------------------------------------------------------------ what fits


def test_nothing_is_said_to_fit_only_of_what_was_timed(line, measurements):
    """Below, at other memories, and with any batch: one that was not timed may fit."""
    below = measurements(
        line("none", 20, 400, 0.01, 0.1),
        line("full", 5, 400, 0.02, 0.1, rounds=0),
        budget_mib=800,
    )
    said = _said(below)
    assert "nothing fits" not in said
    assert "nothing whose time is known fits" in said
    at_all = replace(
        below, methods=(line("none", 200, 400, 0.01, 0.1), *below.methods[1:])
    )
    said = _said(at_all, budget_bytes=500 * MIB)
    assert (
        "Not one sample fits into 500.0 MiB with any exact method whose time is" in said
    )


def test_only_one_fits_is_not_said_of_what_is_not_known(line, measurements):
    """Of a session that learned nothing, and of methods without a turn."""
    unknown = Measured(method="mimose", why_not="it had too little time to learn")
    note = "no time was left for lean, pool: --minutes 1 is too short for 7 rounds"
    measured = measurements(
        line(*PLAIN), line(*FULL), unknown, budget_mib=700, notes=(note,)
    )
    first = verdict(advise_on(measured))[1]
    assert "makes it fit (not known of mimose or lean): 33" in first
    assert "nothing fits" not in _said(measured)


def test_larger_batches_are_those_that_are_told(line, measurements):
    """One of which more than 8 is not told is in no list of larger ones than 31."""
    measured = measurements(
        line("none", 20, 400, 0.01, 0.1),
        line("full", 5, 400, 0.02, 0.1, batches=(1, 2, 4)),
        budget_mib=1020,
    )
    said = next(e for e in verdict(advise_on(measured)) if e.startswith("Largest"))
    assert said.endswith("plain training fits 31; no other is known to fit more.")
    assert "only plain training fits (not known of full)" in _said(measured)
    assert "nothing fits; from there full" in _said(measured)


def test_a_step_that_does_not_fit_says_what_its_seconds_are_from(line, measurements):
    """Plain training's, at batches beyond those timed; and the bytes that go."""
    measured = measurements(
        line(*PLAIN, batches=(1, 2, 4, 8)),
        line("sdpa", 25, 400, 0.018, 0.05),
        budget_mib=900,
    )
    said = _said(measured)
    assert "(370 ms; estimated from batches up to 8)" in said
    assert "240.0 MiB at your batch (estimated from batches up to 8) without" in said


def _bulging(measured):
    """Return a method whose bytes no line explains."""
    factors = (2.0, 0.5, 3.0, 0.4, 1.0)
    weighed = tuple(
        replace(
            each,
            peak_bytes=int(each.peak_bytes * f),
            reserved_bytes=int(each.peak_bytes * f),
        )
        for each, f in zip(measured.weighed, factors, strict=True)
    )
    return replace(measured, weighed=weighed)


def test_refused_fits_say_how_far_off_they_are(line, measurements):
    """And whose they are, with a decimal: 5% is not more than 5%."""
    said = _said(measurements(line(*PLAIN), _bulging(line(*FULL)), budget_mib=800))
    assert "No verdict on full: its bytes follow no line (predictions of" in said
    assert "%; allowed 5%)" in said
    said = _said(measurements(_bulging(line(*PLAIN)), line(*FULL), budget_mib=800))
    assert "No verdict on plain training and full: plain training's bytes" in said


def test_who_has_a_verdict_is_not_said_to_have_none(line, measurements):
    """Methods whose seconds follow no line are judged where they were timed."""
    advice = advise_on(
        measurements(line(*PLAIN), _bent(line(*FULL)), line(*LEAN), budget_mib=1100)
    )
    judged = [each.name for each in advice.methods if each.verdict]
    none = [each for each in verdict(advice) if each.startswith("No verdict")]
    assert judged
    assert not any(name in each for name in judged for each in none)


def test_code_is_for_methods_to_choose_from(line, measurements):
    """No tie within a noise that hides a third is one, nor one with plain training."""
    far = ("sdpa", 24, 400, 0.03, 0.05)
    measured = measurements(
        line("none", 80, 400, 0.02, 0.05),
        line(*LEAN, rounds=3),
        line(*far, rounds=3),
        budget_mib=850,
    )
    advice = advise_on(measured)
    assert advice.at_sample.is_tie
    assert "sdpa" not in recommended(advice)
    measured = measurements(
        line(*PLAIN, noise=0.02),
        line("sdpa", 40, 400, 0.02003, 0.05, noise=0.02),
        budget_mib=1100,
    )
    assert recommended(advise_on(measured)) == ["none"]
    assert "To train with" not in text(advise_on(measured), 80)


@pytest.mark.parametrize(
    ("rounds", "why"),
    [(3, "in too few rounds to be sure"), (7, "within the noise")],
)
def test_times_of_lengths_that_tie_say_why(line, measurements, rounds, why):
    """Few rounds are not called noise, and by how much they differ is told."""
    lengths = (32, 64, 96, 128)
    scatter = (1.0, 1.1, 0.9, 1.05, 0.95, 1.02, 0.98)[:rounds]

    def timed(name, a_token):
        made = line(name, 2, 100, 0.1, 0.1, noise=0.1, rounds=rounds, lengths=lengths)
        more = tuple(
            Timed(
                batch=16,
                length=n,
                rounds=tuple(s * (a_token * n + 0.1) for s in scatter),
            )
            for n in lengths
        )
        return replace(made, timed=made.timed + more)

    found = measurements(
        timed("none", 0.0100),
        timed("full", 0.0103),
        budget_mib=900,
        lengths=lengths,
        n_rounds=rounds,
    )
    said = next(each for each in verdict(advise_on(found)) if "will come" in each)
    assert (
        f"no winner between plain training and full, which takes 2.7% longer, {why}"
        in said
    )
