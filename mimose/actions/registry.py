"""All actions by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from mimose.actions.base import Action
from mimose.actions.compress import CODECS
from mimose.actions.hooks import SavedTensorAction
from mimose.actions.host import Host, HostCall
from mimose.actions.keep import Keep
from mimose.actions.offload import OffloadInput
from mimose.actions.recompute import Recompute
from mimose.actions.selective import Points, Selective
from mimose.cost.prices import Prices
from mimose.planners import ActionSpec, Menu
from mimose.planners.actions import (
    EXACT_MENU,
    KEEP,
    OFFLOAD,
    OFFLOAD_INPUT,
    REBUILDING,
    RECOMPUTE,
)

_SPECS = (KEEP, *REBUILDING, *CODECS, OFFLOAD, OFFLOAD_INPUT, RECOMPUTE)
"""Keep is first; the last one is used for unknown shapes."""
_NAMES = [spec.name for spec in _SPECS]
_WORDS = {
    "auto": EXACT_MENU.names,
    "whole": EXACT_MENU.names,
    "selective": [spec.name for spec in REBUILDING],
    "all": _NAMES,
}
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
    specs = _named(actions)
    elsewhere = [spec.name for spec in specs if spec.needs_host and host is None]
    if elsewhere and actions != "all":
        msg = (
            f"actions {elsewhere!r} move tensors from an accelerator to the host, but "
            f"this model is on the host itself: leave them out"
        )
        raise ValueError(msg)
    points = Points()
    return tuple(_made(s, host, points) for s in specs if s.name not in elsewhere)


def need_host(actions: str | Sequence[str]) -> bool:
    """Whether any of these actions, as for `choose`, holds tensors on the host."""
    return any(spec.needs_host for spec in _named(actions))


def _named(actions: str | Sequence[str]) -> list[ActionSpec]:
    """Return the actions of a menu, or those of the given names and the exact ones."""
    asked = _WORDS.get(actions, [actions]) if isinstance(actions, str) else actions
    if not isinstance(asked, Iterable) or {*asked} - {*_NAMES}:
        msg = (
            f"actions must be 'auto', 'whole', 'all', or names out of {_NAMES!r}, got "
            f"{actions!r}"
        )
        raise ValueError(msg)
    return [spec for spec in _SPECS if spec.name in {*EXACT_MENU.names, *asked}]


def _made(spec: ActionSpec, host: Host | None, points: Points) -> Action:
    """Return an action for one session, about whose layers it learns."""
    if spec in CODECS:
        return SavedTensorAction(spec, CODECS[spec]())
    if spec is OFFLOAD and host is not None:
        return SavedTensorAction(spec, partial(HostCall, host))
    if spec is OFFLOAD_INPUT and host is not None:
        return OffloadInput(host)
    if spec in REBUILDING:
        return Selective(spec, points)
    return Keep() if spec is KEEP else Recompute()


def points_of(actions: Sequence[Action]) -> Points | None:
    """Return what the selective ones of some actions share; None without any."""
    found = (action.points for action in actions if isinstance(action, Selective))
    return next(found, None)


def set_prices_and_checks(
    actions: Sequence[Action], prices: Prices, checks: str
) -> None:
    """Set how actions weigh what runs again, and what they compare.

    Args:
        actions: The actions of a session.
        prices: What moving a byte costs.
        checks: As for `mimose.attach`.
    """
    points = points_of(actions)
    if points is not None:
        points.prices, points.checks_all = prices, checks == "all"


def menu_of(actions: Sequence[Action]) -> Menu:
    """Return the actions' specs, for planners and the cost model."""
    return Menu(tuple(action.spec for action in actions))
