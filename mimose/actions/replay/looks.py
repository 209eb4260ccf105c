"""What else has to be alike for a recipe to hold: how the tensors lie in memory.

A graph's kinds and edges say nothing of layouts, nor of two tensors that are one in one
call and two in another. So of every saved tensor that a recipe reads or rebuilds this
is compared in each call: its precision, the order of its strides, whether it fills its
storage, which dimensions are of size one, whom it shares its storage with, and whether
it was edited after it was made. A call that looks otherwise gets another recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from mimose.actions.replay.unit_graph import Nodes, Ran, Slot
from mimose.tensors import version
from mimose.torch_private import base_of, saved_handle, saved_value, storage_key

Look: TypeAlias = tuple[object, ...]
Looks: TypeAlias = tuple[Look, ...]


def looks(slots: Sequence[Slot], ran: Ran) -> Looks | None:
    """Return how the tensors lie that some nodes of a call have saved.

    Args:
        slots: Which.
        ran: The call.

    Returns:
        Equal for calls that lie alike; None where a tensor cannot be looked at.

    Raises:
        RuntimeError: One was edited in place since it was saved.
    """
    nodes = ran.nodes
    sharing: dict[int, int] = {}
    for tensor in (*ran.inputs, *ran.outputs):
        _share(tensor, sharing)
    found = []
    for node, name in slots:
        behind = nodes.nodes[node]
        if saved_handle(behind, name).unpack_hook is not None:
            return None
        tensor = saved_value(behind, name)
        if not isinstance(tensor, torch.Tensor):
            return None
        found.append((_share(tensor, sharing), *_look(tensor, nodes)))
    return tuple(found)


def _share(tensor: torch.Tensor, sharing: dict[int, int]) -> int:
    """Return a number that is equal for tensors of one storage."""
    if tensor.layout != torch.strided:
        return -1
    key = storage_key(tensor.untyped_storage())
    return sharing.setdefault(key, len(sharing))


def _look(tensor: torch.Tensor, nodes: Nodes) -> Look:
    if tensor.layout != torch.strided:
        return (tensor.dtype, tensor.layout)
    edits = version(tensor) if _is_own(tensor, nodes) else -1
    shape = tensor.shape
    ones = tuple(size == 1 for size in shape) if 1 in shape else len(shape)
    offset = tensor.storage_offset()
    fills = not offset and tensor.nbytes == tensor.untyped_storage().nbytes()
    if tensor.is_contiguous():
        return (tensor.dtype, edits, ones, fills, bool(offset))
    return (tensor.dtype, edits, ones, fills, bool(offset), _order(tensor))


def _is_own(tensor: torch.Tensor, nodes: Nodes) -> bool:
    """Whether the unit has made a tensor: weights and inputs are edited by others.

    A view is as old as what it is a view of.
    """
    base = base_of(tensor)
    made = tensor if base is None else base
    return made.grad_fn is not None and nodes.value_of(made) is not None


def _order(tensor: torch.Tensor) -> tuple[tuple[int, bool], ...]:
    """Return the dimensions by falling stride, and whether each is an expanded one."""
    strides = tensor.stride()
    by_stride = sorted(
        (d for d, size in enumerate(tensor.shape) if size != 1),
        key=lambda d: -strides[d],
    )
    return tuple((d, strides[d] == 0) for d in by_stride)
