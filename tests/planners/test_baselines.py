"""The baselines."""

import numpy as np
import pytest

from mimose.planners import every_k, everywhere, make_planner

K, R = "keep", "recompute"


def test_none_keeps_everything(make):
    """No plan keeps, except where that is not allowed."""
    allowed = np.array([[True, True], [False, True]])
    assert make_planner("none").plan(make.problem(2, allowed=allowed)).actions == (K, R)


def test_full_prefers_to_recompute(make):
    """Full takes the last action that is exact and allowed, else the last allowed."""
    actions = ("keep", "quantize", "offload", "selective", "recompute")
    allowed = np.array(
        [
            [True, True, True, True, True],
            [True, True, True, True, False],
            [True, True, True, False, False],
            [True, True, False, False, False],
            [False, True, False, False, False],
        ]
    )
    problem = make.problem(
        5, actions=actions, allowed=allowed, lossy=frozenset({"quantize"})
    )
    expected = ("recompute", "selective", "offload", "keep", "quantize")
    assert expected == make_planner("full").plan(problem).actions


@pytest.mark.parametrize(
    ("k", "expected"), [(1, (R,) * 5), (2, (R, K, R, K, R)), (9, (R, K, K, K, K))]
)
def test_every_k(make, k, expected):
    """Every k-th call is recomputed, beginning with the first."""
    plan = every_k(k).plan(make.problem(5))
    assert expected == plan.actions
    assert f"every-{k}" == plan.planner


@pytest.mark.parametrize(
    "planner", [make_planner("none"), make_planner("full"), everywhere("recompute")]
)
def test_fixed_planners_need_no_problem(make, planner):
    """What they say of a call by its position is what they plan."""
    problem = make.problem(5)
    expected = planner.plan(problem).actions
    assert expected == tuple(map(planner.action_at, range(5)))
