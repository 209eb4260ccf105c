"""The answer in a line: what it says in each case, and when it says nothing."""

import json
from dataclasses import replace

import pytest

from mimose.bench.advise.advice import advise_on
from mimose.bench.advise.measured import Measured, Timed
from mimose.bench.advise.short import short_answer
from mimose.bench.advise.told import as_json
from mimose.bench.advise.words import text, verdict

PLAIN = ("none", 40, 400, 0.02, 0.05)
LARGE = ("none", 80, 400, 0.02, 0.05)
FULL = ("full", 12, 400, 0.027, 0.05)
LEAN = ("lean", 24, 400, 0.0225, 0.05)
SDPA = ("sdpa", 25, 400, 0.018, 0.05)
SAME = ("sdpa", 40, 400, 0.02003, 0.05)
HALF = ("every-2", 24, 400, 0.02255, 0.05)
UNKNOWN = Measured(method="mimose", why_not="it had too little time to learn")
NO_HOST = Measured(method="offload", why_not="a model on a CPU is on the host already")
LENGTHS = (32, 64, 96, 128)


@pytest.fixture
def answer(line, measurements):
    """Return the line for methods at a budget of so many MiB."""

    def make(budget_mib, *methods, noise=0.002, rounds=7, untimed=(), **changes):
        made = [
            each
            if isinstance(each, Measured)
            else line(*each, noise=noise, rounds=0 if each[0] in untimed else rounds)
            for each in methods
        ]
        found = measurements(*made, budget_mib=budget_mib, n_rounds=rounds, **changes)
        return short_answer(advise_on(found))

    return make


# ------------------------------------------------------------------ it fits


def test_no_where_plain_training_fits_and_wins(answer):
    """Nothing has to change."""
    assert answer(1200, PLAIN, FULL, LEAN, NO_HOST) == (
        "No: train as you do. Your batch fits, and no method is faster."
    )


def test_yes_where_another_method_is_faster(answer):
    """By more than the noise, at the batch that fits without."""
    assert answer(1200, PLAIN, SDPA) == (
        "Yes: use sdpa. Your batch fits, but so training is faster."
    )


def test_not_known_inside_the_noise(answer):
    """Plain training needs no change, so it is what to go on with."""
    assert answer(1100, PLAIN, SAME, noise=0.02) == (
        "Not known whether sdpa is faster: train as you do, your batch fits."
    )


def test_not_known_with_few_rounds(answer):
    """Minutes that give rounds enough are told: 5 minutes gave 3 of 5."""
    assert answer(1200, PLAIN, FULL, rounds=3) == (
        "Not known whether full is faster (give it 9 minutes): train as you do, your "
        "batch fits."
    )


def test_not_known_where_what_may_be_faster_was_not_timed(answer):
    """Fused attention may be; what only recomputes is not, and is not counted."""
    assert answer(1200, PLAIN, FULL, SDPA, untimed=("sdpa",)) == (
        "Not known whether sdpa is faster: train as you do, your batch fits."
    )
    assert answer(1200, PLAIN, FULL, LEAN, untimed=("lean",)) == (
        "No: train as you do. Your batch fits, and no method that was timed is faster."
    )


def test_not_known_where_nothing_was_compared(answer):
    """Plain training alone, or no timings at all."""
    said = "Not known whether any method is faster: train as you do, your batch fits."
    assert answer(1200, PLAIN) == said
    assert answer(1200, PLAIN, FULL, untimed=("none", "full")) == said


def test_methods_that_were_left_out_count(answer):
    """Nobody knows whether one without a turn would be faster."""
    note = "no time was left for sdpa, rows: --minutes 1 is too short"
    assert answer(1200, PLAIN, FULL, notes=(note,)) == (
        "Not known whether sdpa is faster: train as you do, your batch fits."
    )


# ------------------------------------------------------------------ it does not


def test_yes_where_the_batch_does_not_fit(answer):
    """With the fastest that makes it fit."""
    assert answer(700, LARGE, FULL) == (
        "Yes: use full. Your batch does not fit without."
    )


def test_a_faster_batch_is_a_condition(answer):
    """Where plain training with a smaller batch is faster, yes is not all."""
    assert answer(800, PLAIN, FULL, LEAN) == (
        "Yes, if the batch must stay as it is: use lean. Your batch does not fit "
        "without."
    )


def test_a_tie_that_fits_is_told(answer):
    """Either does; which is faster nobody knows."""
    assert answer(850, LARGE, LEAN, HALF, noise=0.02) == (
        "Yes: use lean or every-2. Your batch does not fit without; which is faster is "
        "not known."
    )


def test_what_is_not_known_of_others_is_told(answer):
    """Of one that was not timed, and of one that learned nothing."""
    assert answer(700, LARGE, FULL, UNKNOWN, NO_HOST) == (
        "Yes: use full. Your batch does not fit without; whether mimose would be "
        "faster is not known."
    )
    assert answer(700, PLAIN, FULL, untimed=("full",)) == (
        "Yes: use full. Your batch does not fit without; how fast it is is not known."
    )


def test_no_where_nothing_makes_it_fit(answer):
    """What to change is said; one of which nothing is known could do it."""
    assert answer(500, PLAIN, FULL, NO_HOST) == (
        "No: no exact method that was measured makes it fit."
    )
    assert answer(500, PLAIN, FULL, UNKNOWN) == (
        "Not known: your batch does not fit, and whether mimose would help was not "
        "measured; give it 10 minutes."
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_trifle_is_just_about(line, measurements, device):
    """A CPU's readings repeat to about a MiB; an accelerator's are exact."""
    measured = measurements(
        line("none", 40, 400.5, 0.02, 0.05), line(*FULL), budget_mib=1040, device=device
    )
    advice = advise_on(measured)
    assert short_answer(advice).startswith(
        "Not known: plain training needs just about the memory there is; to be sure, "
        "use full."
        if device == "cpu"
        else "Yes, if the batch must stay as it is: use full."
    )
    assert ("just about as much" in text(advice, 200)) == (device == "cpu")


def test_far_beyond_what_was_timed_nothing_is_known(answer, line):
    """More than twice the largest batch."""
    small = [line(*each, batches=(1, 2, 3)) for each in (PLAIN, FULL)]
    assert answer(9000, *small, batch=64) == (
        "Not known: your batch is more than 2 times the largest that ran; give it 10 "
        "minutes."
    )


def test_an_interrupted_run_is_given_its_minutes(answer):
    """It had not come to its end: no longer ones are needed."""
    assert answer(500, PLAIN, FULL, UNKNOWN, is_interrupted=True).endswith(
        "give it 5 minutes."
    )


def test_train_as_you_do_is_a_condition_too(line, measurements):
    """Where a larger batch with another method is clearly faster."""
    measured = measurements(
        line("none", 20, 400, 0.01, 0.1, noise=0.05),
        line("full", 10, 400, 0.0105, 0.1, noise=0.05),
        budget_mib=1000,
    )
    assert short_answer(advise_on(measured)) == (
        "Not known whether full is faster, if the batch must stay as it is: train as "
        "you do, your batch fits."
    )


# ------------------------------------------------------------------ lengths


def _timed(measured, a_token):
    timed = tuple(
        Timed(batch=16, length=n, rounds=(a_token * n + 0.1,) * 7) for n in LENGTHS
    )
    return replace(measured, timed=measured.timed + timed)


@pytest.mark.parametrize(
    ("budget_mib", "said"),
    [
        (300, "No: train as you do. All batches of your lengths fit, and no method is"),
        (200, "Yes: use full. Not all batches of your lengths fit without."),
        (110, "No: no exact method that was measured makes all of them fit."),
    ],
)
def test_with_lengths_it_is_about_all_of_them(line, measurements, budget_mib, said):
    """The sample's own batch is one of many."""
    plain = line("none", 10, 100, 0.1, 0.01, lengths=LENGTHS)
    full = line("full", 2, 100, 0.13, 0.01, lengths=LENGTHS)
    measured = measurements(
        _timed(plain, 0.010),
        _timed(full, 0.013),
        budget_mib=budget_mib,
        lengths=(32, 40, 48, 64, 128),
    )
    assert short_answer(advise_on(measured)).startswith(said)


def test_lengths_that_were_not_timed_are_not_known(line, measurements):
    """Though the sample's own batch fits."""
    measured = measurements(line(*PLAIN), line(*FULL), budget_mib=1200, lengths=(5, 9))
    assert short_answer(advise_on(measured)) == (
        "Not known: plain training was timed at too few of your lengths; give it 10 "
        "minutes."
    )


# ------------------------------------------------------------------ what follows


@pytest.mark.parametrize("budget_mib", [420, 500, 700, 800, 1000, 1100, 1700, 4000])
@pytest.mark.parametrize("noise", [0.002, 0.1])
@pytest.mark.parametrize("untimed", [(), ("full",), ("sdpa", "lean"), ("none",)])
def test_it_says_nothing_else_than_what_follows(
    line, measurements, budget_mib, noise, untimed
):
    """Whether the batch fits, who is the fastest, and that nobody knows."""
    measured = measurements(
        *(
            line(*each, noise=noise, rounds=0 if each[0] in untimed else 7)
            for each in (PLAIN, FULL, LEAN, SDPA)
        ),
        budget_mib=budget_mib,
    )
    advice = advise_on(measured)
    said, choice = short_answer(advice), advice.at_sample
    first = verdict(advice)[0]
    assert ("does not fit" in said or "makes it fit" in said) == (
        "does not fit" in first
    )
    if "train as you do" in said:
        assert "fits into" in first
    if said.startswith("No") and "Your batch fits" in said:
        assert (choice.name, choice.is_tie) == ("none", False)
    if said.startswith("Yes") and choice is not None:
        assert f"use {choice.name}" in said
        assert choice.is_tie == ("which is faster is not known" in said)
    if said.startswith("No: no exact"):
        assert "No exact method that was measured makes it fit" in first


# ------------------------------------------------------------------ where it stands


def test_it_stands_first(line, measurements):
    """In the text below the question, and in the JSON."""
    advice = advise_on(measurements(line(*PLAIN), line(*FULL), budget_mib=1200))
    assert text(advice, 200).split("\n\n")[1] == short_answer(advice)
    told = json.loads(json.dumps(as_json(advice)))
    assert next(iter(told)) == "answer"
    assert told["answer"] == short_answer(advice)
