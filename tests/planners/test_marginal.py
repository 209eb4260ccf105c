"""How near the marginal planner is to the optimum, and that it always finds a plan."""

import numpy as np
import pytest

from benchmarks.problems import KINDS
from mimose.planners import (
    InfeasibleBudgetError,
    Marginal,
    Optimal,
    host_bytes,
    lay_out,
    peak_bytes,
    safest_plan,
)
from mimose.planners import marginal as module
from mimose.planners.fewer import with_actions

SHARES = (0.02, 0.2, 0.4, 0.6, 0.8, 0.98)
MENUS = [0, 7], [0, 1, 2, 3, 4, 7], [0, 1, 2, 3, 4, 6, 7], range(8)
"""Of the whole menu: whole layers, tensors, those and the host, and lossy ones."""


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


def choice_of(problem, plan):
    """The plan's actions as indices."""
    return np.array([problem.actions.index(a) for a in plan.actions], dtype=np.intp)


def test_optimal_on_like_layers(rng, transformer_problem, budget_between):
    """With one family it is the optimum, and it knows."""
    for problem in spread(transformer_problem, budget_between, rng, (4, 12, 24)):
        plan = Marginal().plan(problem)
        assert plan.optimal
        assert Optimal().plan(problem).extra_cost == pytest.approx(plan.extra_cost)


def test_gap_on_unlike_layers(rng, transformer_problem, resnet_problem, budget_between):
    """With layers that all differ, or four stages, at most half a percent is lost."""

    def jittered(rng, n_events):
        return transformer_problem(rng, n_events, jitter=0.05)

    for make in (jittered, resnet_problem):
        ours, best = total_costs(spread(make, budget_between, rng, (8, 16)))
        assert best * (1 - 1e-9) <= ours <= 1.005 * best
    problems = spread(resnet_problem, budget_between, rng, (8, 16))
    ours, best = total_costs(problems, width=8)
    assert ours <= 1.03 * best


@pytest.mark.parametrize("jitter", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_gap_with_six_actions(rng, measured_problem, budget_between, kind, jitter):
    """With the proportions of measured layers, at most a percent is lost on any."""
    for masked, share in ((False, 0.02), (True, 0.1), (False, 0.4), (True, 0.9)):
        for nets_by_action in (False, True):
            problem = measured_problem(
                rng, kind, 12, jitter=jitter, masked=masked,
                nets_by_action=nets_by_action,
            )  # fmt: skip
            problem = budget_between(problem, share)
            plan = Marginal().plan(problem)
            best = Optimal().plan(problem).extra_cost
            assert best * (1 - 1e-9) <= plan.extra_cost <= 1.01 * best


def test_gap_where_levels_are_scarce(measured_problem, budget_between, with_fields):
    """Where what all backwards leave is what binds, at most a percent is lost."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        problem = measured_problem(rng, "layers", 16, jitter=0.1, nets_by_action=False)
        nets = problem.backward_net_bytes + problem.held_bytes[:, :1] * rng.uniform(
            0, 0.1, problem.allowed.shape
        )
        problem = with_fields(problem, backward_net_bytes=nets)
        least = np.full(16, len(problem.actions) - 1)
        after = lay_out(problem, least).level_bytes[-1]
        excess = 1.2 * (safest_plan(problem).peak_bytes - after)
        problem = with_fields(problem, step_excess_bytes=max(excess, 0.0))
        problem = budget_between(problem, 0.02)
        best = Optimal().plan(problem)
        assert best.optimal
        assert Marginal().plan(problem).extra_cost <= 1.01 * best.extra_cost


@pytest.fixture
def limited(with_fields, budget_between):
    """Limit the host to a share of all, and the device to one of what a menu needs."""

    def make(problem, menu, share, host_share):
        host = host_share * problem.host_bytes.max(axis=1).sum()
        problem = with_fields(problem, host_budget_bytes=host)
        budget = budget_between(with_actions(problem, menu), share).budget_bytes
        return with_fields(problem, budget_bytes=budget)

    return make


def test_gap_where_the_host_binds(rng, whole_menu_problem, limited):
    """Without lossy actions it loses at most a percent to the solver."""
    for kind in ("layers", "pair", "mixture"):
        problem = whole_menu_problem(rng, kind, 12, pairs=True, jitter=0.02)
        problem = with_actions(limited(problem, MENUS[2], 0.1, 0.2), MENUS[2])
        plan, best = Marginal().plan(problem), Optimal().plan(problem)
        needed = host_bytes(problem, choice_of(problem, plan))
        assert needed <= problem.host_budget_bytes
        assert best.extra_cost * (1 - 1e-9) <= plan.extra_cost
        assert plan.extra_cost <= 1.01 * best.extra_cost


def test_what_it_calls_optimal_is(rng, random_problem, budget_between, cheapest_cost):
    """Two walks are too few to find every optimum; none is claimed wrongly."""
    n_flagged = n_dearer = 0
    for turn in range(100):
        is_rich = bool(turn % 2)
        made = random_problem(rng, 6, 3, nets_by_action=is_rich, pairs=is_rich)
        problem = budget_between(made, 0.3)
        plan = Marginal(width=2, widest=2).plan(problem)
        assert plan.peak_bytes <= problem.budget_bytes
        is_dearer = plan.extra_cost > cheapest_cost(problem) * (1 + 1e-9)
        assert not (plan.optimal and is_dearer)
        n_flagged += plan.optimal
        n_dearer += is_dearer
    assert n_flagged > 10
    assert n_dearer


def test_optimal_where_pairs_share(rng, random_problem, budget_between, cheapest_cost):
    """A walk that has saved its output is no match for one that has not."""
    for _ in range(20):
        problem = budget_between(random_problem(rng, 7, 4, pairs=True), 0.1)
        plan = Marginal().plan(problem)
        assert cheapest_cost(problem) == pytest.approx(plan.extra_cost, rel=1e-9)


@pytest.mark.parametrize("n_events", [1, 2, 5, 30])
def test_always_finds_a_plan(rng, random_problem, budget_between, n_events):
    """Within any budget from the least peak on there is a plan, and it is found."""
    for n_actions, nets_by_action in ((1, False), (2, False), (3, True), (4, True)):
        for share in (0.0, 0.01, 0.3, 0.9):
            problem = random_problem(
                rng, n_events, n_actions, nets_by_action=nets_by_action
            )
            problem = budget_between(problem, share)
            for width in (2, 96):
                plan = Marginal(width=width).plan(problem)
                assert plan.peak_bytes <= problem.budget_bytes


def test_fractions_of_bytes(rng, transformer_problem, with_fields):
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
    assert 100 < plan.actions.count("recompute") < 200


@pytest.mark.parametrize("kind", ["layers", "stages", "mixture", "pair"])
def test_more_actions_never_cost_more(rng, whole_menu_problem, limited, kind):
    """Not even to a search that leaves out nearly all."""
    planner = Marginal(width=2, widest=2)
    for share, host_share in ((0.02, 1.0), (0.1, 0.2), (0.3, 1.0), (0.5, 0.1)):
        problem = whole_menu_problem(rng, kind, 12, pairs=kind != "pair", jitter=0.05)
        problem = limited(problem, MENUS[0], share, host_share)
        costs = [planner.plan(with_actions(problem, at)).extra_cost for at in MENUS]
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
    plan = Marginal(width=2, widest=2).plan(problem)
    assert not plan.optimal
    assert plan.peak_bytes <= 30.0


def test_falls_back_to_the_safest_plan(
    rng, transformer_problem, budget_between, monkeypatch
):
    """Should the search find nothing, the least peak is where it starts from.

    What need not be recomputed is kept.
    """
    monkeypatch.setattr(module, "find_walk", lambda *_, **__: None)
    problem = budget_between(transformer_problem(rng, 8), 0.5)
    plan = Marginal().plan(problem)
    assert plan.peak_bytes <= problem.budget_bytes
    assert not plan.optimal
    assert plan.extra_cost < safest_plan(problem).extra_cost


def test_optimizer_state_does_not_fit(make_problem):
    """Where the optimizer's own step exceeds the budget, no action helps."""
    problem = make_problem(
        1, optimizer_state_bytes=8.0, start_bytes=10.0, budget_bytes=17.0
    )
    with pytest.raises(InfeasibleBudgetError) as caught:
        Marginal().plan(problem)
    assert caught.value.holders["optimizer state still to come"] == 8.0
