"""Which actions a strategy chooses among: those of whole layers, or all exact ones.

Actions are looked up by name where a session finds them, so that one which is not there
yet makes a strategy a row that says so, and is taken up the day it is.
"""

from __future__ import annotations

from mimose.planners import Menu
from mimose.planners.actions import FINE_MENU
from mimose.run.actions.registry import choose, menu_of

WHOLE_LAYERS = ("keep", "recompute")
"""What Mimose and most others choose among."""
FINER = FINE_MENU.names[1:-1]
"""Exact actions between those, from the one that holds most to the one that holds
least."""


def is_known(action: str) -> bool:
    """Whether a session can run layers under an action."""
    first, last = WHOLE_LAYERS
    try:
        choose((first, action, last))
    except ValueError:
        return False
    return True


def whole_menu() -> tuple[str, ...]:
    """Return the names of all exact actions that there are."""
    first, last = WHOLE_LAYERS
    return (first, *filter(is_known, FINER), last)


def menu_named(actions: str | tuple[str, ...]) -> Menu:
    """Return the menu of a session that is given these names, or a word for some."""
    return menu_of(choose(actions))


def why_unknown(action: str) -> str:
    """Return why layers cannot run under an action; nothing if they can."""
    return "" if is_known(action) else f"there is no action {action!r} in this version"
