"""The same step with fewer actions, and that it is never cheaper to plan."""

import numpy as np
import pytest

from benchmarks.menus import MENUS, with_budgets, with_menu
from mimose.planners import InfeasibleBudgetError, Marginal
from mimose.planners.fewer import with_actions, with_fewer_actions


def menus_below(problem):
    """The actions of each smaller problem in turn."""
    found = []
    while (problem := with_fewer_actions(problem)) is not None:
        found.append(problem.actions)
    return found


def test_what_is_left_out_first(rng, whole_menu_problem):
    """Lossy actions, then those of the host, then all but the ends."""
    problem = whole_menu_problem(rng, "layers", 6, pairs=True)
    lossy = ("pool", "pool4", "quantize", "quantize4")
    exact = tuple(name for name in problem.actions if name not in lossy)
    on_device = tuple(name for name in exact if not name.startswith("offload"))
    assert [exact, on_device, ("keep", "recompute")] == menus_below(problem)


def test_an_event_that_cannot_do_without(make_problem):
    """Where an event has lossy actions alone, there are no fewer."""
    problem = make_problem(
        2,
        actions=("keep", "pool", "recompute"),
        allowed=np.array([[True, True, True], [False, True, False]]),
        lossy=frozenset({"pool"}),
    )
    assert with_fewer_actions(problem) is None


def test_tables_are_those_of_the_actions(rng, whole_menu_problem):
    """Each table loses the same columns; lossy names go with them."""
    problem = whole_menu_problem(rng, "layers", 6, pairs=True)
    at = [0, problem.actions.index("pool"), problem.actions.index("recompute")]
    fewer = with_actions(problem, at)
    assert fewer.actions == ("keep", "pool", "recompute")
    assert fewer.lossy == {"pool"}
    for name in ("held_bytes", "cost", "saves_output", "releases_input", "allowed"):
        expected, actual = getattr(problem, name)[:, at], getattr(fewer, name)
        assert np.array_equal(expected, actual)


@pytest.mark.parametrize("kind", ["layers", "stages", "mixture", "pair"])
def test_more_actions_never_cost_more(rng, whole_menu_problem, kind):
    """Not even to a search that leaves out nearly all."""
    planner = Marginal(width=2, widest=2)
    for share, host_share in ((0.02, None), (0.1, 0.2), (0.3, None), (0.5, 0.1)):
        problem = whole_menu_problem(rng, kind, 12, pairs=kind != "pair", jitter=0.05)
        problem = with_budgets(problem, "whole layers", share, host_share)
        costs = [planner.plan(with_menu(problem, menu)).extra_cost for menu in MENUS]
        assert sorted(costs, reverse=True) == pytest.approx(costs)


def test_fewer_actions_that_cannot_keep_the_budget(rng, make_problem):
    """Then the plan of all of them stays as it was made."""
    held = np.array([10.0, 1.0, 4.0]) * rng.uniform(0.8, 1.2, (12, 3))
    problem = make_problem(
        12,
        actions=("keep", "pool", "recompute"),
        held_bytes=held,
        cost=np.array([0.0, 2.0, 1.0]) * rng.uniform(0.8, 1.2, (12, 3)),
        lossy=frozenset({"pool"}),
        budget_bytes=30.0,
    )
    with pytest.raises(InfeasibleBudgetError):
        Marginal().plan(with_fewer_actions(problem))
    plan = Marginal(width=2, widest=2).plan(problem)
    assert not plan.optimal
    assert plan.peak_bytes <= 30.0
