"""Actions as data, and the menus they are on."""

import pytest

from mimose.planners import ActionSpec, Menu
from mimose.planners.actions import EXACT_MENU, KEEP, LEAN, RECOMPUTE


def test_the_menu_in_use():
    """It begins with keeping, and ends with what holds least."""
    assert ("keep", "recompute") == EXACT_MENU.names
    assert ("keep", "recompute") == (EXACT_MENU.first, EXACT_MENU.least)
    assert frozenset() == EXACT_MENU.lossy
    assert (False, True) == (KEEP.recomputes, RECOMPUTE.recomputes)


def test_plans_in_letters():
    """Each action has a letter of its own; unknown ones have none."""
    assert "rkr" == EXACT_MENU.codes(("recompute", "keep", "recompute"))
    with pytest.raises(KeyError, match="fold"):
        EXACT_MENU.codes(("fold",))


def test_lossy_actions_are_named():
    """Those that change gradients are told apart."""
    pool = ActionSpec(name="pool", code="p", is_exact=False)
    assert frozenset({"pool"}) == Menu((KEEP, pool, RECOMPUTE)).lossy


def test_a_fine_menu():
    """One with something between holding all and the least."""
    assert not EXACT_MENU.is_fine
    assert Menu((KEEP, LEAN, RECOMPUTE)).is_fine


@pytest.mark.parametrize("code", ["", "ab"])
def test_a_code_is_a_letter(code):
    """A column has room for one."""
    with pytest.raises(ValueError, match="code must be one letter"):
        ActionSpec(name="fold", code=code)


def test_resources_are_known_ones():
    """A misspelt one is refused by name."""
    with pytest.raises(ValueError, match=r"resources of 'fold' are unknown: \['gpu'\]"):
        ActionSpec(name="fold", code="f", resources=frozenset({"gpu"}))


@pytest.mark.parametrize("other", [RECOMPUTE, ActionSpec(name="redo", code="r")])
def test_actions_of_a_menu_differ(other):
    """By name and by code."""
    with pytest.raises(ValueError, match="needs its own"):
        Menu((KEEP, RECOMPUTE, other))


def test_a_menu_is_not_empty():
    """Something has to happen to an event."""
    with pytest.raises(ValueError, match="needs an action"):
        Menu(())
