"""What events do of which no plan speaks: a baseline's actions, or the least's."""

from __future__ import annotations

from collections.abc import Callable

from mimose.exceptions import MimoseError
from mimose.planners import Menu

ActionAt = Callable[[int], str]
"""Returns the action of an event, by its position."""


class Unplanned:
    """The actions of the events of a step without a plan, as they run.

    Args:
        menu: The actions in use.
        action_at: A baseline's; None where plans are made.
    """

    def __init__(self, menu: Menu, action_at: ActionAt | None) -> None:
        self._menu = menu
        self._action_at = action_at
        self._keeps_some = False
        self.actions: list[str] = []
        """Of the events that have run."""

    def next(self, index: int) -> str:
        """Return the action of the next event, and take note of it."""
        action = self._menu.least if self._action_at is None else self._action_at(index)
        if action not in self._menu.names:
            msg = (
                f"the planner's action_at({index}) returned {action!r}; the actions in "
                f"use are {', '.join(self._menu.names)}"
            )
            raise MimoseError(msg)
        self._keeps_some = self._keeps_some or action == self._menu.first
        self.actions.append(action)
        return action

    def make_safest(self) -> None:
        """Begin anew, and recompute everything."""
        self._action_at, self._keeps_some = None, False
        self.actions.clear()

    @property
    def keeps_some(self) -> bool:
        """Whether a baseline has kept an event."""
        return self._keeps_some
