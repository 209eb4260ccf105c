"""All actions by name."""

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
"""Keep is first; the last one is used for unknown shapes."""
_WHOLE = frozenset(EXACT_MENU.names)
_ALL = frozenset(action.spec.name for action in _ACTIONS)
_WORDS = {"auto": _WHOLE, "whole": _WHOLE, "all": _ALL}
"""Menus with a name."""


def choose(
    actions: str | Sequence[str], host: Host | None = None
) -> tuple[Action, ...]:
    """Return the actions that a session may use, `keep` first.

    Args:
        actions: ``"auto"`` or ``"whole"`` to keep or recompute whole layers; ``"all"``
            for all actions, lossy ones too; or names of some, to which `keep` and
            `recompute` are added.
        host: Holds the session's storages on the host; None if the model itself is on
            the host.

    Raises:
        ValueError: A name is unknown, or an action needs a host and there is none.
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
    """Whether any of these actions, as for `choose`, holds tensors on the host."""
    return any(action.spec.needs_host for action in _named(actions))


def _named(actions: str | Sequence[str]) -> list[Action]:
    """Return the actions of a menu, or those of the known names."""
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
    """Return actions for one session, separate because they learn about its layers."""
    own = (Selective, SavedTensorAction, OffloadInput)
    return tuple(a.anew(host) if isinstance(a, own) else a for a in actions)


def _is_possible(action: Action, host: Host | None) -> bool:
    """Whether a session has what an action needs."""
    return host is not None or not action.spec.needs_host


def menu_of(actions: Sequence[Action]) -> Menu:
    """Return the actions' specs, for planners and the cost model."""
    return Menu(tuple(action.spec for action in actions))
