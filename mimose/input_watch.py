"""Noticing that a recomputed layer's inputs were edited in place after it read them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from mimose.changes import version
from mimose.shapes import argument_tensors

Marks: TypeAlias = "list[tuple[weakref.ref[torch.Tensor], int]]"

_PLAIN = (type(None), bool, int, float, str)


def marks(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Marks:
    """Note the versions of a call's tensors; the tensors are not held.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
    """
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append((weakref.ref(value), version(value)))
        elif not isinstance(value, _PLAIN):
            found += [
                (weakref.ref(tensor), version(tensor))
                for _, tensor in argument_tensors((value,), {})
            ]
    return found


def is_edited(noted: Marks) -> bool:
    """Whether a tensor that is still alive has another version now."""
    for ref, counted in noted:
        tensor = ref()
        if tensor is not None and version(tensor) != counted:
            return True
    return False
