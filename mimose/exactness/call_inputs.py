"""What a call received, and whether it was edited since."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from mimose.exactness.guard import MOST_ITEMS
from mimose.tensors import version
from mimose.torch_private import pytree, version_of

PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))
_ONE_PIECE = (nn.Module, type)


class CallInputs:
    """What a call received, to detect later changes.

    Tensors are not held, but objects are. An object may refer to the graph that holds
    this, so code that abandons a forward must call `release`.

    Args:
        values: Tensors and objects, recorded by `add`.
    """

    __slots__ = ("_looks", "_tensors", "holder")

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._tensors: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._looks: list[tuple[Any, Any]] = []
        self.holder: Callable[[], Any] = lambda: None
        """Returns the object that holds the inputs for a recomputation, if it lives."""
        for value in values:
            self.add(value)

    def add(self, value: Any) -> None:
        """Record a tensor or an object."""
        if isinstance(value, torch.Tensor):
            if not value.is_inference():
                self._tensors.append((weakref.ref(value), version_of(value)))
        elif type(value) not in PLAIN:
            self._looks.append((value, _look(value)))

    @property
    def has_objects(self) -> bool:
        """Whether there are objects besides tensors, numbers and their containers."""
        return bool(self._looks)

    def are_edited(self) -> bool:
        """Whether a tensor was edited in place, or an object changed."""
        for ref, counted in self._tensors:
            tensor = ref()
            if tensor is not None and version_of(tensor) != counted:
                return True
        # After a caller's ``x += layer(x)`` only the holder refers to the tensor.
        held = self.holder()
        if held is not None and held.are_edited:
            return True
        return bool(self._looks) and self.are_objects_changed()

    def are_objects_changed(self) -> bool:
        """Whether an object or its content has changed."""
        return any(look != _look(value) for value, look in self._looks)

    def release(self) -> None:
        """Free everything, because the forward is abandoned."""
        self._looks.clear()
        holder = self.holder()
        if holder is not None:
            holder.clear()


def is_opaque(value: object) -> bool:
    """Whether a value is no tensor, no number, and no container known to torch."""
    kind = type(value)
    return kind not in PLAIN and pytree.tree_is_leaf(value) and _parts(value) != {}


def _parts(value: Any) -> dict[Any, Any]:
    """Return the parts of an object or a container; {} if it has none."""
    kind = type(value)
    if kind in (list, tuple):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, _ONE_PIECE):
        return {}
    try:
        own = value.__dict__
    except Exception:  # whatever a class of the user's raises
        return {}
    return dict(own) if isinstance(own, dict) else {}


def _look(value: Any) -> Any:
    """Describe a value and all its parts by identity, value and version.

    Returns:
        A description, equal while nothing changes; None if there are too many parts.
    """
    seen: set[int] = set()
    look: list[Any] = []
    left: list[tuple[Any, Any]] = [("", value)]
    while left:
        if len(look) + len(left) > MOST_ITEMS:
            return None
        name, value = left.pop()
        key = name if isinstance(name, (str, int)) else id(name)
        if type(value) in PLAIN:
            look.append((key, value))
        elif isinstance(value, torch.Tensor):
            look.append((key, id(value), version(value)))
        elif id(value) in seen:
            look.append((key, id(value)))
        else:
            seen.add(id(value))
            parts = _parts(value)
            look.append((key, id(value), len(parts), "parts"))
            left.extend(parts.items())
    return look
