"""The bound on the rest of a walk is one, and exact where events are divisible."""

import numpy as np
import pytest

from benchmarks.problems import KINDS, with_budget
from mimose.planners import peak_bytes
from mimose.planners.prefix import least_suffix, prefix_form
from mimose.planners.relaxed import relaxed_rests


def rests_of(problem):
    """The bounds of a problem's walks, by the number of events behind."""
    form = prefix_form(problem)
    headroom = problem.budget_bytes - least_suffix(form)[0]
    return relaxed_rests(form, problem.cost, headroom)


@pytest.mark.parametrize("kind", KINDS)
def test_no_plan_costs_less(rng, measured_problem, every_choice, kind):
    """The bound of the whole step is below the cost of each plan within the budget."""
    for share in (0.05, 0.3, 0.7):
        problem = measured_problem(rng, kind, 5, jitter=0.05, masked=True)
        problem = with_budget(problem, share)
        choices = every_choice(problem)
        fits = peak_bytes(problem, choices) <= problem.budget_bytes
        costs = problem.cost[np.arange(5), choices].sum(axis=1)[fits]
        least = rests_of(problem)[0].at(0.0)
        assert 0 <= least <= costs.min() * (1 + 1e-12)


def test_divisible_events(make_problem):
    """Three of four bytes are freed where a byte is cheapest, the last by a half."""
    problem = make_problem(
        2,
        held_bytes=np.array([[2.0, 0.0], [2.0, 0.0]]),
        cost=np.array([[0.0, 2.0], [0.0, 6.0]]),
        budget_bytes=1.0,
    )
    rests = rests_of(problem)
    assert rests[0].at(0.0) == pytest.approx(2.0 + 3.0)
    assert rests[1].at(0.0) == pytest.approx(3.0)
    assert rests[2].at(0.0) == 0.0


def test_one_place_as_many(rng, measured_problem):
    """Read in one place it is what NumPy's interpolation says of many."""
    problem = with_budget(measured_problem(rng, "pair", 8, jitter=0.1), 0.4)
    most = problem.held_bytes[:, 0].sum()
    for rest in rests_of(problem):
        places = rng.uniform(-0.1, 1.1, 20) * most
        places = np.append(places, rest.corner_bytes)
        expected = np.interp(places, *rest)
        actual = [rest.at(float(place)) for place in places]
        assert expected == pytest.approx(actual)


def test_no_plan_costs_less_with_pairs(
    rng, random_problem, budget_between, every_choice
):
    """Nor where what is held depends on pairs of events."""
    for _ in range(20):
        problem = budget_between(random_problem(rng, 5, 3, pairs=True), 0.4)
        choices = every_choice(problem)
        fits = peak_bytes(problem, choices) <= problem.budget_bytes
        costs = problem.cost[np.arange(5), choices].sum(axis=1)[fits]
        assert rests_of(problem)[0].at(0.0) <= costs.min() * (1 + 1e-12)
