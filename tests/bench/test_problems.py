"""Made-up problems have the proportions they are to have."""

import numpy as np
import pytest

from benchmarks.problems import ACTIONS, KINDS, draw_problem, with_budget
from mimose.planners import peak_bytes, safest_plan


@pytest.fixture
def rng():
    """A generator with a fixed seed."""
    return np.random.default_rng(7)


@pytest.mark.parametrize("n_actions", [2, 3, 6])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_events", [1, 2, 3, 4, 5, 12, 31])
def test_any_number_of_events(rng, kind, n_events, n_actions):
    """There are as many events and actions as were asked for; bytes are whole."""
    problem = draw_problem(rng, kind, n_events, n_actions=n_actions, masked=True)
    assert (n_events, n_actions) == problem.cost.shape
    assert ("keep", "recompute") == (problem.actions[0], problem.actions[-1])
    assert np.array_equal(np.rint(problem.held_bytes), problem.held_bytes)


@pytest.mark.parametrize("kind", KINDS)
def test_each_action_holds_less(rng, kind):
    """From keeping to recomputing each action holds less, and keeping alone is free."""
    problem = draw_problem(rng, kind, 12)
    assert ACTIONS == problem.actions
    assert (np.diff(problem.held_bytes, axis=1) < 0).all()
    assert not problem.cost[:, 0].any()
    assert (problem.cost[:, 1:] > 0).all()


def test_like_layers_are_equal_without_jitter(rng):
    """Exact ties come without jitter, and none with it."""
    alike = draw_problem(rng, "layers", 8, nets_by_action=False)
    unlike = draw_problem(rng, "layers", 8, jitter=0.05)
    assert len(np.unique(alike.cost, axis=0)) == 1
    assert len(np.unique(unlike.cost[:, 1])) == 8


def test_masks(rng):
    """Masks forbid something somewhere, and leave each event an action."""
    masks = [draw_problem(rng, "mixture", 12, masked=True).allowed for _ in range(8)]
    assert not np.all(masks)
    assert np.any(masks, axis=2).all()


def test_budgets_go_from_the_least_peak_to_keeping_all(rng):
    """A share of 0 is the least peak, of 1 that of the cheapest actions."""
    problem = draw_problem(rng, "stages", 12)
    least = safest_plan(problem).peak_bytes
    most = float(peak_bytes(problem, np.zeros(12, dtype=np.intp)))
    assert least == with_budget(problem, 0.0).budget_bytes
    assert most == with_budget(problem, 1.0).budget_bytes
