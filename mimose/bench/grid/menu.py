"""Which actions a strategy chooses among: of whole layers, all exact ones, or all."""

from __future__ import annotations

from mimose.planners import Menu
from mimose.planners.actions import (
    EXACT_MENU,
    FINE_MENU,
    OFFLOAD,
    OFFLOAD_INPUT,
    POOL,
    POOL_4,
    QUANTIZE,
    QUANTIZE_4,
)
from mimose.run.actions.registry import choose, menu_of

WHOLE_LAYERS = EXACT_MENU.names
"""What Mimose and most others choose among."""
FINE = FINE_MENU.names
"""All exact actions that stay on the device."""
ALL_MENU = Menu(
    (
        *FINE_MENU.specs[:-1],
        *(POOL, POOL_4, QUANTIZE, QUANTIZE_4, OFFLOAD, OFFLOAD_INPUT),
        FINE_MENU.specs[-1],
    )
)
"""Lossy actions, too, and those of the host; a model on a CPU does without these."""
ALL = ALL_MENU.names
BETWEEN = ALL[1:-1]
"""Those between the ends."""
EVERYTHING = "all"
"""What a session is given that may choose among all that its device allows."""


def menu_named(actions: str | tuple[str, ...]) -> Menu:
    """Return the menu of a session that is given these names, or a word for some."""
    if actions == EVERYTHING:
        return ALL_MENU
    if isinstance(actions, tuple):
        return Menu(tuple(spec for spec in ALL_MENU.specs if spec.name in actions))
    return menu_of(choose(actions))
