"""Plans where what is held depends on pairs of events, against every choice."""

import numpy as np
import pytest

from mimose.planners import (
    InfeasibleBudgetError,
    Marginal,
    Optimal,
    Refined,
    peak_bytes,
)


def cheapest_cost(problem, choices):
    """Least cost of all choices within the budget, by looking at each."""
    fits = peak_bytes(problem, choices) <= problem.budget_bytes
    costs = problem.cost[np.arange(len(problem.events)), choices].sum(axis=1)
    return costs[fits].min()


@pytest.fixture(params=[(False, False), (False, True), (True, False), (True, True)])
def small(request, rng, random_problem, budget_between, every_choice):
    """Problems of five events and four actions, with the cost of the best plan."""
    host, nets_by_action = request.param
    problems = []
    for share in (0.0, 0.05, 0.15, 0.3, 0.5, 0.7):
        problem = random_problem(
            rng, 5, 4, host=host, nets_by_action=nets_by_action, pairs=True
        )
        problem = budget_between(problem, share + 1e-5)
        problems.append((problem, cheapest_cost(problem, every_choice(problem))))
    return problems


@pytest.mark.parametrize("planner", [Marginal(), Optimal(), Refined()])
def test_equals_brute_force(small, planner):
    """No choice within the budgets costs less, and the planner knows."""
    for problem, expected in small:
        plan = planner.plan(problem)
        assert plan.peak_bytes <= problem.budget_bytes
        assert expected == pytest.approx(plan.extra_cost)
        assert plan.optimal


def test_the_solver_alone(small):
    """The program's rows say what the judge says."""
    for problem, expected in small:
        plan = Optimal()._solve(problem)
        assert plan is not None
        assert expected == pytest.approx(plan.extra_cost)


def test_a_narrow_search_says_what_it_knows(
    rng, random_problem, budget_between, every_choice
):
    """Two walks are too few to find every optimum; none is claimed wrongly."""
    n_dearer = 0
    for _ in range(100):
        made = random_problem(rng, 6, 3, nets_by_action=True, pairs=True)
        problem = budget_between(made, 0.3)
        expected = cheapest_cost(problem, every_choice(problem))
        plan = Marginal(width=2, widest=2).plan(problem)
        is_dearer = plan.extra_cost > expected * (1 + 1e-9)
        assert not (plan.optimal and is_dearer)
        n_dearer += is_dearer
    assert n_dearer


def test_uses_what_a_pair_frees(make_problem):
    """The first event gives up its output, so that packing the second frees it."""
    problem = make_problem(
        2,
        actions=("keep", "pack"),
        held_bytes=np.array([[10.0, 10.0], [6.0, 6.0]]),
        cost=np.array([[0.0, 1.0], [0.0, 2.0]]),
        input_bytes=np.array([0.0, 4.0]),
        releases_input=np.array([[False, True]] * 2),
        saves_output=np.array([[True, False]] * 2),
        gap_excess_bytes=np.array([0.0, 0.0, 20.0]),
        budget_bytes=32.0,
    )
    assert Marginal().plan(problem).actions == ("pack", "pack")
    with pytest.raises(
        InfeasibleBudgetError, match="lowest reachable peak is 32 bytes"
    ):
        Marginal().plan(with_budget(problem, 31.0))


def with_budget(problem, budget_bytes):
    """Make the same problem with another budget."""
    fields = {name: getattr(problem, name) for name in type(problem).__slots__}
    return type(problem)(**(fields | {"budget_bytes": budget_bytes}))


def test_an_input_larger_than_all_that_is_held(make_problem):
    """What an event holds may be negative, for the solver as well."""
    problem = make_problem(
        3,
        actions=("keep", "pack"),
        held_bytes=np.array([[50.0, 50.0], [3.0, 1.0], [3.0, 1.0]]),
        cost=np.array([[0.0, 1.0]] * 3),
        input_bytes=np.array([0.0, 50.0, 3.0]),
        releases_input=np.array([[False, True]] * 3),
        saves_output=np.array([[False, False], [True, False], [False, False]]),
        gap_excess_bytes=np.array([0.0, 0.0, 0.0, 50.0]),
        budget_bytes=57.0,
    )
    for made in (Marginal().plan(problem), Optimal()._solve(problem)):
        assert made.actions == ("keep", "pack", "keep")
        assert made.peak_bytes == 54.0


@pytest.mark.parametrize("menu_kind", ["stages", "pair"])
def test_twelve_actions(rng, whole_menu_problem, budget_between, menu_kind):
    """With the proportions of layers the search agrees with the solver."""
    for share in (0.1, 0.4):
        problem = whole_menu_problem(rng, menu_kind, 8, jitter=0.02)
        problem = budget_between(problem, share)
        plan, solved = Marginal().plan(problem), Optimal()._solve(problem)
        assert plan.extra_cost == pytest.approx(solved.extra_cost)
