"""Saved state: what it is made of, whose it is, and whether it may be loaded here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mimose.exceptions import StateMismatchError

VERSION = 7
"""Of the format. Another one is refused: learning anew takes ten steps."""

_DIGEST = "digest"


def describe(
    name: str,
    model: nn.Module,
    device: torch.device,
    layers: Sequence[str],
    shares: Mapping[str, str],
    **settings: Any,
) -> dict[str, Any]:
    """Say what learned numbers depend on, ready for JSON.

    Args:
        name: Of the model's class.
        model: The model.
        device: Where it is.
        layers: The names of the modules planned for.
        shares: Of parameters, by name, how ranks of tensor parallelism share them.
        settings: Whatever else changes what is measured or how it is fitted.
    """
    return {
        "version": VERSION,
        "model": name,
        "layers": list(layers),
        "parameters": {
            name: f"{tuple(parameter.shape)} {parameter.dtype}{shares.get(name, '')}"
            for name, parameter in model.named_parameters()
        },
        "device": _device_name(device),
        "settings": {"torch": str(torch.__version__), **settings},
    }


def plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as JSON returns it: dicts, lists, texts and numbers.

    That is what `torch.load` takes with `weights_only=True`; it refuses a checkpoint
    that has a named tuple in it.

    Args:
        state: What the parts of a session returned.
    """
    found: dict[str, Any] = json.loads(json.dumps(state))
    return found


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with a digest of all that is in it.

    Args:
        state: As `plain` returns it.
    """
    own = {name: value for name, value in state.items() if name != _DIGEST}
    return {**own, _DIGEST: _digest(own)}


def raise_if_damaged(state: Mapping[str, Any]) -> None:
    """Refuse a state that is not as it was saved.

    Numbers that were changed would be believed, and some later step would fail.

    Args:
        state: What `sealed` returned, or what came back from a file.

    Raises:
        StateMismatchError: A part is missing, was cut short or is another.
    """
    try:
        is_whole = state.get(_DIGEST) == sealed(state)[_DIGEST]
    except (TypeError, ValueError, RecursionError):  # it is not JSON
        is_whole = False
    if not is_whole:
        msg = "the state is damaged: it is not what Session.state_dict() returned"
        raise StateMismatchError(msg)


def _digest(state: Mapping[str, Any]) -> str:
    numbers = json.loads(json.dumps(state), parse_int=float)  # 1 is 1.0 in some files
    text = json.dumps(numbers, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def raise_if_of_another(state: object, mine: Mapping[str, Any]) -> None:
    """Refuse state of something else.

    Args:
        state: The state; its part ``"of"`` is what `describe` said where it was saved.
        mine: What it says here.

    Raises:
        StateMismatchError: They differ; the message names the first difference.
    """
    saved = state.get("of") if isinstance(state, Mapping) else None
    if not isinstance(saved, Mapping) or "version" not in saved:
        msg = "this is not a state that Session.state_dict() returned"
        raise StateMismatchError(msg)
    there, here = dict(_flat("", saved)), dict(_flat("", mine))
    for name in {**here, **there}:
        one, other = there.get(name, "missing"), here.get(name, "missing")
        if one != other:
            msg = (
                f"the state was saved with another {name}: {one!r} there, {other!r} "
                f"here; train without it, and a few steps teach the same anew"
            )
            raise StateMismatchError(msg)


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the values in nested mappings and lists, by where they are."""
    if isinstance(value, Mapping):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))
    else:
        yield name, value
        return
    for key, each in inside:
        yield from _flat(f"{name}: {key}" if name else str(key), each)


def _device_name(device: torch.device) -> str:
    """Name the kind of device; which one of several equal ones does not matter."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return device.type
