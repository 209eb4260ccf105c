"""What events do of which no plan speaks: a baseline's actions, or the least's."""

from __future__ import annotations

from collections.abc import Callable

from mimose.types import KEEP, RECOMPUTE

ActionAt = Callable[[int], str]
"""Returns the action of an event, by its position."""


class Unplanned:
    """The actions of the events of a step without a plan, as they run.

    Args:
        action_at: A baseline's; None where plans are made.
    """

    def __init__(self, action_at: ActionAt | None) -> None:
        self._action_at = action_at
        self.actions: list[str] = []
        """Of the events that have run."""

    def next(self, index: int) -> str:
        """Return the action of the next event, and take note of it."""
        action = RECOMPUTE if self._action_at is None else self._action_at(index)
        self.actions.append(action)
        return action

    def make_safest(self) -> None:
        """Begin anew, and recompute everything."""
        self._action_at = None
        self.actions.clear()

    @property
    def keeps_some(self) -> bool:
        """Whether a baseline keeps events."""
        at = self._action_at
        return at is not None and KEEP in (at(0), at(1))
