"""Evicting where the step is full."""

import numpy as np

from mimose.planners import Eviction, lay_out


def test_it_evicts_until_the_step_fits(rng, transformer_problem, budget_between):
    """Half-way between least peak and keeping all, it keeps the budget here."""
    problem = budget_between(transformer_problem(rng, 12), 0.5)
    plan = Eviction().plan(problem)
    assert plan.peak_bytes <= problem.budget_bytes
    assert 0 < plan.actions.count("recompute") < 12


def test_it_prefers_the_stale(rng, transformer_problem, budget_between):
    """Of equal events the one that waits longest goes first."""
    problem = budget_between(transformer_problem(rng, 12), 0.9)
    plan = Eviction().plan(problem)
    evicted = [i for i, action in enumerate(plan.actions) if action == "recompute"]
    assert evicted == list(range(len(evicted)))


def test_nothing_is_evicted_that_does_not_help(rng, transformer_problem):
    """Out of reach, it stops where the events alive are all evicted."""
    import dataclasses

    problem = dataclasses.replace(transformer_problem(rng, 6), budget_bytes=1.0)
    plan = Eviction().plan(problem)
    choice = np.array([problem.actions.index(a) for a in plan.actions])
    assert lay_out(problem, choice).peak_bytes == plan.peak_bytes > 1.0
