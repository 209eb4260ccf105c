"""Which actions a strategy chooses among: those of whole layers, or all exact ones."""

from __future__ import annotations

from mimose.planners import Menu
from mimose.planners.actions import EXACT_MENU, FINE_MENU
from mimose.run.actions.registry import choose, menu_of

WHOLE_LAYERS = EXACT_MENU.names
"""What Mimose and most others choose among."""
FINE = FINE_MENU.names
"""All exact actions."""
FINER = FINE[1:-1]
"""Those between the ends, from the one that holds most to the one that holds least."""


def menu_named(actions: str | tuple[str, ...]) -> Menu:
    """Return the menu of a session that is given these names, or a word for some."""
    return menu_of(choose(actions))
