"""Problems for the planners' tests, by way of fixtures that hand out functions."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.problems import draw_problem
from mimose.planners import PlanningProblem, host_bytes, peak_bytes, safest_plan


def _problem(n_calls, *, actions=("keep", "recompute"), **fields):
    table = (n_calls, len(actions))
    zeros = {
        "allowed": np.ones(table, dtype=bool),
        "held_bytes": np.zeros(table),
        "forward_transient_bytes": np.zeros(table),
        "backward_transient_bytes": np.zeros(table),
        "backward_retained_bytes": np.zeros(n_calls),
        "cost": np.zeros(table),
        "gap_bytes": np.zeros(n_calls + 1),
        "gap_transient_bytes": np.zeros(n_calls + 1),
        "start_bytes": 0.0,
        "budget_bytes": float("inf"),
        "host_bytes": np.zeros(table),
        "host_budget_bytes": 0.0,
    }
    calls = fields.pop("calls", tuple(f"layer.{i}#0" for i in range(n_calls)))
    return PlanningProblem(calls=calls, actions=actions, **(zeros | fields))


def _budget_between(problem, share):
    """Put the budget between the least peak (0) and that of keeping all (1)."""
    least = safest_plan(problem).peak_bytes
    allowed = np.where(problem.allowed, problem.cost, np.inf)
    keep = float(peak_bytes(problem, allowed.argmin(axis=1)))
    return replace(problem, budget_bytes=least + share * max(keep - least, 0.0))


def _random(rng, n_calls, n_actions=2, *, host=False):
    """Anything a problem may be: signed bytes, forbidden actions, no order."""
    names = ("keep", "recompute", "offload", "selective")[:n_actions]
    table = (n_calls, n_actions)

    def whole(*shape, low=0):
        return rng.integers(low, 1000, shape).astype(float)

    allowed = rng.random(table) < 0.8
    allowed[:, 0] |= ~allowed.any(axis=1)
    cost = whole(*table)
    cost[:, 0] = 0
    host_need = np.zeros(table)
    if host and n_actions > 2:
        host_need[:, 2] = whole(n_calls)
    held = whole(*table)
    if host and n_actions > 2:
        held[:, 2] -= whole(n_calls)  # the input waits on the host, too
    return _problem(
        n_calls,
        actions=names,
        allowed=allowed,
        held_bytes=held,
        forward_transient_bytes=whole(*table),
        backward_transient_bytes=whole(*table),
        backward_retained_bytes=whole(n_calls, low=-500),
        cost=cost,
        gap_bytes=whole(n_calls + 1, low=-500),
        gap_transient_bytes=whole(n_calls + 1),
        start_bytes=5000.0,
        host_bytes=host_need,
        # Enough for calls that may only be offloaded, and for some more.
        host_budget_bytes=float(
            np.where(allowed, host_need, np.inf).min(axis=1).sum()
            + host_need.sum() * rng.uniform(0, 0.3)
        ),
    )


def _whole_menu(rng, kind, n_calls, **options):
    """Measured layers that may also pool or offload some of what they hold."""
    made = draw_problem(rng, kind, n_calls, **options)
    left = (made.held_bytes[:, 0] - made.held_bytes[:, -1])[:, None]
    packed = np.rint(left * rng.uniform([0.2, 0.8], [0.7, 1.0]))
    beyond_keep = {
        "allowed": False,
        "held_bytes": -packed,
        "forward_transient_bytes": 0,
        "backward_transient_bytes": packed,
        "host_bytes": packed * [0, 1],
        "cost": made.cost[:, -1:] * rng.uniform([0, 0], [0.3, 1.2]),
    }
    tables = {}
    for name, more in beyond_keep.items():
        table = getattr(made, name)
        tables[name] = np.insert(table, [4, 4], table[:, :1] + more, axis=1)
    return replace(
        made,
        actions=(*made.actions[:4], "pool", "offload", "recompute"),
        lossy=frozenset({"pool"}),
        **tables,
    )


def _every_choice(problem):
    """All (N, C) choices that are allowed and keep the host budget."""
    options = [row.nonzero()[0] for row in problem.allowed]
    choices = np.array(list(itertools.product(*options)), dtype=np.intp)
    choices = choices.reshape(math.prod(map(len, options)), len(options))
    return choices[host_bytes(problem, choices) <= problem.host_budget_bytes]


def _cheapest(problem):
    choices = _every_choice(problem)
    fits = peak_bytes(problem, choices) <= problem.budget_bytes
    costs = problem.cost[np.arange(len(problem.calls)), choices].sum(axis=1)
    return costs[fits].min()


@pytest.fixture(scope="session")
def make():
    """Functions that make problems, and list or judge the choices of small ones."""
    return SimpleNamespace(
        problem=_problem,  # of C calls: fields not given are zero, the budget infinite
        random=_random,  # arbitrary whole numbers
        measured=draw_problem,  # the proportions of measured layers
        whole_menu=_whole_menu,  # seven actions: finer ones, a lossy one, the host
        between=_budget_between,  # the budget is a share of the way to keeping all
        choices=_every_choice,  # all that are allowed
        cheapest=_cheapest,  # the least cost of all choices within the budgets
    )


@pytest.fixture
def rng():
    """A generator with a fixed seed."""
    return np.random.default_rng(20240229)
