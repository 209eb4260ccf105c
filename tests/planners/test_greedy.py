"""The greedy planner does what was published."""

from dataclasses import replace

import numpy as np
import pytest

from mimose.planners import Greedy

# Sizes of calls, and bytes missing.
MIXED = ((100, 100, 50, 50, 25, 25), 260.0)
HALVING = ((256,) * 2 + (128,) * 4 + (64,) * 6 + (32,) * 2, 600.0)


@pytest.fixture
def sized(make):
    """Make a problem of calls that hold these sizes, with so much missing."""

    def with_sizes(sizes, missing, **fields):
        held = np.stack([np.array(sizes, dtype=float), np.zeros(len(sizes))], axis=1)
        cost = np.stack([np.zeros(len(sizes)), np.ones(len(sizes))], axis=1)
        return make.problem(
            len(sizes),
            held_bytes=held,
            cost=cost,
            start_bytes=1000.0,
            budget_bytes=1000.0 + sum(sizes) - missing,
            **fields,
        )

    return with_sizes


def recomputed(planner, problem):
    """Positions of the recomputed calls."""
    actions = planner.plan(problem).actions
    return [i for i, action in enumerate(actions) if action == "recompute"]


@pytest.mark.parametrize(
    ("case", "n_calls", "freed"), [(MIXED, 4, 275), (HALVING, 3, 640)]
)
def test_published(sized, case, n_calls, freed):
    """Algorithm 1 takes the largest until one call covers what is missing."""
    sizes, missing = case
    taken = recomputed(Greedy(), sized(sizes, missing))
    assert n_calls == len(taken)
    assert freed == sum(sizes[i] for i in taken)


def test_counts_what_recomputation_still_holds(sized):
    """Freed is what a call holds less its output."""
    problem = sized((100, 100), 95.0)
    held = problem.held_bytes.copy()
    held[:, 1] = 10.0
    assert recomputed(Greedy(), replace(problem, held_bytes=held)) == [0, 1]


def test_does_not_see_the_peak(sized):
    """The sum fits, the timeline does not, and the plan says so."""
    problem = sized((10, 10), 0.0, gap_transient_bytes=np.array([0, 0, 500.0]))
    plan = Greedy().plan(problem)
    assert plan.actions == ("keep", "keep")
    assert plan.peak_bytes > problem.budget_bytes
