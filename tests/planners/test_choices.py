"""Choices that take no search."""

import numpy as np

from mimose.planners.choices import keep_choice, least_choice, without_lossy


def problem_of(make_problem, allowed, **fields):
    """Actions of all kinds; what each event may run under."""
    return make_problem(
        len(allowed),
        actions=("keep", "lean", "pool", "offload", "recompute"),
        allowed=np.array(allowed, dtype=bool),
        lossy=frozenset({"pool"}),
        host_bytes=np.array([[0.0, 0.0, 0.0, 8.0, 0.0]] * len(allowed)),
        **{"host_budget_bytes": 100.0, **fields},
    )


def test_least_choice(make_problem):
    """The last; else what is exact and stays on the device; else exact; else any."""
    problem = problem_of(
        make_problem,
        [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [0, 0, 1, 1, 0], [0, 0, 1, 0, 0]],
    )
    assert [4, 1, 3, 2] == least_choice(problem).tolist()
    assert [0, 0, 3, 2] == keep_choice(problem).tolist()


def test_without_lossy(make_problem):
    """Forbidden where there is another; None where nothing changes by it."""
    left = without_lossy(problem_of(make_problem, [[1, 1, 1, 1, 1], [0, 0, 1, 0, 0]]))
    assert [False, True] == left.allowed[:, 2].tolist()
    assert without_lossy(problem_of(make_problem, [[1, 1, 0, 1, 1]])) is None
    needs_host = problem_of(make_problem, [[0, 0, 1, 1, 0]], host_budget_bytes=7.0)
    assert without_lossy(needs_host) is None
