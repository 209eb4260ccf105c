"""An input of a call that waits on the host until the call runs again."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mimose.actions.packing.base import Packed, Reader, Role, SavedStorage
from mimose.inputs.shapes import argument_tensors
from mimose.tensors import is_plain


class AwayInput:
    """One input of a call, held elsewhere; it holds no tensor of the call.

    Args:
        tensor: The input, which fills its storage.
        packed: Its storage.

    Attributes:
        n_bytes: The input's.
        host_bytes: What it takes on the host.
        stand_in: An empty tensor on the input's device, to be passed in its place.
    """

    __slots__ = ("_input", "_packed", "host_bytes", "n_bytes", "stand_in")

    def __init__(self, tensor: torch.Tensor, packed: Packed) -> None:
        self._packed = packed
        self._input = weakref.ref(tensor)
        self.n_bytes = tensor.nbytes
        self.host_bytes = packed.host_bytes
        self.stand_in = tensor.new_empty(0)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it stands for a tensor."""
        return self._input() is tensor

    def bring(self) -> torch.Tensor:
        """Return the input's values on its device, in a leaf that wants a gradient."""
        return self._packed.unpack().requires_grad_()


def handed_over(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return what the layer before has handed to a call; None if nothing.

    That is the first of its arguments that has a graph. Others are read by several
    layers, such as masks and an encoder's output: one that lets go of them frees none.
    """
    for _, tensor in argument_tensors(args, kwargs):
        if tensor.layout == torch.strided and tensor.grad_fn is not None:
            return tensor
    return None


def to_pack(tensor: torch.Tensor) -> SavedStorage | None:
    """Tell a codec of an input; None where more lies in its storage than itself."""
    tensor = tensor.detach()
    if not is_plain(tensor) or tensor.storage_offset():
        return None
    if tensor.nbytes != tensor.untyped_storage().nbytes() or _has_overlap(tensor):
        return None
    return SavedStorage(tensor, [Reader(Role.VALUE, tensor)], is_source=True)


def _has_overlap(tensor: torch.Tensor) -> bool:
    """Whether some of its elements share a place, so that others belong to nobody."""
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in sizes)
