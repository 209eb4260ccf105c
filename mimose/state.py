"""Saved state, and the checks before it is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mimose.exceptions import StateMismatchError

VERSION = 12
"""Version of the format. Other versions are refused: a few steps learn the same."""

_DIGEST = "digest"
_REHEARSED = "rehearsed: "
"""Begins the device of a state that was learned on a simulated card."""


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as JSON would return it, with a digest of its content.

    `torch.load` with `weights_only=True` reads dicts, lists, texts and numbers, but not
    named tuples.

    Args:
        state: What the parts of a session returned.
    """
    found = json.loads(json.dumps(state))
    return {**found, _DIGEST: _digest(found)}


def rehearsed(state: Mapping[str, Any], card: str) -> dict[str, Any]:
    """Return the state of a session on a simulated card for one on the card itself.

    Bytes hold there. Seconds, the safety margin and what fragmentation costs are the
    card's to show, and its first plans are tried step by step.

    Args:
        state: What `sealed` returned.
        card: The card's name.
    """
    policy = {**state["policy"], "stages": dict.fromkeys(state["policy"]["stages"], 0)}
    del policy["margin"]
    own = {name: part for name, part in state.items() if name != _DIGEST}
    own |= {"of": {**state["of"], "device": _REHEARSED + card}, "policy": policy}
    return sealed({**own, "memory_limit": {}, "seconds": {}})


def rehearsed_on(state: Mapping[str, Any], device: str) -> str:
    """Return on which card a state was rehearsed, in words; "" if on none.

    Args:
        state: The state.
        device: `device_name` of the session that loads it.
    """
    name = str(state["of"]["device"])
    if not name.startswith(_REHEARSED):
        return ""
    card = name.removeprefix(_REHEARSED)
    there = f"learned in a rehearsal on {card}"
    if device.startswith("cuda: ") and card not in device.lower().replace(" ", ""):
        there += (
            f", and this is {device.removeprefix('cuda: ')}: its kernels may hold "
            f"other bytes, which the first plans check"
        )
    return there


def raise_if_damaged(state: Mapping[str, Any]) -> None:
    """Make sure that a state is as it was saved.

    Changed numbers would be trusted, and a later step would fail.

    Args:
        state: What `sealed` returned, also after a way through a file.

    Raises:
        StateMismatchError: A part is missing or changed.
    """
    try:
        is_whole = state.get(_DIGEST) == _digest(state)
    except (TypeError, ValueError, RecursionError):  # it is not JSON
        is_whole = False
    if not is_whole:
        msg = (
            "the state is damaged: it differs from what Session.state_dict() returned. "
            "Train without it; a few steps learn the same"
        )
        raise StateMismatchError(msg)


def _digest(state: Mapping[str, Any]) -> str:
    own = {name: value for name, value in state.items() if name != _DIGEST}
    numbers = json.loads(json.dumps(own), parse_int=float)  # 1 is 1.0 in some files
    text = json.dumps(numbers, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def raise_if_of_another(state: object, mine: Mapping[str, Any]) -> None:
    """Make sure that a state belongs to this model and setting.

    Args:
        state: The state; its part ``"of"`` is the description with which it was saved.
        mine: The description of this session.

    Raises:
        StateMismatchError: They differ; the message names the first difference.
    """
    saved = state.get("of") if isinstance(state, Mapping) else None
    if not isinstance(saved, Mapping) or "version" not in saved:
        msg = "the state is not one that Session.state_dict() returned"
        raise StateMismatchError(msg)
    there, here = dict(_flat("", saved)), dict(_flat("", mine))
    if str(there.get("device")).startswith(_REHEARSED):
        there["device"] = here["device"]
        for side in (there, here):  # 2.13.0+cpu rehearses for 2.13.0+cu130
            name = "settings: torch"
            side[name] = str(side.get(name)).partition("+")[0]
    for name in {**here, **there}:
        one, other = there.get(name, "missing"), here.get(name, "missing")
        if one != other:
            msg = (
                f"the state was saved with another {name}: {one!r} there, {other!r} "
                f"here. Train without it; a few steps learn the same"
            )
            raise StateMismatchError(msg)


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the values in nested mappings and lists, with their paths."""
    if isinstance(value, Mapping):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))
    else:
        yield name, value
        return
    for key, each in inside:
        yield from _flat(f"{name}: {key}" if name else str(key), each)


def card_name(device: torch.device) -> str:
    """Return a device's own name; "" where it has none."""
    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", None)
    return "" if name is None else str(name(device))


def device_name(device: torch.device) -> str:
    """Return the kind of device, without its index."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return device.type
