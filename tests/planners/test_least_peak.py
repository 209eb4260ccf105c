"""The plan with the least peak."""

import numpy as np
import pytest

from mimose.planners import InfeasibleBudgetError, Search, peak_bytes, safest_plan


@pytest.mark.parametrize("n_calls", [0, 1, 7])
def test_equals_brute_force(rng, make, n_calls):
    """No choice has a lower peak; where the host binds it is found to a millionth."""
    for turn in range(20):
        problem = make.random(rng, n_calls, 3, host=bool(turn % 2))
        expected = peak_bytes(problem, make.choices(problem)).min()
        assert expected == pytest.approx(safest_plan(problem).peak_bytes, rel=1e-5)


def lossy_problem(make, **fields):
    """Three layers that a lossy action would bring down to 100, an exact one to 106."""
    return make.problem(
        3,
        actions=("keep", "quantize", "recompute"),
        held_bytes=np.array([[4.0, 0.0, 2.0]] * 3),
        cost=np.array([[0.0, 1.0, 2.0]] * 3),
        lossy=frozenset({"quantize"}),
        start_bytes=100.0,
        **fields,
    )


@pytest.mark.parametrize(
    ("budget", "actions", "peak"),
    [
        (106.0, ("recompute",) * 3, 106.0),
        (105.0, ("quantize",) * 3, 100.0),
        (99.0, ("quantize",) * 3, 100.0),
    ],
)
def test_lossy_where_nothing_else_fits(make, budget, actions, peak):
    """Exact actions alone, unless they cannot keep the budget."""
    plan = safest_plan(lossy_problem(make, budget_bytes=budget))
    assert (actions, peak) == (plan.actions, plan.peak_bytes)


def test_lossy_where_an_event_has_nothing_else(make):
    """Such a call takes what it has, the others stay exact."""
    allowed = np.ones((3, 3), dtype=bool)
    allowed[1] = [False, True, False]
    plan = safest_plan(lossy_problem(make, allowed=allowed))
    assert plan.actions == ("recompute", "quantize", "recompute")


def test_the_least_peak_that_is_told_is_any_plan_s(make):
    """What no exact plan reaches counts as reachable."""
    with pytest.raises(InfeasibleBudgetError) as told:
        Search().plan(lossy_problem(make, budget_bytes=99.0))
    assert told.value.least_peak_bytes == 100.0
