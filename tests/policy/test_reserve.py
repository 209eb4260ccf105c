"""What is kept free between a prediction and the budget."""

import json
from typing import NamedTuple

import pytest

from mimose.policy.reserve import PredictedStep, Reserve
from mimose.types import MOST_CONTEXTS

MIB = 2.0**20


class _Memory(NamedTuple):
    """What is held when a step begins."""

    start_bytes: float
    headroom_bytes: float


def _step(predicted, observed, **changes):
    """A step of 100 MiB of headroom, under a plan that keeps some."""
    fields = {
        "context": "text",
        "predicted_bytes": predicted,
        "observed_bytes": observed,
        "headroom_bytes": 100 * MIB,
        "scale_bytes": 100 * MIB,
        "keeps_some": True,
        **changes,
    }
    return PredictedStep(**fields)


@pytest.mark.parametrize("residuals", [[], [0.0] * 300, [0.02] * 300, [0.0, 0.2]])
def test_a_plan_that_uses_all_it_may_is_allowed_all_there_is(residuals):
    """What is usable and what is allowed are one statement, read in two directions."""
    reserve = Reserve(0.1 * MIB)
    for residual in residuals:
        reserve.absorb(_step(90 * MIB, 90 * MIB * (1.0 + residual)))

    usable = reserve.usable_budget(_Memory(500 * MIB, 100 * MIB))

    allowed = reserve.allowed_growth(usable - 500 * MIB)
    assert 100 * MIB == pytest.approx(allowed)


def test_stages_are_passed_one_by_one():
    """Each by a step within what was allowed, under a plan that keeps something."""
    reserve = Reserve(0.0)
    shares = [reserve.stage_share("text")]
    for step in (
        _step(50 * MIB, 60 * MIB),
        _step(50 * MIB, 50 * MIB, keeps_some=False),
        _step(50 * MIB, 50 * MIB),
        _step(50 * MIB, 50 * MIB),
        _step(50 * MIB, 90 * MIB),
    ):
        reserve.absorb(step)
        shares.append(reserve.stage_share("text"))

    assert [0.35, 0.35, 0.35, 0.7, 1.0, 1.0] == shares
    assert 0.35 == reserve.stage_share("images")


def test_a_context_that_is_forgotten_steps_down_again():
    """So does the one that came longest ago, of too many."""
    reserve = Reserve(0.0)
    for n in range(MOST_CONTEXTS + 1):
        reserve.absorb(_step(50 * MIB, 50 * MIB, context=f"context {n}"))
    reserve.forget("context 2")

    shares = [reserve.stage_share(f"context {n}") for n in range(4)]
    assert [0.35, 0.7, 0.35, 0.7] == shares


@pytest.mark.parametrize(
    ("changes", "n"),
    [
        ({}, 1),
        ({"scale_bytes": 60 * MIB, "headroom_bytes": 70 * MIB}, 1),
        ({"scale_bytes": 200 * MIB, "headroom_bytes": 200 * MIB}, 0),
        ({"scale_bytes": 200 * MIB, "headroom_bytes": 200 * MIB, "is_over": True}, 1),
    ],
)
def test_small_steps_teach_the_bound_nothing(changes, n):
    """Small beside both the largest growth and the headroom, unless they pass it."""
    reserve = Reserve(0.0)
    reserve.absorb(_step(55 * MIB, 55 * MIB, **changes))
    assert n == reserve.bound.n


def test_measuring_ends_where_predictions_are_near():
    """Four in a row that came out as expected end it."""
    reserve = Reserve(0.0)
    for is_learning in (True, True, True, False):
        reserve.absorb(_step(50 * MIB, 50 * MIB))
        assert is_learning == reserve.is_learning(10)


def test_state_survives_json():
    """A reserve that loads it keeps the same free."""
    reserve = Reserve(0.0)
    for n in range(20):
        reserve.absorb(_step(90 * MIB, (90 + n % 5) * MIB))
    other = Reserve(0.0)
    other.load_state_dict(json.loads(json.dumps(reserve.state_dict())))
    assert reserve.state_dict() == other.state_dict()
    assert reserve.allowed_growth(MIB) == other.allowed_growth(MIB)
    assert 1.0 == other.stage_share("text")
