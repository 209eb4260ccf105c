"""Turns of all methods, within a time."""

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


class _Crew:
    """Answers at once; one method fails from its second turn on."""

    def __init__(self, fails="", slow=1.0):
        self.turns = []
        self._slow = slow
        self._fails = fails

    def ask(self, method, arguments):
        self.turns.append(method)
        if method == self._fails and self.turns.count(method) > 1:
            msg = "memory ran out\nsomewhere"
            raise RunFailedError(msg)
        points = arguments["points"]
        slow = self._slow if len(self.turns) > 2 else 1.0
        return {
            "seconds": [[0.1 * slow * size] * 3 for size, _, _ in points],
            "paces": [[0.002 * slow] * 4 for _ in points],
        }


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
    timed = rounds.timed("none")
    assert [(each.batch, each.rounds) for each in timed] == [
        (2, (0.2, 0.2, 0.2)),
        (4, (0.4, 0.4, 0.4)),
    ]


def test_who_fails_takes_no_more_turns():
    """Who fails takes no more turns."""
    crew = _Crew(fails="full")
    rounds = _rounds(crew)
    for _ in range(4):
        rounds.run_one()
    assert crew.turns.count("full") == 2
    assert rounds.failed == {"full": "memory ran out"}
    assert len(rounds.timed("none")[0].rounds) == 4


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


def test_points_are_spread_and_the_dearest_is_last():
    """Points are spread and the dearest is last."""
    weighed = [
        Weighed(batch=b, length=None, peak_bytes=1, reserved_bytes=1, seconds=b / 10)
        for b in (1, 2, 3, 4, 6, 8, 16, 31, 32)
    ]
    points = points_of(
        Measured(method="none", weighed=tuple(weighed)), 10, with_lengths=False
    )
    batches = [each.point.batch for each in points]
    assert len(batches) == 6
    assert (batches[0], batches[-1]) == (1, 32)


def test_lengths_that_plans_hold_for_are_timed():
    """Lengths that plans hold for are timed."""
    rows = [
        Foretold(batch=16, length=n, least_bytes=n, keep_bytes=n, seconds=(0.0,))
        for n in (10, 20, 30)
    ]
    measured = Measured(method="mimose", foretold=tuple(rows))
    found = points_of(measured, 20, with_lengths=True)
    assert [each.point.length for each in found] == [10, 20]
    assert points_of(measured, 20, with_lengths=False) == []


def test_short_steps_are_taken_several_at_a_time():
    """Short steps are taken several at a time."""
    assert sized(Point(1), 1.0).n_steps == 1
    assert sized(Point(1), 0.02).n_steps == 5
    assert sized(Point(1), 0.0).n_steps == 8


def test_little_time_takes_steps_before_sizes():
    """Little time takes steps before sizes, and sizes before rounds."""
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
    few = Rounds(
        crew, {name: list(sizes) for name in names}, {}, budget_bytes=1, seed=0
    )
    few.run(time.monotonic() + 20.0, lambda *_: None)
    assert {each.batch for each in few.timed("none")} == {1, 2, 4, 8}
    assert "was not timed at a batch of 32" in " ".join(few.notes)


def test_a_machine_that_slows_down_changes_no_seconds():
    """A machine that slows down changes no seconds of its usual pace."""
    rounds = _rounds(_Crew(slow=3.0))
    for _ in range(3):
        rounds.run_one()
    for name in ("none", "full"):
        first, *others = rounds.by_the_clock(name)[Point(2)]
        assert others == pytest.approx([3.0 * first] * 2)
        assert rounds.seconds(name)[Point(2)] == pytest.approx(others[:1] * 3)


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
