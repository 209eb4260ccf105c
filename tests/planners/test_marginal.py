"""How near the marginal planner is to the optimum, and that it always finds a plan."""

import numpy as np
import pytest

from benchmarks.problems import KINDS, with_budget
from mimose.planners import (
    InfeasibleBudgetError,
    Marginal,
    Optimal,
    lay_out,
    peak_bytes,
    safest_plan,
)
from mimose.planners import marginal as module
from mimose.planners.choices import least_choice
from mimose.planners.give_back import give_back
from mimose.planners.prefix import prefix_form

SHARES = (0.02, 0.2, 0.4, 0.6, 0.8, 0.98)


def total_costs(problems, **options):
    """Total cost of the marginal plans and of the optimal ones."""
    ours = sum(Marginal(**options).plan(p).extra_cost for p in problems)
    best = sum(Optimal().plan(p).extra_cost for p in problems)
    return ours, best


def spread(make, budget_between, rng, sizes):
    """Problems of these sizes, at budgets from nearly least peak to nearly all."""
    return [
        budget_between(make(rng, n_events), share)
        for n_events in sizes
        for share in SHARES
    ]


def test_optimal_on_like_layers(rng, transformer_problem, budget_between):
    """With one family it is the optimum, and it knows."""
    for problem in spread(transformer_problem, budget_between, rng, (4, 12, 24)):
        plan = Marginal().plan(problem)
        assert plan.optimal
        expected = Optimal().plan(problem).extra_cost
        assert expected == pytest.approx(plan.extra_cost)


def test_gap_on_nearly_like_layers(rng, transformer_problem, budget_between):
    """With layers that all differ by a little, at most half a percent is lost."""

    def jittered(rng, n_events):
        return transformer_problem(rng, n_events, jitter=0.05)

    problems = spread(jittered, budget_between, rng, (6, 12, 16))
    ours, best = total_costs(problems)
    assert best <= ours * (1 + 1e-9)
    assert ours <= 1.005 * best


def test_gap_on_unlike_blocks(rng, resnet_problem, budget_between):
    """With four stages of blocks at most half a percent is lost."""
    ours, best = total_costs(spread(resnet_problem, budget_between, rng, (8, 16, 24)))
    assert ours <= 1.005 * best


@pytest.mark.parametrize("nets_by_action", [False, True])
@pytest.mark.parametrize("jitter", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_gap_with_six_actions(rng, measured_problem, kind, jitter, nets_by_action):
    """With the proportions of measured layers, at most a percent is lost on any."""
    for masked, share in ((False, 0.02), (True, 0.1), (False, 0.4), (True, 0.9)):
        problem = measured_problem(
            rng, kind, 12, jitter=jitter, masked=masked, nets_by_action=nets_by_action
        )
        problem = with_budget(problem, share)
        plan = Marginal().plan(problem)
        best = Optimal().plan(problem).extra_cost
        assert best * (1 - 1e-9) <= plan.extra_cost <= 1.01 * best


def test_scarce_levels(measured_problem, with_fields):
    """Where what all backwards leave is what binds, at most a percent is lost."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        problem = measured_problem(rng, "layers", 16, jitter=0.1, nets_by_action=False)
        nets = problem.backward_net_bytes + problem.held_bytes[:, :1] * rng.uniform(
            0, 0.1, problem.allowed.shape
        )
        problem = with_fields(problem, backward_net_bytes=nets)
        after = lay_out(problem, least_choice(problem)).level_bytes[-1]
        excess = 1.2 * (safest_plan(problem).peak_bytes - after)
        problem = with_fields(problem, step_excess_bytes=max(excess, 0.0))
        problem = with_budget(problem, 0.02)
        assert prefix_form(problem).level_is_scarce(problem.budget_bytes)
        plan = Marginal().plan(problem)
        best = Optimal().plan(problem)
        assert best.optimal
        assert plan.extra_cost <= 1.01 * best.extra_cost


def test_dominated_actions_are_not_taken(rng, measured_problem, with_fields):
    """An action that holds as much as another and costs more is in no plan."""
    problem = measured_problem(rng, "pair", 12, jitter=0.02, nets_by_action=False)
    held, cost = problem.held_bytes.copy(), problem.cost.copy()
    held[:, 3], cost[:, 3] = held[:, 2], 1.1 * cost[:, 2]
    forward, backward = (
        np.where(np.arange(6) == 3, table[:, 2:3], table)
        for table in (problem.forward_excess_bytes, problem.backward_excess_bytes)
    )
    problem = with_fields(
        problem,
        held_bytes=held,
        cost=cost,
        forward_excess_bytes=forward,
        backward_excess_bytes=backward,
    )
    for share in SHARES:
        assert "lean40" not in Marginal().plan(with_budget(problem, share)).actions


def test_an_action_that_nobody_may_run_changes_nothing(
    rng, measured_problem, with_fields
):
    """Forbidden for all, it is as if the menu did not have it."""
    problem = measured_problem(rng, "mixture", 12, jitter=0.02)
    allowed = problem.allowed.copy()
    allowed[:, 1:5] = False
    tables = (
        "allowed",
        "held_bytes",
        "forward_excess_bytes",
        "backward_excess_bytes",
        "backward_net_bytes",
        "cost",
        "host_bytes",
        "transfer_seconds",
        "releases_input",
        "saves_output",
    )
    ends = {name: getattr(problem, name)[:, [0, 5]] for name in tables}
    two = with_fields(problem, actions=("keep", "recompute"), **ends)
    six = with_fields(problem, allowed=allowed)
    for share in SHARES:
        expected = Marginal().plan(with_budget(two, share))
        plan = Marginal().plan(with_budget(six, share))
        assert expected.extra_cost == pytest.approx(plan.extra_cost)


def test_gap_of_a_narrow_search(rng, resnet_problem, budget_between):
    """Even a handful of walks stays within three percent."""
    problems = spread(resnet_problem, budget_between, rng, (8, 16))
    ours, best = total_costs(problems, width=8)
    assert ours <= 1.03 * best


def test_what_it_calls_optimal_is(rng, random_problem, budget_between, every_choice):
    """A plan with the flag costs what the best of all choices costs."""
    n_flagged = 0
    for _ in range(40):
        problem = random_problem(rng, 8, 2)
        problem = budget_between(problem, rng.random())
        plan = Marginal(width=4).plan(problem)
        if plan.optimal:
            n_flagged += 1
            choices = every_choice(problem)
            fits = peak_bytes(problem, choices) <= problem.budget_bytes
            costs = problem.cost[np.arange(8), choices].sum(axis=1)
            assert costs[fits].min() == plan.extra_cost
    assert n_flagged > 10


def test_what_it_calls_optimal_is_where_nets_differ(
    rng, random_problem, budget_between, every_choice
):
    """Also where what a backward leaves depends on the action; most plans are."""
    n_flagged = n_best = 0
    for _ in range(40):
        problem = random_problem(rng, 7, 3, nets_by_action=True)
        problem = budget_between(problem, rng.random())
        plan = Marginal(width=16).plan(problem)
        assert plan.peak_bytes <= problem.budget_bytes
        choices = every_choice(problem)
        fits = peak_bytes(problem, choices) <= problem.budget_bytes
        best = problem.cost[np.arange(7), choices].sum(axis=1)[fits].min()
        n_best += best == plan.extra_cost
        n_flagged += plan.optimal
        if plan.optimal:
            assert best == plan.extra_cost
    assert n_flagged > 20
    assert n_best > 30


@pytest.mark.parametrize("nets_by_action", [False, True])
@pytest.mark.parametrize("n_actions", [1, 2, 3, 4])
@pytest.mark.parametrize("n_events", [1, 2, 5, 30])
def test_always_finds_a_plan(
    rng, random_problem, budget_between, n_events, n_actions, nets_by_action
):
    """Within any budget from the least peak on there is a plan, and it is found."""
    for share in (0.0, 0.01, 0.3, 0.9):
        problem = random_problem(
            rng, n_events, n_actions, nets_by_action=nets_by_action
        )
        problem = budget_between(problem, share)
        for width in (2, 96):
            plan = Marginal(width=width).plan(problem)
            assert plan.peak_bytes <= problem.budget_bytes


def test_fractions_of_bytes(rng, transformer_problem, budget_between, with_fields):
    """Budgets that are some plan's peak to the last bit are kept, whatever rounding."""
    problem = transformer_problem(rng, 10, jitter=0.01)
    for n_kept in range(11):
        choice = np.array([1] * (10 - n_kept) + [0] * n_kept)
        tight = with_fields(problem, budget_bytes=float(peak_bytes(problem, choice)))
        plan = Marginal().plan(tight)
        assert plan.peak_bytes <= tight.budget_bytes
        assert plan.extra_cost <= problem.cost[np.arange(10), choice].sum() * 1.2


def test_long_chains(rng, transformer_problem, budget_between):
    """Hundreds of events are planned as well, within the budget."""
    problem = budget_between(transformer_problem(rng, 300, jitter=0.05), 0.5)
    plan = Marginal().plan(problem)
    assert plan.peak_bytes <= problem.budget_bytes
    halves = sum(action == "recompute" for action in plan.actions)
    assert 100 < halves < 200


def test_width_never_hurts_much(rng, resnet_problem, budget_between):
    """More walks cost no more, over many problems."""
    problems = spread(resnet_problem, budget_between, rng, (16, 24))
    costs = [
        sum(Marginal(width=width).plan(p).extra_cost for p in problems)
        for width in (2, 16, 96)
    ]
    assert sorted(costs, reverse=True) == costs


def test_host_budget(rng, random_problem, budget_between):
    """Where the host budget binds both budgets are kept, near the optimum."""
    ours = best = 0.0
    for _ in range(20):
        problem = random_problem(rng, 10, 3, host=True)
        problem = budget_between(problem, 0.4)
        plan = Marginal().plan(problem)
        chosen = [problem.actions.index(action) for action in plan.actions]
        host = problem.host_bytes[np.arange(10), chosen].sum()
        assert host <= problem.host_budget_bytes
        assert plan.peak_bytes <= problem.budget_bytes
        ours += plan.extra_cost
        best += Optimal().plan(problem).extra_cost
    assert ours <= 1.05 * best


def test_host_budget_and_no_other(rng, random_problem, with_fields):
    """The host budget binds on its own as well, when the device has room for all."""
    problem = random_problem(rng, 8, 3, host=True)
    cost = problem.cost.copy()
    cost[:, 2] = -1.0
    problem = with_fields(problem, cost=cost, budget_bytes=float("inf"))
    plan = Marginal().plan(problem)
    chosen = [problem.actions.index(action) for action in plan.actions]
    host = problem.host_bytes[np.arange(8), chosen].sum()
    assert host <= problem.host_budget_bytes


def test_falls_back_to_the_safest_plan(
    rng, transformer_problem, budget_between, monkeypatch
):
    """Should the search find nothing, the least peak is where it starts from."""
    monkeypatch.setattr(module, "find_walk", lambda *_, **__: None)
    problem = budget_between(transformer_problem(rng, 8), 0.5)
    plan = Marginal().plan(problem)
    assert plan.peak_bytes <= problem.budget_bytes
    assert not plan.optimal
    assert plan.extra_cost < safest_plan(problem).extra_cost


def test_give_back_takes_the_greatest_saving_first(make_problem):
    """What need not be recomputed is kept, the dearest first."""
    problem = make_problem(
        3,
        held_bytes=np.array([[4.0, 0.0]] * 3),
        cost=np.array([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0]]),
        budget_bytes=8.0,
    )
    assert give_back(problem, np.array([1, 1, 1])).tolist() == [1, 0, 0]


def test_infeasible(rng, transformer_problem, with_fields):
    """The error has the budget, the least peak and what holds it."""
    problem = transformer_problem(rng, 6)
    least = safest_plan(problem).peak_bytes
    tight = with_fields(problem, budget_bytes=0.99 * least)
    with pytest.raises(InfeasibleBudgetError, match="held at start") as caught:
        Marginal().plan(tight)
    assert 0.99 * least == caught.value.budget_bytes
    assert least == caught.value.least_peak_bytes
    assert least == pytest.approx(sum(caught.value.holders.values()))


def test_optimizer_state_does_not_fit(make_problem):
    """Where the optimizer's own step exceeds the budget, no action helps."""
    problem = make_problem(
        1, optimizer_state_bytes=8.0, start_bytes=10.0, budget_bytes=17.0
    )
    with pytest.raises(InfeasibleBudgetError) as caught:
        Marginal().plan(problem)
    assert caught.value.holders["optimizer state still to come"] == 8.0


def test_width_is_checked():
    """A frontier needs room for two walks."""
    with pytest.raises(ValueError, match="width must be at least 2, got 1"):
        Marginal(width=1)
