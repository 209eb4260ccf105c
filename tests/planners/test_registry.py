"""Planners by name, and the package's names."""

import subprocess
import sys

import pytest

import mimose.planners
from mimose.planners import (
    EveryK,
    Full,
    Greedy,
    Marginal,
    NoPlan,
    Optimal,
    Static,
    make_planner,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("auto", Marginal()),
        ("every-1", EveryK(1)),
        ("every-12", EveryK(12)),
        ("full", Full()),
        ("greedy", Greedy()),
        ("greedy-released", Greedy(largest=False)),
        ("marginal", Marginal()),
        ("none", NoPlan()),
        ("optimal", Optimal()),
    ],
)
def test_names(name, expected):
    """Each name makes its planner."""
    assert expected == make_planner(name)
    assert name in ("auto", make_planner(name).name)


def test_planners_pass_through():
    """A planner is handed back as it is."""
    planner = Static(shape={})
    assert planner is make_planner(planner)


@pytest.mark.parametrize("name", ["", "best", "every-0", "every-", "every-K", "Full"])
def test_unknown_names(name):
    """An unknown name is echoed, and the known ones are listed."""
    with pytest.raises(ValueError, match="no planner is called") as caught:
        make_planner(name)
    assert repr(name) in str(caught.value)
    assert "auto, eviction, full, greedy" in str(caught.value)


@pytest.mark.parametrize("thing", [None, 3, Marginal])
def test_not_a_planner(thing):
    """Neither a number nor a class is a planner."""
    with pytest.raises(TypeError, match="planner must be a name or have name"):
        make_planner(thing)


def test_exported_names():
    """The list of names is sorted, and every name is there."""
    names = mimose.planners.__all__
    assert sorted(names) == names
    assert all(hasattr(mimose.planners, name) for name in names)


def test_does_not_import_torch():
    """Planning needs numpy and scipy only."""
    code = (
        "import sys, mimose.planners; "
        "sys.exit(any(name.split('.')[0] == 'torch' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
