"""How near the planner "auto" is to the optimum, and that it always finds a plan."""

import numpy as np
import pytest

from benchmarks.problems import KINDS
from mimose.planners import Optimal, Search


def gap(problem, plan):
    """What a plan costs beyond the optimum, as a share of recomputing everything."""
    most = problem.cost[np.arange(len(problem.calls)), problem.least_choice()].sum()
    return (plan.extra_cost - Optimal().plan(problem).extra_cost) / most


@pytest.mark.parametrize("kind", KINDS)
def test_gap_with_five_actions(rng, make, kind):
    """With the proportions of measured layers: 0.5% in the mean, at most 3%."""
    gaps = []
    for masked, share in ((False, 0.02), (True, 0.1), (False, 0.4), (True, 0.9)):
        problem = make.measured(rng, kind, 12, jitter=0.1, masked=masked)
        problem = make.between(problem, share)
        plan = Search().plan(problem)
        assert plan.peak_bytes <= problem.budget_bytes
        gaps.append(gap(problem, plan))
    assert -1e-9 <= min(gaps)
    assert max(gaps) <= 0.03
    assert np.mean(gaps) <= 0.005


def test_equals_brute_force(rng, make):
    """On small problems of any kind it finds the best of all choices.

    Two walks are too few for that; no plan is called optimal wrongly.
    """
    n_dearer = 0
    for turn in range(60):
        problem = make.random(rng, 8, 3, host=bool(turn % 2))
        problem = make.between(problem, rng.uniform(0, 0.9))
        best = make.cheapest(problem)
        assert best == pytest.approx(Search().plan(problem).extra_cost)
        plan = Search(width=2).plan(problem)
        is_dearer = plan.extra_cost > best * (1 + 1e-9)
        assert not (plan.optimal and is_dearer)
        n_dearer += is_dearer
    assert n_dearer


@pytest.mark.parametrize("n_calls", [1, 2, 30])
def test_always_finds_a_plan(rng, make, n_calls):
    """Within any budget from the least peak on there is a plan, and it is found."""
    for n_actions in (1, 2, 4):
        for share in (0.0, 0.01, 0.3, 0.9):
            for host in (False, True):
                problem = make.random(rng, n_calls, n_actions, host=host)
                problem = make.between(problem, share)
                for width in (2, 96):
                    plan = Search(width=width).plan(problem)
                    assert plan.peak_bytes <= problem.budget_bytes


def test_long_chains(rng, make):
    """Hundreds of calls are planned as well, and a wider search costs no more."""
    problem = make.between(make.measured(rng, "layers", 300, jitter=0.05), 0.5)
    plan = Search().plan(problem)
    assert plan.peak_bytes <= problem.budget_bytes
    assert len(set(plan.actions)) > 1
    assert Search(width=4096).plan(problem).extra_cost <= plan.extra_cost
