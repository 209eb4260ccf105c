"""The first walk keeps the budget, and is near the best."""

import numpy as np
import pytest

from benchmarks.problems import KINDS, with_budget
from mimose.planners import Marginal, Optimal, peak_bytes
from mimose.planners.dive import dive
from mimose.planners.limits import limits_of
from mimose.planners.prefix import least_suffix, prefix_form
from mimose.planners.relaxed import relaxed_rests


def first_walk(problem):
    """Dive into a problem."""
    form = prefix_form(problem)
    headroom = problem.budget_bytes - least_suffix(form)
    limits = limits_of(form, headroom, problem.budget_bytes)
    rests = relaxed_rests(form, problem.cost, headroom[0])
    return dive(form, problem.cost, limits, problem.budget_bytes, rests)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_keeps_the_budget(rng, measured_problem, kind, masked):
    """It ends, within the budget, under actions that are allowed."""
    for share in (0.02, 0.3, 0.8):
        problem = measured_problem(rng, kind, 12, nets_by_action=False, masked=masked)
        problem = with_budget(problem, share)
        choice = first_walk(problem)
        assert problem.allowed[np.arange(12), choice].all()
        assert peak_bytes(problem, choice) <= problem.budget_bytes * (1 + 1e-12)


def test_is_near_the_best(rng, measured_problem):
    """Of like layers it costs at most an event's dearest action more."""
    for share in (0.1, 0.3, 0.6):
        problem = measured_problem(rng, "layers", 12, nets_by_action=False)
        problem = with_budget(problem, share)
        cost = problem.cost[np.arange(12), first_walk(problem)].sum()
        best = Optimal().plan(problem).extra_cost
        assert best <= cost * (1 + 1e-9)
        assert cost <= best + problem.cost[0].max()


def test_nets_that_leave_no_way(make_problem):
    """Where the cheap way leaves too much for the optimizer's step it ends early."""
    problem = make_problem(
        2,
        held_bytes=np.array([[4.0, 2.0, 0.0]] * 2),
        backward_net_bytes=np.array([[0.0, 1.0, 0.0], [0.0, 2.0, 0.0]]),
        cost=np.array([[0.0, 1.0, 9.0]] * 2),
        actions=("keep", "lean", "recompute"),
        allowed=np.array([[True, True, True], [True, True, False]]),
        step_excess_bytes=3.0,
        budget_bytes=5.0,
    )
    assert first_walk(problem) is None
    assert Marginal().plan(problem).actions == ("recompute", "keep")
