"""The optimal planner is optimal: against every choice, and against the 0-1 program."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from mimose.planners import Optimal, Search, optimal, peak_bytes


@pytest.mark.parametrize(
    ("n_calls", "n_actions", "options"),
    [(1, 3, {}), (12, 2, {}), (7, 3, {"host": True}), (5, 4, {"host": True})],
)
def test_equals_brute_force(rng, make, n_calls, n_actions, options):
    """Small problems cost what the best of all choices costs, and it knows."""
    for share in (0.0, 0.05, 0.15, 0.3, 0.5, 0.9):
        problem = make.random(rng, n_calls, n_actions, **options)
        problem = make.between(problem, share + 1e-5)
        plan = Optimal().plan(problem)
        assert plan.peak_bytes <= problem.budget_bytes
        assert make.cheapest(problem) == pytest.approx(plan.extra_cost)
        assert plan.optimal


def test_the_solver_alone(rng, make):
    """The program's rows say what the judge says, the host included."""
    for share in (0.05, 0.3, 0.7):
        for host in (False, True):
            problem = make.random(rng, 5, 4, host=host)
            problem = make.between(problem, share)
            choice, proved = optimal.solve(problem, 10.0)
            assert proved
            cost = problem.cost[np.arange(5), choice].sum()
            assert make.cheapest(problem) == pytest.approx(cost, rel=1e-6)


def test_equal_layers_are_proved_without_the_solver(rng, make, monkeypatch):
    """Where many plans cost the same the search has few to carry on, and proves it."""
    monkeypatch.setattr(optimal, "solve", None)
    for share in (0.1, 0.35, 0.7):
        problem = make.measured(rng, "layers", 24)
        assert Optimal().plan(make.between(problem, share)).optimal


def test_budgets_that_are_exactly_some_peak(rng, make):
    """A plan that fits to the last byte is found."""
    problem = make.random(rng, 7, 2)
    for peak in np.unique(peak_bytes(problem, make.choices(problem)))[::5]:
        tight = replace(problem, budget_bytes=peak)
        assert make.cheapest(tight) == pytest.approx(Optimal().plan(tight).extra_cost)


@pytest.fixture
def unproved(rng, make):
    """A problem where the host's budget binds, which the search alone cannot prove."""
    while True:
        problem = make.between(make.random(rng, 6, 3, host=True), 0.5)
        if not Search().plan(problem).optimal:
            return problem


def test_out_of_time(unproved, monkeypatch, caplog):
    """With nothing found in time: the search's plan, and a warning with the limit."""
    monkeypatch.setattr(optimal, "solve", lambda *_: (None, False))
    with caplog.at_level(logging.WARNING):
        plan = Optimal(time_limit_seconds=0.5).plan(unproved)
    assert Search(width=4096).plan(unproved).actions == plan.actions
    assert plan.planner == "optimal"
    assert "0.5 s" in caplog.text


@pytest.mark.parametrize("proved", [True, False])
def test_answers_over_the_budget_are_not_taken(unproved, monkeypatch, proved):
    """A solver that keeps exceeding the budget is not believed, whatever it claims."""
    keeps = np.zeros(6, dtype=np.intp)
    monkeypatch.setattr(optimal, "solve", lambda *_: (keeps, proved))
    plan = Optimal().plan(unproved)
    assert plan.peak_bytes <= unproved.budget_bytes
    assert not plan.optimal
