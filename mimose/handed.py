"""Objects that a layer is handed and may change, such as a key-value cache.

Note: [Objects handed to a layer]
Some models make a cache in training although nobody asked, and hand it to their layers,
each of which appends its keys and values. Run again with the cache as it is then, a
layer would append them twice. So the recomputation gets a copy of the object as it was
before the call: containers and attributes are copied, tensors are shared. A layer that
edits such a tensor in place cannot be recomputed. Whether a layer changes objects of a
type is told by its first call with one.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mimose.changes import version

_NOT_COPIED = (
    torch.Tensor,
    nn.Module,
    torch.dtype,
    torch.device,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
_PLAIN = (torch.Tensor, type(None), bool, int, float, str)
_MOST_PARTS = 100_000
"""An object of more parts is taken as it is."""


class Handed:
    """An object as one call was handed it.

    Args:
        given: The object.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self._before = _look(given)
        self._copy = _copied(given, {})

    def again(self) -> Any:
        """Return an object in the state of before, one of its own for each call."""
        return _copied(self._copy, {})

    def has_changed(self) -> bool:
        """Whether the object is no longer as it was."""
        return _look(self._given) != self._before

    def settle(self) -> tuple[type, bool, bool]:
        """Return its type, whether the call has changed it, and a tensor of it.

        What was given is not held any longer: it may lead back to the call.
        """
        after, kind = _look(self._given), type(self._given)
        self._given = None
        versions = dict(_tensors(self._before))
        is_edited = any(
            versions.get(tensor, version) != version
            for tensor, version in _tensors(after)
        )
        return kind, after != self._before, is_edited


class HandedObjects:
    """What one unit does to the objects it is handed: [Objects handed to a layer].

    Attributes:
        has_edited: Whether a call has edited a tensor of one in place.
    """

    def __init__(self) -> None:
        self._changes: dict[type, bool] = {}
        self.has_edited = False

    def take(self, leaves: list[Any]) -> list[Handed]:
        """Put the objects that the unit may change in the form of before the call.

        Args:
            leaves: A call's arguments, containers taken apart; changed in place.
        """
        taken = []
        for index, leaf in enumerate(leaves):
            if not is_object(leaf) or not self._changes.get(type(leaf), True):
                continue
            leaves[index] = handed = Handed(leaf)
            taken.append(handed)
        return taken

    def settle(self, taken: Sequence[Handed]) -> None:
        """Learn from the call, when it has run, what it does to them."""
        for handed in taken:
            kind, has_changed, is_edited = handed.settle()
            self._changes[kind] = self._changes.get(kind, False) or has_changed
            self.has_edited |= is_edited


def is_object(leaf: object) -> bool:
    """Whether it is an object with a state, and neither a tensor nor a module."""
    return hasattr(leaf, "__dict__") and not isinstance(leaf, _NOT_COPIED)


def objects_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Handed]:
    """Return the objects among a call's arguments, as they are now."""
    if all(isinstance(value, _PLAIN) for value in (*args, *kwargs.values())):
        return []
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    return [Handed(leaf) for leaf in leaves if is_object(leaf)]


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return what an object or a container is made of; None if it is one piece."""
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return vars(value) if is_object(value) else None


def _look(value: Any) -> tuple[Any, ...]:
    """Describe an object, parts and parts of parts, each by its identity or value."""
    seen: dict[int, int] = {}
    look: list[Any] = []
    left: list[tuple[Any, Any]] = [("", value)]
    while left and len(look) < _MOST_PARTS:
        name, value = left.pop()
        if isinstance(value, torch.Tensor):
            look.append((name, "tensor", id(value), version(value)))
            continue
        parts = _parts(value)
        if parts is None:
            is_plain = isinstance(value, (str, int, float, bool, type(None)))
            look.append((name, value if is_plain else id(value)))
            continue
        is_new = id(value) not in seen
        number = seen.setdefault(id(value), len(seen))
        look.append((name, type(value).__name__, number, len(parts)))
        if is_new:
            left.extend(parts.items())
    return tuple(look)


def _tensors(look: Sequence[Any]) -> Iterator[tuple[int, int]]:
    for entry in look:
        if len(entry) == 4 and entry[1] == "tensor":
            yield entry[2], entry[3]


def _copied(value: Any, seen: dict[int, Any]) -> Any:
    """Copy containers and attributes, and nothing else; what cannot be is shared."""
    parts = _parts(value)
    if parts is None or len(seen) >= _MOST_PARTS:
        return value
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, tuple):
        return _copied_tuple(value, seen)
    try:
        new = copy.copy(value)
    except (TypeError, ValueError, copy.Error):
        return value
    seen[id(value)] = new
    if new is value:
        return value
    items = {name: _copied(part, seen) for name, part in parts.items()}
    if isinstance(value, list):
        new[:] = items.values()
    elif isinstance(value, dict):
        for name, part in items.items():
            dict.__setitem__(new, name, part)
    else:
        vars(new).update(items)
    return new


def _copied_tuple(value: tuple[Any, ...], seen: dict[int, Any]) -> Any:
    parts = [_copied(part, seen) for part in value]
    if all(new is old for new, old in zip(parts, value, strict=True)):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
