"""A made-up third action, from samples to a plan, its growth and the saved state."""

import pytest

from mimose.cost.measured import MeasuredStep, with_step
from mimose.cost.model import CostModel
from mimose.cost.problem import Memory, fill_problem
from mimose.cost.series import kinds_of
from mimose.cost.trust import why_unknown
from mimose.planners import ActionSpec, Menu
from mimose.planners.actions import KEEP, RECOMPUTE
from mimose.types import CallSample, Measured, SegmentSample, StepInput, StepSample

FOLD = ActionSpec(name="fold", code="f")
MENU = Menu((KEEP, FOLD, RECOMPUTE))
NAMES = ("keep", "fold", "recompute")
N_CALLS = 5
# Bytes (or FLOPs) for each row of the batch, by action.
HELD = {"keep": 100.0, "fold": 40.0, "recompute": 10.0}
FORWARD = {"keep": 120.0, "fold": 130.0, "recompute": 30.0}
BACKWARD = {"keep": 50.0, "fold": 55.0, "recompute": 60.0}
RETAINED = 5.0
LET_GO = 2.0
COST = {"fold": 4.0, "recompute": 20.0}
ENOUGH = (8, 24, 16, 12, 20, 32)


def _nothing():
    return CostModel(kinds_of(None, 0.0), MENU)


def _step_input(n):
    return StepInput("context", (n,), False, "structure")


def _step(n, actions):
    """Make up what a step of some rows would show under its actions."""
    calls = [
        Measured(f"layer.{i}#0", i, 0, (n,), action, "family")
        for i, action in enumerate(actions)
    ]
    samples = []
    for i, (call, action) in enumerate(zip(calls, actions, strict=True)):
        call.held_bytes = {a: HELD[a] * n for a in NAMES}
        samples.append(
            CallSample(
                i,
                call.held_bytes,
                {a: FORWARD[a] * n for a in {action, "keep"}},
                {action: BACKWARD[action] * n},
                {action: RETAINED * n},
                {a: COST[a] * n for a in COST},
            )
        )
    head = SegmentSample(2.0 * n, 30.0 * n)
    loss = SegmentSample(1.0 * n, 4.0 * n)
    gone = [0.0, *(LET_GO * (action == "keep") for action in actions[:-1])]
    gaps = tuple(SegmentSample((3.0 - less) * n, 8.0 * n) for less in gone)
    return calls, StepSample(tuple(samples), gaps, head, loss, True)


def _taught(*steps):
    """Return what was learned of steps: rows, and the action of all calls."""
    model = _nothing()
    for n, action in steps:
        calls, sample = _step(n, (action,) * N_CALLS)
        counts, growth = (1,) * N_CALLS, 1000.0 * n
        step = MeasuredStep(
            _step_input(n), calls, sample, 0.0, counts, growth_bytes=growth
        )
        model = with_step(model, step)
    return model


@pytest.fixture(scope="module")
def collected():
    """What collecting teaches: every step ran under the menu's least action."""
    return _taught(*((n, "recompute") for n in ENOUGH))


@pytest.fixture(scope="module")
def taught():
    """The same, with steps under each of the other actions."""
    others = (("fold", "keep")[i % 2] for i in range(12))
    return _taught(
        *((n, "recompute") for n in ENOUGH), *zip(ENOUGH * 2, others, strict=True)
    )


MEMORY = Memory(1e9, 1000.0, 0.0)


def test_one_action_teaches_all(collected):
    """Steps under the least action are enough to plan with the others."""
    assert "" == why_unknown(collected, _step_input(28))
    problem = fill_problem(collected, _step_input(28), MEMORY)
    assert NAMES == problem.actions
    assert [28.0 * HELD[a] for a in NAMES] == pytest.approx(problem.held_bytes[4])
    expected = [28.0 * FORWARD[a] for a in ("keep", "keep", "recompute")]
    assert expected == pytest.approx(problem.forward_transient_bytes[0])
    costs = [0.0, 28.0 * (4 + 25.0 * 60), 28.0 * (20 + 10.0 * 90)]
    assert costs == pytest.approx(problem.cost[0])
    # Nobody has seen a backward of the others: it is taken to be the least's, beyond
    # what an action brings back.
    brought = [100.0 - HELD[a] for a in NAMES]
    expected = [28.0 * (60 + more) for more in brought]
    assert expected == pytest.approx(problem.backward_transient_bytes[0])
    assert 28.0 * RETAINED == pytest.approx(problem.backward_retained_bytes[0])


def test_an_actions_own_backward_is_its_own(taught):
    """What steps under it have shown takes the place of the least action's."""
    problem = fill_problem(taught, _step_input(28), MEMORY)
    # What a recomputation brings back is left out of its readings.
    brought = {"keep": 0.0, "fold": 0.0, "recompute": 100.0 - HELD["recompute"]}
    expected = [28.0 * (BACKWARD[a] + brought[a]) for a in NAMES]
    assert expected == pytest.approx(problem.backward_transient_bytes[2])


def test_what_a_kept_layer_lets_go_of_is_held_less_by_it(taught):
    """Behind kept layers the level was lower: but for the last, whose gap is the head.

    What runs between is learned from steps that recompute all.
    """
    problem = fill_problem(taught, _step_input(28), MEMORY)
    assert [28.0 * 3] * N_CALLS == pytest.approx(problem.gap_bytes[:-1])
    expected = [28.0 * (HELD["keep"] - LET_GO)] * (N_CALLS - 1)
    assert [*expected, 28.0 * HELD["keep"]] == pytest.approx(problem.held_bytes[:, 0])
    assert [28.0 * HELD["recompute"]] * N_CALLS == pytest.approx(
        problem.held_bytes[:, 2]
    )


def test_an_action_nothing_tells_of_is_not_chosen():
    """What no step has told of stays out of the plans, and does not hinder them."""
    model = _nothing()
    for n in ENOUGH:
        calls, sample = _step(n, ("recompute",) * N_CALLS)
        for call, told in zip(calls, sample.calls, strict=True):
            call.held_bytes.pop("fold")
            assert told.held_bytes is call.held_bytes
        step = MeasuredStep(_step_input(n), calls, sample, 0.0, (1,) * N_CALLS)
        model = with_step(model, step)
    assert "" == why_unknown(model, _step_input(28))
    allowed = fill_problem(model, _step_input(28), MEMORY).allowed
    assert [[True, False, True]] * N_CALLS == allowed.tolist()
