"""What every planner promises."""

import copy
import functools
from dataclasses import replace

import numpy as np
import pytest

from mimose.planners import (
    InfeasibleBudgetError,
    Planner,
    PlanningProblem,
    lay_out,
    make_planner,
    safest_plan,
)

NAMES = ("auto", "every-3", "full", "greedy", "none", "optimal")
MAKERS = {name: functools.partial(make_planner, name) for name in NAMES}
KEEP_BUDGETS = ("auto", "optimal")
IGNORE_BUDGETS = ("every-3", "full")


@pytest.fixture(params=MAKERS)
def planner_name(request):
    """Each planner's name in turn."""
    return request.param


@pytest.fixture
def planner(planner_name):
    """Each planner in turn, fresh."""
    return MAKERS[planner_name]()


@pytest.fixture(params=["random", "five actions", "whole menu"])
def problem(request, rng, make):
    """Each kind of problem in turn, half-way between least peak and keeping all."""
    made = {
        "random": lambda: make.random(rng, 8, 4, host=True),
        "five actions": lambda: make.measured(
            rng, "mixture", 12, jitter=0.02, masked=True
        ),
        "whole menu": lambda: make.whole_menu(rng, "layers", 12),
    }[request.param]()
    return make.between(made, 0.5)


def indices(problem, plan):
    """The plan's actions as indices."""
    return np.array([problem.actions.index(a) for a in plan.actions], dtype=np.intp)


def test_promises(planner_name, planner, problem):
    """Allowed actions for all calls, and what the timeline says of them.

    The same again for the same problem, which stays as it was. Planners that know
    peaks keep both budgets.
    """
    assert isinstance(planner, Planner)
    before = copy.deepcopy(
        {name: getattr(problem, name) for name in PlanningProblem.__slots__}
    )
    plan = planner.plan(problem)
    choice = indices(problem, plan)
    at = np.arange(len(problem.calls)), choice
    laid_out = lay_out(problem, choice)
    assert problem.allowed[at].all()
    assert laid_out.peak_bytes == plan.peak_bytes
    assert plan.peak_bytes - problem.start_bytes == plan.growth_bytes
    assert problem.cost[at].sum() == pytest.approx(plan.extra_cost)
    assert laid_out.binding_segments == plan.binding_segments
    assert planner.name == plan.planner
    assert plan == planner.plan(problem) == MAKERS[planner_name]().plan(problem)
    for name, value in before.items():
        np.testing.assert_array_equal(value, getattr(problem, name))
    if planner_name in KEEP_BUDGETS:
        assert plan.peak_bytes <= problem.budget_bytes
        assert problem.host_bytes[at].sum() <= problem.host_budget_bytes


def test_impossible_budget(planner_name, planner, problem):
    """Planners that know peaks say why not; the others say their peak."""
    least = safest_plan(problem)
    tight = replace(problem, budget_bytes=0.9 * least.peak_bytes)
    if planner_name not in KEEP_BUDGETS:
        assert planner.plan(tight).peak_bytes > tight.budget_bytes
        return
    with pytest.raises(InfeasibleBudgetError) as caught:
        planner.plan(tight)
    assert tight.budget_bytes == caught.value.budget_bytes
    assert least.peak_bytes == caught.value.least_peak_bytes
    assert least.peak_bytes == pytest.approx(sum(caught.value.holders.values()))


def test_ample_budget(planner_name, planner, problem):
    """With room for all, everything that may be kept is kept."""
    plan = planner.plan(replace(problem, budget_bytes=float("inf")))
    if planner_name not in IGNORE_BUDGETS:
        may_keep = problem.allowed[:, 0]
        kept = np.array([action == "keep" for action in plan.actions])
        assert may_keep.tolist() == kept.tolist()
