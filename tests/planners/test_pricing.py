"""Plans where the host's budget binds are near the optimum, and are said to be so."""

import numpy as np
import pytest

from benchmarks.menus import with_budgets, with_menu
from mimose.planners import Marginal, Optimal, host_bytes, peak_bytes, pricing
from mimose.planners.choices import cheapest_choice
from mimose.planners.prefix import prefix_form


def choice_of(problem, plan):
    """The plan's actions as indices."""
    return np.array([problem.actions.index(a) for a in plan.actions], dtype=np.intp)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("nets_by_action", [False, True])
def test_equals_brute_force(
    rng, random_problem, budget_between, every_choice, nets_by_action, pairs
):
    """Of small problems it finds the best, and knows."""
    n_bound = 0
    for _ in range(25):
        problem = random_problem(
            rng, 6, 3, host=True, nets_by_action=nets_by_action, pairs=pairs
        )
        problem = budget_between(problem, 0.4)
        choices = every_choice(problem)
        fits = peak_bytes(problem, choices) <= problem.budget_bytes
        costs = problem.cost[np.arange(6), choices].sum(axis=1)
        plan = Marginal().plan(problem)
        assert plan.extra_cost == pytest.approx(costs[fits].min())
        assert plan.optimal
        n_bound += problem.host_budget_bytes < problem.host_bytes.max(axis=1).sum()
    assert n_bound > 10


def test_near_the_optimum(rng, whole_menu_problem):
    """Of the whole menu it loses at most a percent to the solver."""
    for kind in ("layers", "pair", "mixture"):
        problem = whole_menu_problem(rng, kind, 12, pairs=True, jitter=0.02)
        problem = with_menu(with_budgets(problem, "offload", 0.1, 0.2), "offload")
        plan, best = Marginal().plan(problem), Optimal().plan(problem)
        needed = host_bytes(problem, choice_of(problem, plan))
        assert needed <= problem.host_budget_bytes
        assert best.extra_cost * (1 - 1e-9) <= plan.extra_cost
        assert plan.extra_cost <= 1.01 * best.extra_cost


def test_walks_of_a_hull_are_not_enough(make_problem, monkeypatch):
    """Two of three layers fit on the host; by a price all of them go there, or none."""
    problem = make_problem(
        3,
        actions=("keep", "offload", "recompute"),
        held_bytes=np.array([[4.0, 0.0, 0.0]] * 3),
        cost=np.array([[0.0, 1.0, 3.0]] * 3),
        host_bytes=np.array([[0.0, 4.0, 0.0]] * 3),
        host_budget_bytes=9.0,
        budget_bytes=3.0,
    )
    plan = Marginal().plan(problem)
    assert (plan.extra_cost, plan.optimal) == (5.0, True)
    events, cheapest = np.arange(3), cheapest_choice(problem)
    assert not problem.host_bytes[events, cheapest].any()
    offloads = np.ones(3, dtype=np.intp)
    ends = [pricing._End.of(problem, each) for each in (offloads, offloads + 1)]
    price, found = pricing._price(problem, prefix_form(problem), (*ends,), 3.0, 64)
    assert price == 0.5
    assert [each.tolist() for each in found] == [[2, 2, 2]]


def test_least_host_that_is_too_much(make_problem):
    """Where the budget needs more of the host than there is, nothing is found."""
    problem = make_problem(
        2,
        actions=("keep", "offload"),
        held_bytes=np.array([[4.0, 0.0]] * 2),
        host_bytes=np.array([[0.0, 4.0]] * 2),
        host_budget_bytes=7.0,
        budget_bytes=3.0,
    )
    found = pricing.walk_within_host(
        problem,
        prefix_form(problem),
        np.ones(2, dtype=np.intp),
        3.0,
        width=64,
        tolerance=0.01,
    )
    assert found is None
