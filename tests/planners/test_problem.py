"""What a problem checks at the door, and what is named: actions, planners, errors."""

import re

import numpy as np
import pytest

from mimose.planners import InfeasibleBudgetError, Search, make_planner

ARRAYS = {
    "allowed": (3, 2),
    "held_bytes": (3, 2),
    "forward_transient_bytes": (3, 2),
    "backward_transient_bytes": (3, 2),
    "backward_retained_bytes": (3,),
    "cost": (3, 2),
    "gap_bytes": (4,),
    "gap_transient_bytes": (4,),
    "host_bytes": (3, 2),
}
HOLDERS = {"activations held": 2.0**29, "held at start": 2.0**31}
SIGNED = {"held_bytes", "backward_retained_bytes", "cost", "gap_bytes"}


@pytest.mark.parametrize("field", ARRAYS)
def test_arrays(make, field):
    """Shape, numbers and sign are checked; changes and costs may be negative."""
    shape = ARRAYS[field]
    with pytest.raises(ValueError, match=rf"{field} .*{re.escape(str(shape))}"):
        make.problem(3, **{field: np.zeros((5, 5))})
    if field == "allowed":
        return
    for value in (float("nan"), float("inf")):
        array = np.zeros(shape)
        array.flat[-1] = value
        with pytest.raises(ValueError, match=rf"{field} .*{value}"):
            make.problem(3, **{field: array})
    negative = np.full(shape, -1.0)
    if field in SIGNED:
        make.problem(3, **{field: negative})
        return
    with pytest.raises(ValueError, match=rf"{field} .*-1"):
        make.problem(3, **{field: negative})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"actions": ("recompute", "keep")}, "'keep'"),
        ({"allowed": np.array([[True, True], [False, False]])}, r"'layer.1#0'"),
    ],
)
def test_refused(make, fields, expected):
    """What cannot be planned is refused, and named."""
    with pytest.raises(ValueError, match=expected):
        make.problem(2, **fields)


@pytest.mark.parametrize(
    "name", ["auto", "every-12", "full", "greedy", "none", "optimal"]
)
def test_planners_by_name(name):
    """Each name makes its planner; a planner is handed back as it is."""
    made = make_planner(name)
    assert name == made.name
    assert made is make_planner(made)


def test_not_planners():
    """An unknown name is echoed beside the known ones; a class is no planner."""
    for name in ("", "best", "every-0", "every-K", "Full"):
        with pytest.raises(ValueError, match="auto, full, greedy") as caught:
            make_planner(name)
        assert repr(name) in str(caught.value)
    for thing in (None, 3, Search):
        with pytest.raises(TypeError, match="planner"):
            make_planner(thing)


def test_infeasible_budget_error():
    """It says the numbers, and what holds most first."""
    said = str(InfeasibleBudgetError(2.0**31, 2.5 * 2**30, HOLDERS))
    assert all(number in said for number in ("2.00 GiB", "2.50 GiB", "512.0 MiB"))
    assert said.index("held at start: 2.00") < said.index("activations held: 512")
    assert "Held at" not in str(InfeasibleBudgetError(1.0, 2.0, {}))
