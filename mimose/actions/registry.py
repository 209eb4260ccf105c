"""The actions there are, by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mimose.actions import compress
from mimose.actions.base import Action
from mimose.actions.hooks import SavedTensorAction
from mimose.actions.host import Host
from mimose.actions.keep import Keep
from mimose.actions.offload import OFFLOADS, OffloadInput
from mimose.actions.recompute import Recompute
from mimose.actions.selective import Selective
from mimose.planners import Menu
from mimose.planners.actions import (
    EXACT_MENU,
    SELECTIVE,
)

_ACTIONS: list[Action] = [
    Keep(),
    Selective(SELECTIVE),
    *compress.ACTIONS,
    *OFFLOADS,
    Recompute(),
]
"""Keeping first; last what runs where nothing is known."""
_WHOLE = frozenset(EXACT_MENU.names)
_ALL = frozenset(action.spec.name for action in _ACTIONS)
_WORDS = {"auto": _WHOLE, "whole": _WHOLE, "all": _ALL}
"""Menus that have a word."""


def choose(
    actions: str | Sequence[str], host: Host | None = None
) -> tuple[Action, ...]:
    """Return the actions that a session may use, the one that keeps first.

    Args:
        actions: ``"auto"`` and ``"whole"`` for whole layers, kept or recomputed;
            ``"all"`` for all there are, lossy ones among them; or names of some beside
            keeping and recomputing.
        host: Holds the session's storages on the host; None where the model is there
            itself.

    Raises:
        ValueError: A name is unknown, or needs a host that is not there.
    """
    chosen = _named(actions)
    if isinstance(actions, str) and actions in _WORDS:
        return _own((a for a in chosen if _is_possible(a, host)), host)
    asked = {actions} if isinstance(actions, str) else set(actions)
    if asked - {action.spec.name for action in chosen}:
        raise _not_actions(actions)
    elsewhere = [a.spec.name for a in chosen if not _is_possible(a, host)]
    if elsewhere:
        msg = (
            f"actions {elsewhere!r} move tensors from an accelerator to the host, but "
            f"this model is on the host itself: leave them out"
        )
        raise ValueError(msg)
    return _own(chosen, host)


def need_host(actions: str | Sequence[str]) -> bool:
    """Whether any of the actions that `choose` is asked for holds tensors there."""
    return any(action.spec.needs_host for action in _named(actions))


def _named(actions: str | Sequence[str]) -> list[Action]:
    """Return the actions of a word, or those of names as far as they are known."""
    if isinstance(actions, str) and actions in _WORDS:
        return [a for a in _ACTIONS if a.spec.name in _WORDS[actions]]
    if not isinstance(actions, Iterable):  # None, say
        raise _not_actions(actions)
    names = {*_WHOLE, *((actions,) if isinstance(actions, str) else actions)}
    return [action for action in _ACTIONS if action.spec.name in names]


def _not_actions(given: object) -> ValueError:
    names = [action.spec.name for action in _ACTIONS]
    renamed = "; 'lean' is called 'selective' now" if "lean" in repr(given) else ""
    return ValueError(
        f"actions must be 'auto', 'whole', 'all', or names out of {names!r}, got "
        f"{given!r}{renamed}"
    )


def _own(actions: Iterable[Action], host: Host | None) -> tuple[Action, ...]:
    """Return actions for one session: what they learn of its layers is its own."""
    own = (Selective, SavedTensorAction, OffloadInput)
    return tuple(a.anew(host) if isinstance(a, own) else a for a in actions)


def _is_possible(action: Action, host: Host | None) -> bool:
    """Whether a session has all that an action needs."""
    return host is not None or not action.spec.needs_host


def menu_of(actions: Sequence[Action]) -> Menu:
    """Return what planners and the cost model need to know of actions."""
    return Menu(tuple(action.spec for action in actions))
