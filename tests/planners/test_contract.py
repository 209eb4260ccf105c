"""What every planner promises."""

import copy

import numpy as np
import pytest

from mimose.planners import (
    EveryK,
    Eviction,
    Full,
    Greedy,
    InfeasibleBudgetError,
    Marginal,
    NoPlan,
    Optimal,
    Planner,
    PlanningProblem,
    Static,
    lay_out,
    safest_plan,
)

MAKERS = {
    "every-1": lambda: EveryK(1),
    "every-3": lambda: EveryK(3),
    "eviction": Eviction,
    "full": Full,
    "greedy": Greedy,
    "greedy-released": lambda: Greedy(largest=False),
    "marginal": Marginal,
    "marginal, narrow": lambda: Marginal(width=2),
    "none": NoPlan,
    "optimal": Optimal,
    "static": lambda: Static(shape={"length": 512}),
    "static, greedy": lambda: Static(shape={}, planner=Greedy()),
}
KEEP_BUDGETS = ("marginal", "marginal, narrow", "optimal", "static")
IGNORE_BUDGETS = ("every-1", "every-3", "full")


@pytest.fixture(params=MAKERS)
def planner_name(request):
    """Each planner's name in turn."""
    return request.param


@pytest.fixture
def planner(planner_name):
    """Each planner in turn, fresh."""
    return MAKERS[planner_name]()


@pytest.fixture(
    params=[
        "transformer",
        "jittered",
        "resnet",
        "random",
        "random with host",
        "random with nets",
        "six actions",
        "six actions with masks",
        "random with pairs",
        "random with all",
        "twelve actions",
    ]
)
def problem(request, rng, random_problem, transformer_problem, resnet_problem,
            measured_problem, whole_menu_problem, budget_between):  # fmt: skip
    """Each kind of problem in turn, half-way between least peak and keeping all."""
    made = {
        "transformer": lambda: transformer_problem(rng, 12),
        "jittered": lambda: transformer_problem(rng, 12, jitter=0.05),
        "resnet": lambda: resnet_problem(rng, 16),
        "random": lambda: random_problem(rng, 10, 4),
        "random with nets": lambda: random_problem(rng, 10, 3, nets_by_action=True),
        "six actions": lambda: measured_problem(rng, "pair", 12),
        "six actions with masks": lambda: measured_problem(
            rng, "mixture", 12, jitter=0.02, masked=True
        ),
        "random with pairs": lambda: random_problem(rng, 10, 4, pairs=True),
        "random with all": lambda: random_problem(
            rng, 8, 4, host=True, nets_by_action=True, pairs=True
        ),
        "twelve actions": lambda: whole_menu_problem(rng, "stages", 12),
        "random with host": lambda: random_problem(rng, 10, 3, host=True),
    }[request.param]()
    return budget_between(made, 0.5)


def indices(problem, plan):
    """The plan's actions as indices."""
    return np.array([problem.actions.index(a) for a in plan.actions], dtype=np.intp)


def test_is_a_planner(planner):
    """It has a name and a method that plans."""
    assert isinstance(planner, Planner)


def test_covers_the_events(planner, problem):
    """There is one action for each event, an allowed one."""
    plan = planner.plan(problem)
    assert len(problem.events) == len(plan.actions)
    chosen = problem.allowed[np.arange(len(problem.events)), indices(problem, plan)]
    assert chosen.all()


def test_says_what_the_timeline_says(planner, problem):
    """Peak, growth, cost and binding segments are those of its actions."""
    plan = planner.plan(problem)
    choice = indices(problem, plan)
    laid_out = lay_out(problem, choice)
    cost = problem.cost[np.arange(len(choice)), choice].sum()
    assert laid_out.peak_bytes == plan.peak_bytes
    assert plan.peak_bytes - problem.start_bytes == plan.growth_bytes
    assert cost == pytest.approx(plan.extra_cost)
    assert laid_out.binding_segments == plan.binding_segments
    assert planner.name == plan.planner


def test_keeps_the_budget(planner_name, planner, problem):
    """Planners that know peaks stay within both budgets."""
    plan = planner.plan(problem)
    if planner_name in KEEP_BUDGETS:
        assert plan.peak_bytes <= problem.budget_bytes
        chosen = indices(problem, plan)
        host = problem.host_bytes[np.arange(len(chosen)), chosen].sum()
        assert host <= problem.host_budget_bytes


def test_impossible_budget(planner_name, planner, problem, with_fields):
    """Planners that know peaks say why not; the others say their peak."""
    least = safest_plan(problem)
    tight = with_fields(problem, budget_bytes=0.9 * least.peak_bytes)
    if planner_name not in KEEP_BUDGETS:
        assert planner.plan(tight).peak_bytes > tight.budget_bytes
        return
    with pytest.raises(InfeasibleBudgetError) as caught:
        planner.plan(tight)
    assert tight.budget_bytes == caught.value.budget_bytes
    assert least.peak_bytes == caught.value.least_peak_bytes
    assert least.peak_bytes == pytest.approx(sum(caught.value.holders.values()))


def test_budget_of_the_least_peak(planner_name, planner, problem, with_fields):
    """The least peak itself is a budget that can be kept."""
    least = safest_plan(problem)
    tight = with_fields(problem, budget_bytes=least.peak_bytes)
    plan = planner.plan(tight)
    if planner_name in KEEP_BUDGETS:
        assert plan.peak_bytes <= tight.budget_bytes
        assert plan.extra_cost <= least.extra_cost + 1e-9


@pytest.mark.parametrize("budget", [1e15, float("inf")])
def test_ample_budget(planner_name, planner, problem, with_fields, budget):
    """With room for all, everything that may be kept is kept."""
    plan = planner.plan(with_fields(problem, budget_bytes=budget))
    if planner_name not in IGNORE_BUDGETS:
        may_keep = problem.allowed[:, 0]
        kept = np.array([action == "keep" for action in plan.actions])
        assert may_keep.tolist() == kept.tolist()


def test_never_worse_than_recomputing_everything(
    planner, rng, transformer_problem, resnet_problem, budget_between
):
    """No plan costs more than the one that recomputes everything."""
    for made in (transformer_problem(rng, 9), resnet_problem(rng, 9)):
        for share in (0.0, 0.4, 0.9):
            problem = budget_between(made, share)
            most = Full().plan(problem).extra_cost
            assert MAKERS["full"]().plan(problem).extra_cost <= most
            fresh = copy.copy(planner)
            assert fresh.plan(problem).extra_cost <= most * (1 + 1e-12)


def test_deterministic(planner_name, problem):
    """The same problem gives the same plan, from a fresh planner and the same."""
    planner = MAKERS[planner_name]()
    expected = planner.plan(problem)
    assert expected == planner.plan(problem)
    assert expected == MAKERS[planner_name]().plan(problem)


def test_does_not_modify_the_problem(planner, problem):
    """Every field is afterwards what it was before."""
    before = {
        name: copy.deepcopy(getattr(problem, name))
        for name in PlanningProblem.__slots__
    }
    planner.plan(problem)
    for name, value in before.items():
        np.testing.assert_array_equal(value, getattr(problem, name))


def test_no_events(planner, make_problem):
    """A step without events has an empty plan, and the peak of its head."""
    gap_excess = np.array([7.0])
    problem = make_problem(0, gap_excess_bytes=gap_excess, budget_bytes=7.0)
    plan = planner.plan(problem)
    assert plan.actions == ()
    assert plan.peak_bytes == 7.0


def test_no_events_and_no_room(planner_name, planner, make_problem):
    """Without events there is nothing to recompute, and a budget can be too small."""
    problem = make_problem(0, gap_excess_bytes=np.array([7.0]), budget_bytes=6.0)
    if planner_name in KEEP_BUDGETS:
        with pytest.raises(InfeasibleBudgetError):
            planner.plan(problem)
    else:
        assert planner.plan(problem).peak_bytes == 7.0


def test_one_event(planner_name, planner, make_problem):
    """One event is recomputed where keeping it does not fit."""
    problem = make_problem(
        1,
        held_bytes=np.array([[8.0, 1.0]]),
        gap_excess_bytes=np.array([0.0, 4.0]),
        cost=np.array([[0.0, 1.0]]),
        budget_bytes=8.0,
    )
    expected = ("keep",) if planner_name == "none" else ("recompute",)
    if planner_name.startswith(("greedy", "static, greedy")):
        expected = ("keep",)  # the sum of held bytes fits; it does not see the head
    assert expected == planner.plan(problem).actions


def test_zero_byte_events(planner, make_problem):
    """Events without bytes and costs are planned like any other."""
    plan = planner.plan(make_problem(5, budget_bytes=0.0))
    assert len(plan.actions) == 5
    assert plan.peak_bytes == 0.0
    assert plan.extra_cost == 0.0


def test_only_one_action(planner, make_problem):
    """Where nothing but keeping is known, everything is kept."""
    problem = make_problem(3, actions=("keep",), held_bytes=np.ones((3, 1)),
                           budget_bytes=3.0)  # fmt: skip
    assert planner.plan(problem).actions == ("keep",) * 3


def test_events_that_may_not_be_recomputed(planner, make_problem):
    """An event without another action is kept, whatever the others do."""
    allowed = np.ones((4, 2), dtype=bool)
    allowed[2, 1] = False
    problem = make_problem(
        4,
        allowed=allowed,
        held_bytes=np.array([[10.0, 1.0]] * 4),
        cost=np.array([[0.0, 1.0]] * 4),
        budget_bytes=25.0,
    )
    assert planner.plan(problem).actions[2] == "keep"
