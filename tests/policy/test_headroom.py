"""What a plan leaves free around calls whose tensors are on the host."""

import numpy as np
import pytest

from mimose.cost.growth import Growth
from mimose.planners import Plan, PlanningProblem
from mimose.policy.headroom import headrooms

N = 4
NAMES = ("keep", "offload", "recompute")


@pytest.fixture
def problem():
    """Four events that hold 10 each if kept and nothing on the host."""
    ones, row = np.ones((N, 3)), np.zeros(N)
    held = np.tile([10.0, 0.0, 2.0], (N, 1))
    return PlanningProblem(
        events=tuple(f"layer.{at}" for at in range(N)),
        actions=NAMES,
        allowed=ones.astype(bool),
        held_bytes=held,
        forward_excess_bytes=12.0 * ones,
        backward_excess_bytes=np.tile([[4.0], [4.0], [20.0], [4.0]], (1, 3)),
        backward_net_bytes=row,
        cost=np.tile([0.0, 1.0, 2.0], (N, 1)),
        gap_bytes=np.zeros(N + 1),
        gap_excess_bytes=np.array([0.0, 0.0, 0.0, 0.0, 3.0]),
        start_bytes=100.0,
        optimizer_state_bytes=0.0,
        step_excess_bytes=0.0,
        budget_bytes=1000.0,
        host_bytes=10.0 * ones,
        host_budget_bytes=1000.0,
    )


def _plan(*codes):
    actions = tuple(NAMES["kor".index(code)] for code in codes)
    return Plan(
        actions=actions,
        peak_bytes=0.0,
        growth_bytes=0.0,
        extra_cost=1.0,
        binding_segments=(),
        planner="test",
        optimal=False,
    )


def test_each_segment_between_two_counts(problem):
    """Forwards up to the next one's; backwards from the next one's to its own."""
    found = headrooms(problem, _plan(*"okok"), Growth(50.0, 50.0), 0.0, {"offload"})
    # Levels over the start at the forwards' beginnings: 0, 0, 10, 10; each rises by 12.
    # The last one's copy may last through the head (20 + 3) and the last event's
    # backward (20 + 4), until its own (20, 10 held by then, rises by 20).
    assert {0: (28.0, 20.0), 2: (20.0, 20.0)} == found
