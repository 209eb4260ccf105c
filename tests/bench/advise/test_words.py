"""What an answer says, for every kind of answer."""

import json
import re
import textwrap
from dataclasses import replace

import pytest

from mimose.bench.advise.advice import advise_on
from mimose.bench.advise.measured import Measured, read
from mimose.bench.advise.methods import METHODS
from mimose.bench.advise.phrases import listed, longer
from mimose.bench.advise.recipe import recipe
from mimose.bench.advise.told import as_json
from mimose.bench.advise.words import code, table, text, verdict

PLAIN = ("none", 40, 400, 0.02, 0.05)
FULL = ("full", 12, 400, 0.027, 0.05)
LEAN = ("lean", 24, 400, 0.0225, 0.05)
SDPA = ("sdpa", 25, 400, 0.018, 0.05)


def _said(measured, **options):
    return "\n".join(verdict(advise_on(measured, **options)))


@pytest.fixture
def wide(line, measurements):
    """Return measurements in which plain training fits and wins."""
    return measurements(
        line(*PLAIN, lengths=(32, 64, 128, 192)),
        line(*FULL, lengths=(32, 64, 128, 192)),
        line(*LEAN),
        line("pool", 20, 400, 0.024, 0.05),
        Measured(method="offload", why_not="a model on a CPU is on the host already"),
        line("accumulate", 10, 400, 0.0205, 0.2),
        budget_mib=1200,
    )


def test_plain_training_fits_and_wins(wide):
    """The need, the rate and how far behind the next one is are the fits' own."""
    first = verdict(advise_on(wide))[0]
    assert "16 samples × 128 tokens, fits into 1.17 GiB: plain" in first
    assert "needs 1.02 GiB" in first  # 16 × 40 + 400 MiB
    assert "The fastest that fits is plain training: 43.2 samples a second" in first
    # 16 ÷ (16 × 0.0225 + 0.05) = 39.0
    assert re.search(r"Next comes lean \(.*\), 39.0 \(9.8% fewer\)", first)


def test_the_batch_may_be_chosen(wide):
    """Then the best batches are compared, and accumulation is one of them."""
    said = _said(wide)
    assert "plain training with batches of 20 gives the most, 44.4" in said
    assert re.search(
        r"next accumulate \(.*\) with batches of 64 \(estimated from batches up to "
        r"32\), 42.3 \(4.8%",
        said,
    )


def test_what_each_method_does_is_told(wide):
    """Batches, lengths and throughput come with how many times and with a range."""
    said = _said(wide)
    assert (
        "plain training fits 20, full over 64 (3.2 times; estimated from batches up to "
        "32) and lean 33 (1.6 times; estimated from batches up to 32)" in said
    )
    # 160 and 533 tokens, whole and to a hundredth
    assert re.search(
        r"plain training 1\d\d and full 5[23]\d \(3\.[34] times; estimated from "
        r"lengths up to 192\)",
        said,
    )
    assert re.search(
        r"full 0.81 \(0.8\d to 0.8\d; estimated.*\) and lean 0.9\d \(.*\) lower it",
        said,
    )


def test_lossy_methods_stand_apart(wide):
    """They are in no list of the others, and it is said that gradients change."""
    apart = [each for each in verdict(advise_on(wide)) if "pool" in each]
    changed = [each for each in apart if each.startswith("These change gradients")]
    assert len(changed) == 1
    assert "largest batch 40 (estimated from batches up to 32), best" in changed[0]
    assert re.search(r"throughput 0.89 \(0.89 to 0.89; estimated", changed[0])
    assert apart == changed


def test_accumulation_is_an_alternative(wide):
    """It is said for which losses it is none, where an answer names it."""
    assert "Accumulation needs no tool" in _said(wide)
    assert "contrastive" in _said(wide)


def test_accumulation_that_is_slower_is_none(line, measurements):
    """Nothing is said of it where two others are faster."""
    measured = measurements(
        line(*PLAIN),
        line(*LEAN),
        line("accumulate", 10, 400, 0.04, 0.2),
        budget_mib=1200,
    )
    assert "ccumulation" not in _said(measured)


def test_methods_without_a_verdict_say_why(wide):
    """What could not be measured is named with its reason."""
    said = _said(wide)
    assert "No verdict on offload: a model on a CPU is on the host already." in said


def test_the_answer_flips_at_other_memories(wide):
    """Each memory at which another method becomes the fastest, the least first."""
    said = next(each for each in verdict(advise_on(wide)) if "depends on" in each)
    assert re.search(r"Below 41\d\.\d MiB nothing fits", said)
    assert said.index("full") < said.index("lean") < said.index("plain training")


def test_plain_training_does_not_fit(line, measurements):
    """It is said by how much, and what a step costs that fits."""
    measured = measurements(line(*PLAIN), line(*FULL), line(*LEAN), budget_mib=800)
    first = verdict(advise_on(measured))[0]
    assert "does not fit into 800.0 MiB: plain" in first
    assert "needs 1.02 GiB, 240.0 MiB too much" in first
    assert "The fastest that fits is lean" in first
    # 0.41 s over 0.37 s
    assert (
        "With lean a step takes 410 ms, 11% longer than plain training's would, if it "
        "fitted (370 ms)." in first
    )


def test_a_tie_names_no_winner(line, measurements):
    """Where the two fastest differ by less than the noise, neither is called that."""
    measured = measurements(
        line(*PLAIN, noise=0.02),
        line("lean", 24, 400, 0.02003, 0.05, noise=0.02),
        budget_mib=1100,
    )
    first = verdict(advise_on(measured))[0]
    assert "No winner: plain training and lean" in first
    assert "a difference within the noise." in first
    assert "The fastest" not in first


def test_nothing_fits(line, measurements):
    """The largest batch that does fit is told, and what to change."""
    measured = measurements(line(*PLAIN), line(*FULL), budget_mib=500)
    first = verdict(advise_on(measured))[0]
    assert "No exact method that was measured makes it fit" in first
    assert "The largest batch that does fit is 8, with full" in first


def test_not_one_sample_fits(line, measurements):
    """There is no best batch to name."""
    measured = measurements(line(*PLAIN), line(*FULL), budget_mib=300)
    said = _said(measured)
    assert "Not one sample fits into 300.0 MiB with any exact method." in said
    assert "Take a smaller model" in said


def test_an_interrupted_run_says_so_first(line, measurements):
    """Without timings memory is still told; that nothing was timed is no verdict."""
    measured = measurements(
        line(*PLAIN, rounds=0),
        line(*FULL, rounds=0),
        budget_mib=800,
        is_interrupted=True,
        n_rounds=0,
    )
    first, second, *_ = verdict(advise_on(measured))
    assert first.startswith("Measuring was interrupted after no round")
    assert "needs 1.02 GiB, 240.0 MiB too much" in second
    assert "Which method is the fastest cannot be said" in second
    said = _said(measured)
    assert "plain training and full: too few of its steps were timed" in said
    assert "No seconds were measured" in said


def test_few_rounds_are_a_first_idea(line, measurements):
    """Below the rounds that an interval takes, every word on speed is qualified."""
    measured = measurements(
        line(*PLAIN, rounds=3), line(*FULL, rounds=3), budget_mib=800, n_rounds=3
    )
    first, *others = verdict(advise_on(measured))
    assert "measured in 3 rounds only" in first
    assert "No verdict on full: 3 rounds are too few" in "\n".join(others)


def test_enough_rounds_are_no_warning(wide):
    """Nothing stands before the answer then."""
    assert verdict(advise_on(wide))[0].startswith("Your batch")


def test_where_plain_training_fits_not_at_all_no_ratio_is_told(line, measurements):
    """A multiple of nothing is none."""
    measured = measurements(line(*PLAIN), line(*FULL), budget_mib=420)
    said = _said(measured)
    assert "Plain training does not fit with one sample; full does." in said
    assert "as a multiple" not in said


def test_a_refused_fit_has_no_verdict(line, measurements):
    """A series that no line explains is told as such, and chosen for nothing."""
    bent = line(*FULL)
    weighed = [
        type(each)(
            batch=each.batch,
            length=None,
            peak_bytes=int(each.peak_bytes * factor),
            reserved_bytes=int(each.reserved_bytes * factor),
            seconds=each.seconds,
        )
        for each, factor in zip(bent.weighed, (2.0, 0.5, 3.0, 0.4, 1.0), strict=True)
    ]
    bent = Measured(method="full", weighed=tuple(weighed), timed=bent.timed)
    said = _said(measurements(line(*PLAIN), bent, budget_mib=800))
    assert (
        "No verdict on full: its bytes follow no line (predictions of left-out" in said
    )
    assert "fits is full" not in said


@pytest.mark.parametrize(
    ("budget_mib", "said"),
    [
        # plain needs 1040 MiB and sdpa 240 less
        (900, "Do this first: fused attention (sdpa) frees 240.0 MiB at your batch"),
        (900, "more than the 140.0 MiB that any other method would have to free"),
        (700, "of the 340.0 MiB that are missing"),
        (700, "has only 100.0 MiB left to find"),
        (1200, "Whatever else you do: fused attention (sdpa) frees 240.0 MiB"),
    ],
)
def test_what_needs_no_recomputation_comes_first(line, measurements, budget_mib, said):
    """Fused attention is told first, with what it frees of what is missing."""
    measured = measurements(
        line(*PLAIN), line(*FULL), line(*SDPA), budget_mib=budget_mib
    )
    assert said in _said(measured)


@pytest.mark.parametrize(
    ("budget_mib", "head"),
    [(900, "Do this first: f"), (700, "Do this first: f"), (1200, "F")],
)
def test_what_frees_memory_is_told_without_its_time(
    line, measurements, budget_mib, head
):
    """Its bytes are known; that its time is not is said, with the reason."""
    measured = measurements(
        line(*PLAIN), line(*FULL), line(*SDPA, rounds=0), budget_mib=budget_mib
    )
    found = [e for e in verdict(advise_on(measured)) if "used attention (sdpa)" in e]
    assert found[0].startswith(
        f"{head}used attention (sdpa) frees 240.0 MiB at your batch without computing "
        f"anything twice (how fast is not known: too few of its steps were timed)"
    )
    assert "Whatever else" not in found[0]


def test_nothing_is_said_of_what_frees_nothing(line, measurements):
    """A fused attention that is as large as the plain one is no advice."""
    same = ("sdpa", *PLAIN[1:])
    measured = measurements(line(*PLAIN), line(*same), budget_mib=900)
    assert "Do this first" not in _said(measured)


def test_conditions_are_told(line, measurements):
    """Rounds, time, device, what was left out, and a machine that was busy."""
    measured = measurements(
        line(*PLAIN),
        line(*FULL),
        budget_mib=800,
        notes=(
            "full was not timed at a batch of 64, for lack of time",
            "full was not timed at a batch of 32, for lack of time",
        ),
        load_average=9.4,
    )
    said = _said(measured)
    assert "Not timed, to have time for more rounds: full at a batch of 64 and" in said
    assert "medians of 7 rounds" in said
    assert "4.78 min of the 5 min" in said
    assert "cpu: a slow one, 2 threads" in said
    assert "so something else ran too" in said


@pytest.mark.parametrize(
    ("by_pace", "said"),
    [
        (True, "took turns, each step set against the machine's pace around it;"),
        (False, "took turns, by the clock, which scattered less"),
        (None, "took turns; measuring"),
    ],
)
def test_what_seconds_are_told_by(wide, tmp_path, by_pace, said):
    """It is said of the measurements, not of the code that reads them."""
    file = tmp_path / "measured.json"
    replace(wide, by_pace=by_pace).write(file)
    assert said in _said(read(file))


def test_measurements_of_old_say_nothing_of_a_pace(wide, tmp_path):
    """A file in which it is not written down can be read."""
    file = tmp_path / "measured.json"
    wide.write(file)
    told = json.loads(file.read_text())
    del told["by_pace"]
    file.write_text(json.dumps(told))
    assert "pace" not in _said(read(file))


def test_a_quiet_machine_is_no_warning(wide):
    """A load within the threads that trained is theirs."""
    assert "something else ran" not in _said(wide)


def test_what_goes_beyond_the_batches_run_is_marked(line, measurements):
    """By what it was followed on from; what ran bears no mark."""
    measured = measurements(
        line(*PLAIN, batches=(2, 4, 8, 16, 20)), line(*FULL), budget_mib=1200
    )
    said = next(
        each for each in verdict(advise_on(measured)) if each.startswith("Largest")
    )
    assert "plain training fits 20, full over 64 (3.2 times; estimated from" in said


@pytest.mark.parametrize("width", [40, 80, 120])
def test_text_fits_any_width(wide, width):
    """No line is wider than the terminal, and every method is in the table."""
    lines = text(advise_on(wide), width).splitlines()
    assert max(map(len, lines)) <= width
    for name in ("none", "full", "lean", "pool", "offload", "accumulate"):
        assert any(each.strip().startswith(name) for each in lines)


def test_printed_code_is_python_at_any_width(wide):
    """Its lines and their indentation are the recipe's."""
    advice = advise_on(wide)
    for name in METHODS.keys() - {"none"}:
        chosen = replace(advice, at_sample=replace(advice.free, name=name), free=None)
        written = recipe(name, advice.budget_bytes)
        for width in (20, 38, 80):
            printed = code(chosen, width)[-len(written) :]
            found = textwrap.dedent("\n".join(printed))
            assert found.splitlines() == written
            compile(found, name, "exec")


def test_the_table_has_a_cell_for_every_column(wide):
    """Methods that nothing is known of have dashes."""
    head, *rows = table(advise_on(wide))
    assert {len(row) for row in rows} == {len(head)}
    by_name = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert by_name["full"]["verdict"] == "slower"
    assert by_name["full"]["largest batch"] == "over 64"
    assert by_name["offload"]["samples/s"] == "–"
    assert by_name["pool"]["gradients"] == "changed"


def test_json_has_no_word_for_infinity(line, measurements):
    """What does not fit is null, and all can be read back."""
    measured = measurements(line(*PLAIN), line(*FULL), budget_mib=410)
    told = as_json(advise_on(measured))
    again = json.loads(json.dumps(told, allow_nan=False))
    assert again == told
    methods = {each["name"]: each for each in again["methods"]}
    assert methods["none"]["sample_seconds"] is None
    assert methods["none"]["fits"]["memory"]["form"] == "line"
    assert again["at_sample"] is None
    assert again["measurements"]["n_rounds"] == 7
    assert again["verdict"]


def test_json_has_the_choice(wide):
    """A script reads the method and the batch from it."""
    told = as_json(advise_on(wide))
    assert told["free"]["name"] == "none"
    assert told["free"]["batch"] == 20.0
    assert [flip["after"] for flip in told["flips"]][-1] == "none"


def test_small_phrases():
    """Lists and comparisons as people write them."""
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert longer(0.5, 1.0) == "50% less than"


def test_an_interrupted_first_round_names_no_winner(line, measurements):
    """Some readings and no whole round: they are counted, and nobody wins by them."""
    measured = measurements(
        line(*PLAIN, rounds=1), line(*LEAN, rounds=1), budget_mib=1200, n_rounds=0
    )
    said = _said(measured)
    assert "measured in 1 round only" in said
    assert "No seconds were measured" not in said
    assert "1 round is too few" in said
    assert "No winner yet: plain training and lean" in said
    assert "1 round is too few to be sure, 5 are needed" in said
    assert "depends on the memory" not in said


def test_a_method_that_failed_in_its_turns_says_why(line, measurements):
    """What stopped it is the reason, not that readings are few."""
    failed = replace(line(*FULL, rounds=0), stopped="its process ended")
    said = _said(measurements(line(*PLAIN), failed, budget_mib=800))
    assert "No verdict on full: its process ended." in said
