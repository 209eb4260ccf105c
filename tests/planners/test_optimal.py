"""The optimal planner is optimal: against every choice, and against the 0-1 program."""

import logging

import numpy as np
import pytest

from benchmarks.problems import KINDS
from mimose.planners import (
    Marginal,
    Optimal,
    Refined,
    least_peak_plan,
    peak_bytes,
    pricing,
    program,
)


@pytest.mark.parametrize("planner", [Optimal(), Marginal(), Refined()])
@pytest.mark.parametrize(
    ("n_events", "n_actions", "options"),
    [
        (1, 3, {}),
        (12, 2, {}),
        (7, 3, {"host": True}),
        (6, 4, {"nets_by_action": True}),
        (5, 4, {"pairs": True}),
        (5, 4, {"host": True, "nets_by_action": True, "pairs": True}),
    ],
)
def test_equals_brute_force(
    rng, random_problem, budget_between, cheapest_cost, n_events, n_actions, options,
    planner,
):  # fmt: skip
    """Small problems of any kind cost what the best of all choices costs, and it knows.

    The searches prove these as well as the solver does.
    """
    for share in (0.0, 0.05, 0.15, 0.3, 0.5, 0.9):
        problem = random_problem(rng, n_events, n_actions, **options)
        problem = budget_between(problem, share + 1e-5)
        plan = planner.plan(problem)
        assert plan.peak_bytes <= problem.budget_bytes
        assert cheapest_cost(problem) == pytest.approx(plan.extra_cost)
        assert plan.optimal


@pytest.mark.parametrize("kind", KINDS)
def test_equals_brute_force_with_six_actions(
    rng, measured_problem, budget_between, cheapest_cost, kind
):
    """The same with measured proportions, where some units do without some actions."""
    for share in (0.0, 0.1, 0.5, 0.9):
        problem = measured_problem(rng, kind, 6, jitter=0.02, masked=True)
        problem = budget_between(problem, share)
        plan = Optimal().plan(problem)
        assert cheapest_cost(problem) == pytest.approx(plan.extra_cost)


def solved_cost(problem):
    """What the 0-1 program says is the least, and proves."""
    built = program.build_program(problem, problem.host_budget_bytes)
    solution = built.cheapest(problem.cost, problem.budget_bytes, 10.0)
    assert solution.proved
    return problem.cost[np.arange(len(problem.events)), solution.choice].sum()


@pytest.mark.parametrize("kind", KINDS)
def test_the_search_agrees_with_the_solver(
    rng, measured_problem, whole_menu_problem, budget_between, kind
):
    """With six actions, and with eight whose bytes depend on pairs of events."""
    for problem in (
        measured_problem(rng, kind, 10, jitter=0.1),
        whole_menu_problem(rng, kind, 8, pairs=True, jitter=0.02),
    ):
        problem = budget_between(problem, 0.4)
        plan = Optimal().plan(problem)
        assert plan.optimal
        assert solved_cost(problem) == pytest.approx(plan.extra_cost, rel=1e-6)


def test_the_solver_alone(rng, random_problem, budget_between, cheapest_cost):
    """The program's rows say what the judge says, pairs, nets and the host included."""
    for share in (0.05, 0.3, 0.7):
        for host in (False, True):
            problem = random_problem(
                rng, 5, 4, host=host, nets_by_action=True, pairs=True
            )
            problem = budget_between(problem, share)
            expected = cheapest_cost(problem)
            assert expected == pytest.approx(solved_cost(problem), rel=1e-6)


def test_equal_layers_are_proved_without_the_solver(
    rng, measured_problem, budget_between, monkeypatch
):
    """Where many plans cost the same the search has few to carry on, and proves it."""
    monkeypatch.setattr(program, "milp", None)
    for share in (0.1, 0.35, 0.7):
        problem = measured_problem(rng, "layers", 24, nets_by_action=False)
        assert Optimal().plan(budget_between(problem, share)).optimal


def test_budgets_that_are_exactly_some_peak(
    rng, random_problem, every_choice, with_fields, cheapest_cost
):
    """A plan that fits to the last byte is found."""
    problem = random_problem(rng, 7, 2)
    for peak in np.unique(peak_bytes(problem, every_choice(problem)))[::5]:
        tight = with_fields(problem, budget_bytes=peak)
        assert cheapest_cost(tight) == pytest.approx(Optimal().plan(tight).extra_cost)


def test_a_larger_budget_never_costs_more(rng, resnet_problem, budget_between):
    """Cost falls, or stays, as the budget grows."""
    problem = resnet_problem(rng, 12)
    costs = [
        Optimal().plan(budget_between(problem, share)).extra_cost
        for share in np.linspace(0, 1, 12)
    ]
    assert sorted(costs, reverse=True) == costs
    assert costs[-1] == 0.0


def test_least_peak_plan(
    rng, random_problem, every_choice, budget_between, make_problem
):
    """The solver's least peak is the least of all choices, the host included."""
    for nets_by_action in (False, True):
        for share in (0.0, 0.3):
            problem = random_problem(
                rng, 6, 3, host=True, nets_by_action=nets_by_action
            )
            problem = budget_between(problem, share)
            expected = peak_bytes(problem, every_choice(problem)).min()
            actual = least_peak_plan(problem).peak_bytes
            assert expected == pytest.approx(actual, abs=0.01)
    empty = make_problem(0, gap_excess_bytes=np.array([3.0]))
    assert least_peak_plan(empty).peak_bytes == 3.0


@pytest.fixture
def unproved(rng, random_problem, budget_between, monkeypatch):
    """A problem that a narrow search cannot prove: the host's budget binds.

    Keeping everything is over the budget.
    """
    monkeypatch.setattr(pricing, "_WIDTHS", (2,))
    while True:
        problem = budget_between(random_problem(rng, 6, 3, host=True), 0.5)
        keeps_all = peak_bytes(problem, np.zeros(6, dtype=np.intp))
        is_over = keeps_all > problem.budget_bytes
        if is_over and not Marginal().plan(problem).optimal:
            return problem


class _Answer:
    """What the solver hands back."""

    def __init__(self, status, x):
        self.status, self.x = status, x


def test_out_of_time(unproved, monkeypatch, caplog):
    """With nothing found in time: the marginal plan, and a warning with the limit."""
    monkeypatch.setattr(program, "milp", lambda *_, **__: _Answer(1, None))
    with caplog.at_level(logging.WARNING):
        plan = Optimal(time_limit_seconds=0.5).plan(unproved)
    assert Marginal().plan(unproved).actions == plan.actions
    assert plan.planner == "optimal"
    assert "0.5 s" in caplog.text


@pytest.mark.parametrize("status", [0, 1])
def test_answers_over_the_budget_are_not_taken(unproved, monkeypatch, status):
    """A solver that keeps exceeding the budget is not believed, whatever it claims."""
    x = np.zeros(unproved.allowed.size + 7)
    x[: unproved.allowed.size : 3] = 1  # keep everything
    monkeypatch.setattr(program, "milp", lambda *_, **__: _Answer(status, x))
    plan = Optimal().plan(unproved)
    assert plan.peak_bytes <= unproved.budget_bytes
    assert not plan.optimal
