"""What walks may hold at the most, so that they can always be carried on."""

import numpy as np
import pytest

from mimose.planners import peak_bytes
from mimose.planners.limits import limits_of
from mimose.planners.prefix import least_suffix, prefix_form


@pytest.mark.parametrize("pairs", [False, True])
def test_a_walk_within_them_can_be_carried_on(
    rng, random_problem, budget_between, pairs
):
    """Whatever allowed actions are taken, as long as the limits allow them."""
    n_stuck = 0
    for _ in range(60):
        problem = budget_between(random_problem(rng, 6, 3, pairs=pairs), 0.2)
        form = prefix_form(problem)
        headroom = problem.budget_bytes - least_suffix(form)
        limits = limits_of(form, headroom, problem.budget_bytes)
        held, is_saved, choice = 0.0, False, []
        for event in range(6):
            holds = form.held_bytes[event] + is_saved * form.shared_bytes[event]
            may = held <= limits.before[event] + 1e-6
            may &= held + holds <= limits.behind[event] + 1e-6
            n_stuck += not may.any()
            action = int(rng.choice(may.nonzero()[0]))
            held += holds[action]
            is_saved = form.saves_output[event, action]
            choice.append(action)
        assert peak_bytes(problem, np.array(choice)) <= problem.budget_bytes + 1e-6
    assert not n_stuck
