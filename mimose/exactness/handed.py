"""Objects that a layer is handed and changes, such as a key-value cache.

Note: [Objects handed to a layer]
Some models make a cache in training although nobody asked, and hand it to their layers,
each of which appends its keys and values. Run again with the cache as it is then, a
layer would append them twice. So once a layer was seen to change an object of a type,
recomputations get a copy of such an object as it was before the call: lists, dicts and
attributes are copied, tensors and all else shared. Objects of other types are handed on
as they are, and what changes them behind a layer's back is found, as far as it can be,
by comparing the first recomputation. A layer that edits a tensor of such an object in
place cannot be recomputed.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mimose.tensors import version
from mimose.torch_private import next_sequence_number, pytree, sequence_number

autograd_clock = next_sequence_number
"""Returns the number that autograd's next node of this thread gets."""
_ONE_PIECE = (
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
_PLAIN = frozenset((torch.Tensor, type(None), bool, int, float, str))
_MOST_PARTS = 10_000
"""An object of more parts is handed on as it is."""


class Knowledge:
    """What the units of one model do to the objects they are handed, by their type.

    Attributes:
        changed: Types of objects that a unit was seen to change.
        edited: Those of them a tensor of which was edited in place.
    """

    def __init__(self) -> None:
        self.changed: set[type] = set()
        self.edited: set[type] = set()

    def may_have_changed(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], began: int
    ) -> bool:
        """Whether a forward that has failed may have changed what it was given.

        That is so where units change such objects, and where one holds a tensor that
        the forward has made.

        Args:
            args: What it was given.
            kwargs: What it was given by name.
            began: What `autograd_clock` told when it began.
        """
        if all(type(value) in _PLAIN for value in (*args, *kwargs.values())):
            return False
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        objects = [leaf for leaf in leaves if _attributes(leaf) is not None]
        return any(
            type(leaf) in self.changed or _is_filled(leaf, began) for leaf in objects
        )

    def cannot_be_copied(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is handed an object whose tensors units edit in place."""
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        return any(type(leaf) in self.edited for leaf in leaves)


class HandedObjects:
    """What one unit does to the objects it is handed: [Objects handed to a layer].

    Args:
        knowledge: What is known of all units.

    Attributes:
        has_edited: Whether a call has edited a tensor of one in place.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._seen: set[type] = set()
        self.has_edited = False

    def forget(self) -> None:
        """Find out anew what calls do to objects."""
        self._seen.clear()

    def take(self, leaves: list[Any]) -> list[Handed]:
        """Put the objects that may change in the form of before the call.

        Args:
            leaves: A call's arguments, containers taken apart; changed in place.
        """
        copies: dict[int, Any] = {}
        taken: dict[int, Handed] = {}
        for index, leaf in enumerate(leaves):
            kind = type(leaf)
            is_changed = kind in self._knowledge.changed
            if not is_changed and (kind in _PLAIN or kind in self._seen):
                continue
            if _attributes(leaf) is None:
                continue
            if id(leaf) not in taken:
                taken[id(leaf)] = Handed(leaf, copies, is_changed=is_changed)
            leaves[index] = taken[id(leaf)]
        return list(taken.values())

    def settle(self, taken: Sequence[Handed]) -> None:
        """Learn from the call, when it has run, what it does to them."""
        for handed in taken:
            self._seen.add(handed.kind)
            has_changed, is_edited = handed.settle()
            if has_changed:
                self._knowledge.changed.add(handed.kind)
            if is_edited:
                self._knowledge.edited.add(handed.kind)
                self.has_edited = True


class Handed:
    """An object as one call was handed it.

    Args:
        given: The object.
        copies: Made of this call's objects so far; what they share stays shared.
        is_changed: Whether objects of its type are known to be changed.
    """

    def __init__(self, given: Any, copies: dict[int, Any], *, is_changed: bool) -> None:
        self.kind = type(given)
        self._given = given
        self._look = _look(given)
        self._copy = None
        if self._look is not None:
            try:
                self._copy = _copied(given, copies)
            except RecursionError:  # parts within parts within parts
                self._look = None
        self._is_changed = is_changed and self._look is not None

    def settle(self) -> tuple[bool, bool]:
        """Return whether the call has changed it, and whether a tensor of it.

        One that changes is not held any longer: it may lead back to the call.
        """
        after, before = _look(self._given), self._look
        self._look = None
        if before is None or after is None:
            return False, False
        has_changed = after != before
        if has_changed or self._is_changed:
            self._given = None
            self._is_changed = True
        else:
            self._copy = None
        versions = dict(_tensors(before))
        is_edited = any(versions.get(key, now) != now for key, now in _tensors(after))
        if is_edited:  # the forward is given up; the tensor leads back to it
            self._copy = None
        return has_changed, is_edited

    def again(self, copies: dict[int, Any]) -> Any:
        """Return what a recomputation is handed.

        Args:
            copies: Made for this recomputation; one object stays one.
        """
        return _copied(self._copy, copies) if self._is_changed else self._given


def _is_filled(value: Any, began: int) -> bool:
    """Whether an object holds a tensor made since."""
    seen: set[int] = set()
    left = [value]
    while left and len(seen) < _MOST_PARTS:
        value = left.pop()
        node = value.grad_fn if issubclass(type(value), torch.Tensor) else None
        if node is not None and sequence_number(node) >= began:
            return True
        if id(value) not in seen:
            seen.add(id(value))
            left.extend((_parts(value) or {}).values())
    return False


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object that can be copied by them alone."""
    kind: Any = type(value)
    if issubclass(kind, _ONE_PIECE) or kind.__new__ is not object.__new__:
        return None
    if not kind.__dictoffset__ or hasattr(kind, "__del__"):
        return None
    slots = [base for base in kind.__mro__ if base.__dict__.get("__slots__")]
    if slots:
        return None
    attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    return attributes


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return what an object or a container is made of; None if it is one piece."""
    kind = type(value)
    if kind is dict:
        return dict(value)
    if kind is list or kind is tuple:
        return dict(enumerate(value))
    return _attributes(value)


def _look(value: Any) -> tuple[Any, ...] | None:
    """Describe an object, parts and parts of parts, each by its identity or value.

    Returns:
        What is equal as long as nothing changes; None if there are too many parts.
    """
    seen: dict[int, int] = {}
    look: list[Any] = []
    left: list[tuple[Any, Any]] = [("", value)]
    while left:
        if len(look) + len(left) > _MOST_PARTS:
            return None
        key, value = left.pop()
        name = key if type(key) in (str, int) else id(key)
        if issubclass(type(value), torch.Tensor):
            look.append((name, "tensor", id(value), version(value)))
            continue
        parts = _parts(value)
        if parts is None:
            is_plain = type(value) in (str, int, float, bool, type(None))
            look.append((name, type(value), value if is_plain else id(value)))
            continue
        is_new = id(value) not in seen
        number = seen.setdefault(id(value), len(seen))
        look.append((name, type(value), number, len(parts), "parts"))
        if is_new:
            left.extend(parts.items())
    return tuple(look)


def _tensors(look: Sequence[Any]) -> Iterator[tuple[int, int]]:
    for entry in look:
        if len(entry) == 4 and entry[1] == "tensor":
            yield entry[2], entry[3]


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Copy lists, dicts, tuples and attributes, and nothing else.

    Args:
        value: What to copy; of no more parts than can be looked at.
        copies: Made so far, by identity.
    """
    parts = _parts(value)
    if parts is None:
        return value
    if id(value) in copies:
        return copies[id(value)]
    kind = type(value)
    if kind is tuple:
        return tuple(_copied(part, copies) for part in value)
    new: Any = kind() if kind in (list, dict) else object.__new__(kind)
    copies[id(value)] = new
    items = {name: _copied(part, copies) for name, part in parts.items()}
    if kind is list:
        new.extend(items.values())
    elif kind is dict:
        new.update(items)
    else:
        object.__getattribute__(new, "__dict__").update(items)
    return new
