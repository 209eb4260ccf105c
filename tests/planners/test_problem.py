"""The problem checks its fields once, at the door."""

import dataclasses

import numpy as np
import pytest

from mimose.planners import Plan, PlanningProblem

ARRAYS = {
    "allowed": (3, 2),
    "held_bytes": (3, 2),
    "forward_excess_bytes": (3, 2),
    "backward_excess_bytes": (3, 2),
    "backward_net_bytes": (3, 2),
    "cost": (3, 2),
    "gap_bytes": (4,),
    "gap_excess_bytes": (4,),
    "host_bytes": (3, 2),
    "transfer_seconds": (3, 2),
}
SIGNED = {"backward_net_bytes", "cost", "gap_bytes"}


@pytest.mark.parametrize("field", ARRAYS)
def test_shape(make_problem, field):
    """An array of another shape is refused, with both shapes."""
    expected = str(ARRAYS[field]).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=rf"{field} must have shape {expected}, got"):
        make_problem(3, **{field: np.zeros((5, 5))})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("field", sorted(set(ARRAYS) - {"allowed"}))
def test_finite(make_problem, field, value):
    """A number that is not finite is refused wherever it stands."""
    array = np.zeros(ARRAYS[field])
    array.flat[-1] = value
    with pytest.raises(ValueError, match=rf"{field} must be finite, got \[{value}"):
        make_problem(3, **{field: array})


@pytest.mark.parametrize("field", sorted(set(ARRAYS) - {"allowed"}))
def test_sign(make_problem, field):
    """Held bytes and excesses cannot be negative; nets and costs can."""
    array = np.full(ARRAYS[field], -1.0)
    if field in SIGNED:
        make_problem(3, **{field: array})
        return
    with pytest.raises(ValueError, match=rf"{field} must not be negative, got -1"):
        make_problem(3, **{field: array})


@pytest.mark.parametrize(
    "field", ["start_bytes", "optimizer_state_bytes", "step_excess_bytes"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_number(make_problem, field, value):
    """Single numbers must be finite and not negative."""
    with pytest.raises(ValueError, match=f"{field} must be finite and not negative"):
        make_problem(3, **{field: value})


@pytest.mark.parametrize("field", ["budget_bytes", "host_budget_bytes"])
def test_budget(make_problem, field):
    """A budget may be infinite, but neither negative nor unknown."""
    assert float("inf") == getattr(make_problem(3, **{field: float("inf")}), field)
    for value in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"{field} must be a number that is not"):
            make_problem(3, **{field: value})


def test_keep_comes_first(make_problem):
    """The first action is to keep."""
    with pytest.raises(ValueError, match="actions must begin with 'keep'"):
        make_problem(1, actions=("recompute", "keep"))


def test_names_are_distinct(make_problem):
    """An event that appears twice is named."""
    with pytest.raises(ValueError, match=r"events must be distinct, got \['a#0'\]"):
        make_problem(3, events=("a#0", "b#0", "a#0"))


def test_every_event_has_an_action(make_problem):
    """An event without an allowed action is named."""
    allowed = np.array([[True, True], [False, False]])
    with pytest.raises(ValueError, match=r"none for 'layer.1#0'"):
        make_problem(2, allowed=allowed)


def test_host_budget_can_be_kept(make_problem):
    """A host budget that no choice keeps is refused, with what is needed."""
    with pytest.raises(ValueError, match=r"host_budget_bytes must be at least 5.0"):
        make_problem(
            1,
            allowed=np.array([[False, True]]),
            host_bytes=np.array([[0.0, 5.0]]),
            host_budget_bytes=4.0,
        )


def test_nets_may_be_told_once_for_all_actions(make_problem):
    """A number an event is that of each of its actions."""
    problem = make_problem(2, backward_net_bytes=[3, -4])
    assert [[3.0, 3.0], [-4.0, -4.0]] == problem.backward_net_bytes.tolist()


def test_transfers_may_be_left_out(make_problem):
    """Most actions copy nothing."""
    assert [[0.0, 0.0]] == make_problem(1).transfer_seconds.tolist()


def test_plain_values_are_accepted(make_problem):
    """Lists and integers become arrays and floats of double precision."""
    problem = make_problem(1, cost=[[0, 3]], start_bytes=7)
    assert np.float64 == problem.cost.dtype
    assert isinstance(problem.start_bytes, float)


def test_problem_is_frozen(make_problem):
    """Fields cannot be set afterwards, and have no default."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_problem(1).budget_bytes = 3.0
    with pytest.raises(TypeError, match="missing"):
        PlanningProblem(events=())


def test_plan_is_a_value():
    """Plans with equal fields are equal and can be keys."""
    fields = {
        "actions": ("keep",),
        "peak_bytes": 2.0,
        "growth_bytes": 1.0,
        "extra_cost": 0.0,
        "binding_segments": ("head",),
        "planner": "none",
        "optimal": False,
    }
    assert {Plan(**fields)} == {Plan(**fields), Plan(**fields)}
