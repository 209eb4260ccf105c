"""Noticing that a recomputed layer's inputs were edited in place after it read them.

Note: [A graph that holds itself]
A recomputed call's graph holds its inputs. An input that is edited in place by what was
made of it belongs to that graph from then on, and each holds the other. No collector
sees such a ring, since it closes within autograd: with the forward that was given up,
all that it had kept would stay for good.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from mimose.inputs.shapes import argument_tensors
from mimose.torch_private import base_of, version_of

Marks: TypeAlias = "list[tuple[weakref.ref[torch.Tensor], int]]"

_PLAIN = (type(None), bool, int, float, str)


def marks(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Marks:
    """Note the versions of a call's tensors; the tensors are not held.

    Inference tensors count none, and cannot be edited where autograd sees it.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
    """
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            if not value.is_inference():
                found.append((weakref.ref(value), version_of(value)))
        elif not isinstance(value, _PLAIN):
            found += [
                (weakref.ref(tensor), version_of(tensor))
                for _, tensor in argument_tensors((value,), {})
                if not tensor.is_inference()
            ]
    return found


def is_edited(noted: Marks) -> bool:
    """Whether a tensor that is still alive has another version now."""
    for ref, counted in noted:
        tensor = ref()
        if tensor is not None and version_of(tensor) != counted:
            return True
    return False


def _has_graph(tensor: torch.Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # one of several views, edited: it is in no graph any more
        return False


def cut_off(noted: Marks) -> None:
    """Take edited tensors out of the graph of a forward that is given up.

    See Note: [A graph that holds itself].

    Args:
        noted: The tensors, as they were before.
    """
    for ref, counted in noted:
        tensor = ref()
        if tensor is None or version_of(tensor) == counted or not _has_graph(tensor):
            continue
        base = base_of(tensor)
        if base is None:
            tensor.detach_()
        elif base.grad_fn is not None:
            base.detach_()
            torch.autograd.graph.increment_version(tensor)
            assert tensor.grad_fn is not None  # asked for, a view follows its base
