"""Which actions a strategy chooses among: of whole layers, all exact ones, or all."""

from __future__ import annotations

from mimose.planners import Menu
from mimose.planners.actions import EXACT_MENU, FINE_MENU
from mimose.run.actions.registry import choose, menu_of

WHOLE_LAYERS = EXACT_MENU.names
"""What Mimose and most others choose among."""
FINE = FINE_MENU.names
"""All exact actions that stay on the device."""


def menu_named(actions: str | tuple[str, ...]) -> Menu:
    """Return the menu of a session that is given these names, or a word for some."""
    return menu_of(choose(actions))


ALL = menu_named("all").names
"""All there are, lossy ones and those of the host among them."""
BETWEEN = ALL[1:-1]
"""Those between the ends."""


def is_exact(actions: str | tuple[str, ...]) -> bool:
    """Whether a session that is given these leaves gradients as they are."""
    return not menu_named(actions).lossy
