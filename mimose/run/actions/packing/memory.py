"""Tensors as they lie in memory."""

from __future__ import annotations

import torch

from mimose.run.actions.packing.base import SavedStorage


def flat(whole: torch.Tensor) -> torch.Tensor:
    """Return (n,) a dense tensor's elements, in the order in which they lie."""
    return whole.as_strided((whole.numel(),), (1,), whole.storage_offset())


def empty_like(whole: torch.Tensor) -> torch.Tensor:
    """Return memory for a tensor of the same shape, strides, precision and device."""
    return Form(whole).empty()


def own_bytes(*tensors: torch.Tensor) -> int:
    """Return what tensors take, each with a storage of its own."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def fills(tensor: torch.Tensor, saved: SavedStorage) -> bool:
    """Whether a tensor has each element of a storage once, in any order."""
    whole = saved.whole
    return (
        tensor.dtype == whole.dtype
        and tensor.numel() == whole.numel()
        and tensor.storage_offset() == whole.storage_offset()
        and _is_dense(tensor)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether no two elements share a place, and none is left out between them."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class Form:
    """How a tensor lies; holds nothing of it.

    Args:
        tensor: Dense.
    """

    __slots__ = ("device", "dtype", "n_elements", "shape", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.n_elements = tensor.numel()

    def empty(self) -> torch.Tensor:
        """Return memory that lies so."""
        return torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=self.device
        )

    def of(self, elements: torch.Tensor) -> torch.Tensor:
        """Return elements in the order in which they lie as such a tensor.

        Args:
            elements: (n,) contiguous.
        """
        return elements.as_strided(self.shape, self.stride)
