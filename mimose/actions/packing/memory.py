"""Tensors as they lie in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mimose.actions.packing.base import SavedStorage

_MOST_SLICES = 32


def flat(whole: torch.Tensor) -> torch.Tensor:
    """Return (n,) a dense tensor's elements, in the order in which they lie."""
    return whole.as_strided((whole.numel(),), (1,), whole.storage_offset())


def own_bytes(*tensors: torch.Tensor) -> int:
    """Return what tensors take, each with a storage of its own."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def slices(n: int, at_once: int, device: torch.device) -> Iterator[slice]:
    """Yield slices that make up a range: what is worked on together.

    Args:
        n: The range's length.
        at_once: A slice's on a CPU, a power of two. On an accelerator, whose kernels
            start one by one, it is a share of the range where that is more.
        device: Where the work is done.
    """
    if device.type != "cpu":
        while at_once * _MOST_SLICES < n:
            at_once *= 2
    for start in range(0, n, at_once):
        yield slice(start, min(start + at_once, n))


def is_alike(saved: SavedStorage) -> bool:
    """Whether all who read a storage read the same kind of number."""
    dtype = saved.whole.dtype
    return all(reader.tensor.dtype == dtype for reader in saved.readers)


def fills(tensor: torch.Tensor, saved: SavedStorage) -> bool:
    """Whether a tensor has each element of a storage once, in any order."""
    whole = saved.whole
    return (
        tensor.dtype == whole.dtype
        and tensor.numel() == whole.numel()
        and tensor.storage_offset() == whole.storage_offset()
        and is_dense(tensor)
    )


def is_dense(tensor: torch.Tensor) -> bool:
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
