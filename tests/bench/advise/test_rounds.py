"""Turns of all methods, within a time."""

import itertools
import math
import time

import pytest

from mimose.bench.advise.measured import Foretold, Measured, Weighed
from mimose.bench.advise.rounds import (
    ENOUGH_ROUNDS,
    Rounds,
    Sized,
    points_of,
    reading_of,
    sized,
)
from mimose.bench.advise.training import Point
from mimose.bench.child import RunFailedError

_PACES = (1.0, 1.4, 0.9, 1.0, 2.0, 0.8, 1.0)
"""Of a machine that changes its speed from step to step, times 2 ms."""


class _Crew:
    """Answers at once; one method fails from its second turn on, some make no plan.

    Steps take as long as the pace around them makes them, but for methods that stray.
    """

    def __init__(self, fails="", slow=1.0, stray=(), unplanned=()):
        self.turns = []
        self._slow = slow
        self._fails = fails
        self._stray = stray
        self._unplanned = unplanned
        self._paces = itertools.cycle(_PACES)

    def ask(self, method, arguments):
        self.turns.append(method)
        if method == self._fails and self.turns.count(method) > 1:
            msg = "memory ran out\nsomewhere"
            raise RunFailedError(msg)
        slow = self._slow if len(self.turns) > 2 else 1.0
        told = {"seconds": [], "paces": []}
        for size, _, n_steps in arguments["points"]:
            paces = [slow * next(self._paces) for _ in range(n_steps + 1)]
            means = [(a + b) / 2 for a, b in itertools.pairwise(paces)]
            factors = [1.0] * n_steps if method in self._stray else means
            if (method, size) in self._unplanned:
                factors = [math.nan] * n_steps
            told["seconds"].append([0.1 * size * each for each in factors])
            told["paces"].append([0.002 * each for each in paces])
        return told


def _rounds(crew, names=("none", "full")):
    points = {
        name: [Sized(Point(2), 4, 0.2), Sized(Point(4), 4, 0.4)] for name in names
    }
    return Rounds(crew, points, {}, budget_bytes=1, seed=0)


def test_all_take_a_turn_in_each_round():
    """All take a turn in each round."""
    crew = _Crew()
    rounds = _rounds(crew)
    for _ in range(3):
        rounds.run_one()
    assert [sorted(crew.turns[i : i + 2]) for i in (0, 2, 4)] == [["full", "none"]] * 3
    two, four = rounds.timed("none")
    assert (two.batch, four.batch) == (2, 4)
    assert two.rounds == pytest.approx([0.2] * 3)
    assert four.rounds == pytest.approx([0.4] * 3)


def test_who_fails_takes_no_more_turns():
    """Who fails takes no more turns."""
    crew = _Crew(fails="full")
    rounds = _rounds(crew)
    for _ in range(4):
        rounds.run_one()
    assert crew.turns.count("full") == 2
    assert rounds.failed == {"full": "memory ran out"}
    assert len(rounds.timed("none")[0].rounds) == 4


def test_steps_without_a_plan_are_no_readings():
    """The size is left out, with the reason; so is who has no other."""
    rounds = _rounds(_Crew(unplanned={("mimose", 4)}), ("none", "mimose"))
    rounds.run_one()
    rounds.run_one()
    assert [each.batch for each in rounds.timed("mimose")] == [2]
    assert [each.batch for each in rounds.timed("none")] == [2, 4]
    assert rounds.notes == [
        "mimose was not timed at a batch of 4: its session made no plan that keeps the "
        "budget there"
    ]
    assert rounds.failed == {}
    none = _rounds(_Crew(unplanned={("mimose", 2), ("mimose", 4)}), ("none", "mimose"))
    none.run_one()
    none.run_one()
    assert none.timed("mimose") == ()
    assert "no plan that keeps the budget at any size" in none.failed["mimose"]
    assert [point.batch for point in rounds.unplanned["mimose"]] == [4]
    assert not rounds.unplanned["none"]
    assert none.notes == []


def test_a_step_without_a_plan_is_left_out_of_a_reading():
    """The others tell the median."""
    found = reading_of([0.1, math.nan, 0.3, 0.2], [0.01] * 5)
    assert found == pytest.approx((0.2, 20.0))
    assert reading_of([math.nan], [0.01] * 2) is None


def test_time_that_is_over_ends_it():
    """Time that is over ends it."""
    rounds = _rounds(_Crew())
    rounds.run(time.monotonic() - 1.0, lambda *_: None)
    assert rounds.n_rounds == 1
    assert "too little time" in " ".join(rounds.notes)


def test_more_time_gives_more_rounds():
    """More time gives more rounds."""
    rounds = _rounds(_Crew())
    rounds.run(time.monotonic() + 60.0, lambda *_: None)
    assert rounds.n_rounds > ENOUGH_ROUNDS
    assert rounds.notes == []


def test_points_are_spread_and_hold_the_sample():
    """The first, the last and the sample's own are among them, however close."""
    weighed = [
        Weighed(batch=b, length=None, peak_bytes=1, reserved_bytes=1, seconds=b / 10)
        for b in (1, 2, 3, 4, 6, 8, 16, 31, 32)
    ]
    measured = Measured(method="none", weighed=tuple(weighed))
    points = points_of(measured, 31, 10, with_lengths=False)
    batches = [each.point.batch for each in points]
    assert len(batches) == 6
    assert (batches[0], batches[-1]) == (1, 32)
    assert [each.point.batch for each in points if each.stays] == [31]


def test_lengths_that_plans_hold_for_are_timed():
    """Lengths that plans hold for are timed."""
    rows = [
        Foretold(batch=16, length=n, least_bytes=n, keep_bytes=n, seconds=(0.0,))
        for n in (10, 20, 30)
    ]
    measured = Measured(method="mimose", foretold=tuple(rows))
    found = points_of(measured, 16, 20, with_lengths=True)
    assert [each.point.length for each in found] == [10, 20]
    assert points_of(measured, 16, 20, with_lengths=False) == []


def test_short_steps_are_taken_several_at_a_time():
    """Short steps are taken several at a time."""
    assert sized(Point(1), 1.0).n_steps == 1
    assert sized(Point(1), 0.02).n_steps == 5
    assert sized(Point(1), 0.0).n_steps == 8


def test_little_time_takes_steps_before_sizes():
    """Then sizes, the dearest first but for the sample's, and rounds last."""
    names = ("none", "full")
    sizes = [Sized(Point(2**i), 8, 0.01 * 2**i) for i in range(6)]
    crew = _Crew()
    some = Rounds(
        crew, {name: list(sizes) for name in names}, {}, budget_bytes=1, seed=0
    )
    # seven rounds of 10 steps of each size take 95 s with their models, of 4 steps 42 s
    some.run(time.monotonic() + 60.0, lambda *_: None)
    assert not some.notes
    assert len(some.timed("none")) == 6
    sizes[-1] = sizes[-1]._replace(stays=True)
    few = Rounds(
        crew, {name: list(sizes) for name in names}, {}, budget_bytes=1, seed=0
    )
    few.run(time.monotonic() + 20.0, lambda *_: None)
    assert {each.batch for each in few.timed("none")} == {1, 2, 4, 32}
    assert "was not timed at a batch of 16" in " ".join(few.notes)


def test_a_machine_that_changes_its_speed_changes_no_seconds():
    """Steps are told in seconds of its usual pace: by the clock they vary."""
    rounds = _rounds(_Crew(slow=3.0))
    for _ in range(5):
        rounds.run_one()
    for name in ("none", "full"):
        clock = rounds.by_the_clock(name)[Point(2)]
        assert max(clock) > 2.5 * min(clock)
        found = rounds.seconds(name)[Point(2)]
        assert found == pytest.approx([rounds.pace / 0.002 * 0.2] * 5)


@pytest.mark.parametrize(
    ("stray", "by_pace"),
    [((), True), (("full",), True), (("full", "lean"), False)],
)
def test_a_pace_that_most_methods_do_not_follow_is_left_aside(stray, by_pace):
    """Then the clock scatters less, and is what is told."""
    rounds = _rounds(_Crew(stray=stray), ("none", "full", "lean"))
    for _ in range(5):
        rounds.run_one()
    assert rounds.by_pace is by_pace
    told = rounds.by_the_clock("full")
    assert (rounds.seconds("full") == told) is not by_pace
    assert rounds.seconds("full", rounds.pace) != told


def test_a_machine_that_keeps_its_pace_is_told_by_the_clock(monkeypatch):
    """As an accelerator: nobody says that steps were set against anything."""
    monkeypatch.setattr(f"{__name__}._PACES", (1.0,))
    rounds = _rounds(_Crew())
    rounds.run_one()
    assert rounds.by_pace is None
    assert rounds.seconds("none") == rounds.by_the_clock("none")


def test_a_step_is_set_against_the_pace_around_it():
    """A step is set against the pace around it; medians leave out one of three."""
    found = reading_of([0.1, 0.2, 0.9], [0.01, 0.01, 0.03, 0.03])
    assert found == pytest.approx((0.2, 10.0))


def test_a_first_turn_that_would_end_too_late_is_not_taken():
    """A first turn that would end too late is not taken, and that is told."""
    points = {name: [Sized(Point(2), 2, 3.0)] for name in ("full", "none", "lean")}
    crew = _Crew()
    rounds = Rounds(crew, points, {}, budget_bytes=1, seed=0)
    rounds.run(time.monotonic() + 5.0, lambda *_: None)
    assert crew.turns[0] == "none"
    assert set(crew.turns) == {"none"}
    assert sorted(note.split()[0] for note in rounds.notes[:2]) == ["full", "lean"]
