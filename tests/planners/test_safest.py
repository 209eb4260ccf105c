"""The plan with the least peak."""

import numpy as np
import pytest

from mimose.planners import least_peak_plan, peak_bytes, safest_plan


@pytest.mark.parametrize("nets_by_action", [False, True])
@pytest.mark.parametrize("n_events", [0, 1, 5, 8])
def test_equals_brute_force(
    rng, random_problem, every_choice, n_events, nets_by_action
):
    """No choice has a lower peak."""
    for _ in range(20):
        problem = random_problem(rng, n_events, 3, nets_by_action=nets_by_action)
        expected = peak_bytes(problem, every_choice(problem)).min()
        assert expected == safest_plan(problem).peak_bytes


def test_with_a_host_budget(rng, random_problem, every_choice):
    """Where the host binds the least peak is found to a millionth."""
    for _ in range(20):
        problem = random_problem(rng, 6, 3, host=True)
        expected = peak_bytes(problem, every_choice(problem)).min()
        assert expected == pytest.approx(safest_plan(problem).peak_bytes, rel=1e-5)


def test_equals_the_solver(rng, transformer_problem, resnet_problem):
    """The fast plan and the solver's have the same peak."""
    for problem in (transformer_problem(rng, 20), resnet_problem(rng, 20)):
        expected = least_peak_plan(problem).peak_bytes
        assert expected == pytest.approx(safest_plan(problem).peak_bytes)


def test_does_not_read_the_budget(rng, resnet_problem, with_fields):
    """It is the same plan at any budget."""
    problem = resnet_problem(rng, 8)
    expected = safest_plan(problem)
    assert expected == safest_plan(with_fields(problem, budget_bytes=0.0))


def test_holds_least_among_equals(make_problem):
    """Where the peak is elsewhere anyway, it still holds little."""
    problem = make_problem(
        3,
        held_bytes=np.array([[4.0, 1.0]] * 3),
        cost=np.array([[0.0, 1.0]] * 3),
        gap_excess_bytes=np.array([100.0, 0, 0, 0]),
    )
    assert safest_plan(problem).actions == ("recompute",) * 3
