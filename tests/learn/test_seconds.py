"""Seconds by family and action: rates, what stands in for them, when plans go."""

import json

import pytest

from mimose.learn.seconds import FORWARD, Timings, Work

LEAN, RECOMPUTE = "lean", "recompute"


def _rebuilds(n):
    return Work(0.0, 1e6 * n, replays=True)


def _runs_again(n):
    return Work(1e9 * n, 3e6 * n, recomputes=True)


def _take(timings, family, action, work, rate, sizes=range(1, 7)):
    """Tell times that are so many times 0.1 s a size, and 2 ms a call."""
    for n in sizes:
        is_new = not timings.knows((family, action), (n,))
        seconds = 2e-3 + rate * 0.1 * n
        timings.add((family, action), (n,), seconds, work(n) if is_new else None)


def test_before_anything_was_timed():
    """There are no seconds, and nothing to make plans anew for."""
    timings = Timings()
    assert not timings.look()
    assert timings.seconds is None


def test_other_sizes_follow_from_work():
    """A size that was never timed gets what its work takes, also twice as far out."""
    timings = Timings()
    _take(timings, "a", RECOMPUTE, _runs_again, 1.0)
    timings.look()
    for n in (3.5, 12):
        told = timings.seconds.of("a", RECOMPUTE, _runs_again(n))
        assert 2e-3 + 0.1 * n == pytest.approx(told, rel=0.01)


def test_few_sizes_give_one_rate():
    """Two sizes are not enough for three rates: seconds go with the guessed work."""
    timings = Timings()
    _take(timings, "a", LEAN, _rebuilds, 1.0, sizes=(2, 2, 2))
    timings.look()
    once, twice = (timings.seconds.of("a", LEAN, _rebuilds(n)) for n in (2, 4))
    assert 0.202 == pytest.approx(once)
    assert 2 * once == pytest.approx(twice)


def test_medians_over_repeats():
    """Of three readings of one size the slowest, of a busy machine, is nothing."""
    timings = Timings()
    for seconds, work in ((1.0, _rebuilds(1)), (9.0, None), (1.1, None)):
        timings.add(("a", LEAN), (1,), seconds, work)
    timings.look()
    assert 1.1 == pytest.approx(timings.seconds.of("a", LEAN, _rebuilds(1)))


def test_the_last_readings_count():
    """A machine that has become slower is believed after so many readings."""
    timings = Timings()
    for n in range(40):
        seconds = 1.0 if n < 20 else 2.0
        timings.add(("a", LEAN), (1,), seconds, None if n else _rebuilds(1))
    timings.look()
    assert 2.0 == pytest.approx(timings.seconds.of("a", LEAN, _rebuilds(1)))


def test_a_recomputation_takes_what_the_forward_took():
    """Where it was never timed itself; once it was, that counts."""
    timings = Timings()
    _take(timings, "a", FORWARD, _runs_again, 1.0)
    timings.look()
    assert 0.402 == pytest.approx(timings.seconds.of("a", RECOMPUTE, _runs_again(4)))
    _take(timings, "a", RECOMPUTE, _runs_again, 2.0)
    timings.look()
    assert 0.802 == pytest.approx(timings.seconds.of("a", RECOMPUTE, _runs_again(4)))


def test_all_costs_are_in_one_unit():
    """What was timed nowhere is put at the usual rate of its guessed FLOPs."""
    timings = Timings()
    _take(timings, "a", RECOMPUTE, _runs_again, 1.0, sizes=(4,))
    timings.look()
    rate = 0.402 / 4e9
    other = timings.seconds.of("b", RECOMPUTE, _runs_again(2))
    lean = timings.seconds.of("b", LEAN, _rebuilds(2))
    assert rate * 2e9 == pytest.approx(other)
    assert rate * _rebuilds(2).guess == pytest.approx(lean)


def _both(timings, lean, recompute):
    _take(timings, "a", LEAN, _rebuilds, lean)
    _take(timings, "a", RECOMPUTE, _runs_again, recompute)


def test_plans_go_when_costs_move_against_each_other():
    """Lean gets twice as dear and recomputing does not: plans are made anew, once."""
    timings = Timings()
    _both(timings, 1.0, 4.0)
    timings.look()
    assert [False] * 40 == [timings.look() for _ in range(40)]
    for _ in range(8):
        _both(timings, 2.0, 4.0)
    assert 1 == sum(timings.look() for _ in range(80))


def test_plans_stay_when_all_becomes_slower():
    """A busy machine makes all of it longer: seconds follow, plans stay."""
    timings = Timings()
    _both(timings, 1.0, 4.0)
    timings.look()
    for _ in range(8):
        _both(timings, 3.0, 12.0)
    assert not any(timings.look() for _ in range(40))
    assert 0.602 == pytest.approx(timings.seconds.of("a", LEAN, _rebuilds(2)), rel=0.01)


def test_noise_moves_no_plan():
    """A tenth up and down, against another action, is noise."""
    timings = Timings()
    _both(timings, 1.0, 4.0)
    timings.look()
    for n in range(40):
        _both(timings, 1.05 if n % 2 else 0.95, 4.0)
        assert not timings.look()


def test_one_action_of_one_family_moves_no_plan():
    """With nothing to compare it to, its rate changes nothing but the unit."""
    timings = Timings()
    _take(timings, "a", RECOMPUTE, _runs_again, 1.0, sizes=(4,))
    assert not timings.look()
    assert timings.seconds is not None


def test_what_is_kept_is_bounded():
    """Hundreds of sizes are not all kept, and forgotten families go."""
    timings = Timings()
    for n in range(1, 300):
        timings.add(("a", LEAN), (n,), 0.1 * n, _rebuilds(n))
    assert len(timings.state_dict()) <= 48
    timings.keep(frozenset({"b"}))
    assert [] == timings.state_dict()


def test_state_comes_back_from_json():
    """Another one that loads it says the same."""
    timings, again = Timings(), Timings()
    _both(timings, 1.0, 4.0)
    timings.look()
    again.load_state_dict(json.loads(json.dumps(timings.state_dict())))
    for action, work in ((LEAN, _rebuilds(5)), (RECOMPUTE, _runs_again(5))):
        expected = timings.seconds.of("a", action, work)
        assert expected == pytest.approx(again.seconds.of("a", action, work))


def test_readings_are_taken_less_often_in_the_long_run():
    """The first steps all teach, then one in five."""
    timings = Timings()
    due = [timings.is_due() for _ in range(164)]
    assert all(due[:64])
    assert 20 == sum(due[64:])


def test_layers_without_products_leave_nothing_unknown():
    """What was timed of them tells no rate of a FLOP; other layers have a cost yet."""
    timings = Timings()
    pointwise = Work(flops=0.0, freed_bytes=100.0, recomputes=True)
    timings.add(("pointwise", "recompute"), (8,), 1e-3, pointwise)
    timings.look()
    seconds = timings.seconds
    product = Work(flops=1e9, freed_bytes=100.0, recomputes=True)
    assert seconds.of("pointwise", "recompute", pointwise) > 0.0
    assert seconds.of("product", "recompute", product) > seconds.of(
        "pointwise", "recompute", pointwise
    )
