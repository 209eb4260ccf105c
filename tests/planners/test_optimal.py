"""The optimal planner is optimal."""

import logging

import numpy as np
import pytest

from benchmarks.problems import KINDS, with_budget
from mimose.planners import (
    InfeasibleBudgetError,
    Marginal,
    Optimal,
    least_peak_plan,
    peak_bytes,
    pricing,
    program,
    safest_plan,
)


def cheapest_cost(problem, choices):
    """Least cost of all choices within the budget, by looking at each."""
    fits = peak_bytes(problem, choices) <= problem.budget_bytes
    costs = problem.cost[np.arange(len(problem.events)), choices].sum(axis=1)
    return costs[fits].min()


@pytest.mark.parametrize(
    ("n_events", "n_actions", "host"),
    [(1, 2, False), (4, 2, False), (8, 2, False), (12, 2, False), (6, 4, False),
     (7, 3, True)],
)  # fmt: skip
def test_equals_brute_force(
    rng, random_problem, budget_between, every_choice, n_events, n_actions, host
):
    """On small problems of any kind it costs what the best of all choices costs."""
    for share in (0.0, 0.1, 0.5, 0.9):
        problem = random_problem(rng, n_events, n_actions, host=host)
        problem = budget_between(problem, share)
        plan = Optimal().plan(problem)
        assert plan.optimal
        expected = cheapest_cost(problem, every_choice(problem))
        assert expected == pytest.approx(plan.extra_cost)


@pytest.mark.parametrize("nets_by_action", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_brute_force_with_six_actions(
    rng, measured_problem, every_choice, kind, nets_by_action
):
    """The same with six actions, of which some units do without some."""
    for share in (0.0, 0.1, 0.5, 0.9):
        problem = measured_problem(
            rng, kind, 6, jitter=0.02, masked=True, nets_by_action=nets_by_action
        )
        problem = with_budget(problem, share)
        plan = Optimal().plan(problem)
        expected = cheapest_cost(problem, every_choice(problem))
        assert expected == pytest.approx(plan.extra_cost)


@pytest.mark.parametrize("nets_by_action", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_search_agrees_with_the_solver(rng, measured_problem, kind, nets_by_action):
    """With six actions, what the search proves the 0-1 program finds as well."""
    problem = measured_problem(rng, kind, 10, jitter=0.1, nets_by_action=nets_by_action)
    problem = with_budget(problem, 0.4)
    plan = Optimal().plan(problem)
    assert plan.optimal
    built = program.build_program(problem, np.inf)
    solution = built.cheapest(problem.cost, problem.budget_bytes, 10.0)
    assert solution.proved
    solved = problem.cost[np.arange(10), solution.choice].sum()
    assert solved == pytest.approx(plan.extra_cost, rel=1e-6)


def test_equal_layers_are_proved_without_the_solver(rng, measured_problem, monkeypatch):
    """Where many plans cost the same the search has few to carry on, and proves it."""
    monkeypatch.setattr(program, "milp", None)
    for share in (0.1, 0.35, 0.7):
        problem = measured_problem(rng, "layers", 24, nets_by_action=False)
        assert Optimal().plan(with_budget(problem, share)).optimal


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize(("n_events", "n_actions"), [(1, 3), (5, 3), (7, 3), (5, 4)])
def test_equals_brute_force_where_nets_differ(
    rng, random_problem, budget_between, every_choice, n_events, n_actions, host
):
    """The same where what a backward leaves depends on the action."""
    for share in (0.0, 0.1, 0.5, 0.9):
        problem = random_problem(
            rng, n_events, n_actions, host=host, nets_by_action=True
        )
        problem = budget_between(problem, share)
        plan = Optimal().plan(problem)
        assert plan.optimal
        expected = cheapest_cost(problem, every_choice(problem))
        assert expected == pytest.approx(plan.extra_cost)


def test_budgets_that_are_exactly_some_peak(
    rng, random_problem, every_choice, with_fields
):
    """A plan that fits to the last byte is found."""
    problem = random_problem(rng, 7, 2)
    choices = every_choice(problem)
    for peak in np.unique(peak_bytes(problem, choices))[::5]:
        tight = with_fields(problem, budget_bytes=peak)
        expected = cheapest_cost(tight, choices)
        assert expected == pytest.approx(Optimal().plan(tight).extra_cost)


def test_a_larger_budget_never_costs_more(rng, resnet_problem, budget_between):
    """Cost falls, or stays, as the budget grows."""
    problem = resnet_problem(rng, 12)
    shares = np.linspace(0, 1, 12)
    costs = [
        Optimal().plan(budget_between(problem, share)).extra_cost for share in shares
    ]
    assert sorted(costs, reverse=True) == costs
    assert costs[-1] == 0.0


def test_scale_does_not_matter(rng, transformer_problem, budget_between, with_fields):
    """Seconds or FLOPs, bytes or terabytes: the plan is the same."""
    problem = budget_between(transformer_problem(rng, 8, jitter=0.05), 0.4)
    expected = Optimal().plan(problem)
    for factor in (1e-9, 1e12):
        plan = Optimal().plan(with_fields(problem, cost=problem.cost * factor))
        assert expected.actions == plan.actions
        assert plan.optimal


@pytest.mark.parametrize("nets_by_action", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_least_peak_plan(
    rng, random_problem, every_choice, budget_between, share, nets_by_action
):
    """The solver's least peak is the least of all choices, the host included."""
    for _ in range(4):
        problem = random_problem(rng, 6, 3, host=True, nets_by_action=nets_by_action)
        problem = budget_between(problem, share)
        expected = peak_bytes(problem, every_choice(problem)).min()
        assert expected == pytest.approx(least_peak_plan(problem).peak_bytes, abs=0.01)


def test_least_peak_plan_without_events(make_problem):
    """Without events the least peak is the head's."""
    problem = make_problem(0, gap_excess_bytes=np.array([3.0]))
    assert least_peak_plan(problem).peak_bytes == 3.0


def test_infeasible_where_nets_differ(rng, random_problem, with_fields):
    """The solver finds nothing there, and the error says what the least would be."""
    problem = random_problem(rng, 6, 3, nets_by_action=True)
    least = safest_plan(problem).peak_bytes
    with pytest.raises(InfeasibleBudgetError) as caught:
        Optimal().plan(with_fields(problem, budget_bytes=least - 1.0))
    assert least == caught.value.least_peak_bytes


def test_infeasible_without_a_search(make_problem, monkeypatch):
    """Without host actions an impossible budget is refused before the solver runs."""
    monkeypatch.setattr(program, "milp", None)
    with pytest.raises(InfeasibleBudgetError):
        Optimal().plan(make_problem(1, gap_excess_bytes=[3, 3], budget_bytes=1.0))


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


def test_time_limit_without_a_plan(unproved, monkeypatch, caplog):
    """Out of time with nothing found: the marginal plan, and a warning."""
    monkeypatch.setattr(program, "milp", lambda *_, **__: _Answer(1, None))
    problem = unproved
    with caplog.at_level(logging.WARNING):
        plan = Optimal(time_limit_seconds=0.5).plan(problem)
    assert Marginal().plan(problem).actions == plan.actions
    assert plan.planner == "optimal"
    assert "stopped after 0.5 s without a proof, at 6 events" in caplog.text


def test_time_limit_with_a_plan(
    rng, random_problem, budget_between, monkeypatch, caplog
):
    """Out of time with a plan found: it is returned, and not called optimal."""
    problem = random_problem(rng, 6, 3, host=True)
    problem = budget_between(problem, 0.5)
    found = Optimal().plan(problem)
    n_columns = problem.allowed.size + len(problem.events) + 1
    x = np.zeros(n_columns)
    chosen = [problem.actions.index(action) for action in found.actions]
    x[np.arange(len(chosen)) * len(problem.actions) + chosen] = 1

    def no_plan(self, problem):
        raise InfeasibleBudgetError(1.0, 2.0, {})

    monkeypatch.setattr(program, "milp", lambda *_, **__: _Answer(1, x))
    monkeypatch.setattr(Marginal, "plan", no_plan)
    with caplog.at_level(logging.WARNING):
        plan = Optimal().plan(problem)
    assert found.actions == plan.actions
    assert not plan.optimal
    assert "without a proof" in caplog.text


def test_answers_over_the_budget_are_not_taken(unproved, monkeypatch):
    """A solver that keeps exceeding the budget is not believed."""
    problem = unproved
    x = np.zeros(problem.allowed.size + 7)
    x[: problem.allowed.size : 3] = 1  # keep everything
    monkeypatch.setattr(program, "milp", lambda *_, **__: _Answer(0, x))
    plan = Optimal().plan(problem)
    assert plan.peak_bytes <= problem.budget_bytes
    assert not plan.optimal


def test_no_memory_to_plan_in(make_problem):
    """Bytes that are all zero do not break the scaling."""
    problem = make_problem(2, gap_excess_bytes=[0, 0, 5], budget_bytes=5.0)
    assert Optimal().plan(problem).peak_bytes == 5.0
    assert safest_plan(problem).peak_bytes == 5.0


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_time_limit_is_checked(limit):
    """A time limit must be positive."""
    with pytest.raises(ValueError, match="time_limit_seconds must be positive"):
        Optimal(time_limit_seconds=limit)
