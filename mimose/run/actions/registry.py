"""The actions there are, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from mimose.planners import Menu
from mimose.planners.actions import (
    EXACT_MENU,
    FINE_MENU,
    LEAN,
    LEAN_10,
    LEAN_50,
    LEAN_80,
)
from mimose.run.actions.base import Action
from mimose.run.actions.keep import Keep
from mimose.run.actions.lean import Lean
from mimose.run.actions.recompute import Recompute

_ACTIONS: list[Action] = [
    Keep(),
    Lean(LEAN, 0.0),
    Lean(LEAN_10, 0.1),
    Lean(LEAN_50, 0.5),
    Lean(LEAN_80, 0.8),
    Recompute(),
]
"""From the one that holds most to the one that holds least."""
_OWN = frozenset(action.spec.name for action in _ACTIONS)
_WORDS = {"exact": EXACT_MENU.names, "fine": FINE_MENU.names, "all": tuple(_OWN)}
"""Menus that have a word."""


def register(action: Action) -> None:
    """Add an action, between those that hold more and the one that holds least.

    Args:
        action: The action; its name is its own.
    """
    _ACTIONS.insert(-1, action)


def forget(action: Action) -> None:
    """Take an action out again."""
    _ACTIONS.remove(action)


def choose(actions: str | Sequence[str]) -> tuple[Action, ...]:
    """Return the actions that a session may use, the one that holds most first.

    Args:
        actions: ``"exact"`` for whole layers, kept or recomputed (and exact actions
            that were registered); ``"fine"`` for those between them as well; or names.

    Raises:
        ValueError: A name is unknown, or keeping or the least is not among them.
    """
    names = [action.spec.name for action in _ACTIONS]
    if isinstance(actions, str):
        if actions in _WORDS:
            return _own(filter(partial(_is_of, _WORDS[actions]), _ACTIONS))
        actions = (actions,)
    unknown = [name for name in actions if name not in names]
    needed = {names[0], names[-1]}
    if unknown or not needed <= set(actions):
        msg = (
            f"actions must be 'exact', 'fine', or {names[0]!r} and {names[-1]!r} with "
            f"any of {names[1:-1]!r} between them, got {tuple(actions)!r}"
        )
        raise ValueError(msg)
    return _own(action for action in _ACTIONS if action.spec.name in actions)


def _own(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return actions for one session: what they learn of its units is its own."""
    return tuple(a.anew() if isinstance(a, Lean) else a for a in actions)


def _is_of(names: Sequence[str], action: Action) -> bool:
    """Whether a menu has an action: one of its own, or a registered one."""
    spec = action.spec
    return spec.name in names or (spec.is_exact and spec.name not in _OWN)


def state_of(actions: Iterable[Action]) -> dict[str, Any]:
    """Return what a session's actions have settled on, by name, ready for JSON."""
    return {a.spec.name: a.state_dict() for a in actions if isinstance(a, Lean)}


def load_state(actions: Iterable[Action], state: Mapping[str, Any]) -> None:
    """Have a session's actions do as those of another did.

    Args:
        actions: Of one session.
        state: What `state_of` returned.
    """
    for action in actions:
        if isinstance(action, Lean):
            action.load_state_dict(state.get(action.spec.name, {}))


def menu_of(actions: Sequence[Action]) -> Menu:
    """Return what planners and the cost model need to know of actions."""
    return Menu(tuple(action.spec for action in actions))
