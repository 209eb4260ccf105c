"""What a storage is to a codec, and what a codec makes of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch


class Role(enum.Enum):
    """What a node needs a saved tensor for."""

    CONVOLUTION_WEIGHT = enum.auto()
    """A convolution's input: the gradient of its weight reads it, nothing else does."""
    LINEAR_WEIGHT = enum.auto()
    """The same of a product with a weight."""
    SIGN = enum.auto()
    """A ReLU's result: whether it is above zero."""
    SHAPE = enum.auto()
    """Its sizes alone, such as a max-pool's input."""
    WINDOW_INDEX = enum.auto()
    """A max-pool's indices."""
    FRAGILE = enum.auto()
    """What a small change spoils: results and sums of attention, indices."""
    VALUE = enum.auto()
    """Anything else: its values."""


class Reader(NamedTuple):
    """A tensor that a node has saved, and what for."""

    role: Role
    tensor: torch.Tensor
    """Without a graph."""
    settings: tuple[Any, ...] = ()
    """What a codec has to know of the node: of a max-pool's indices the input's height
    and width, then kernel, stride, padding and dilation, two numbers each; of a linear
    layer's input its shape before it was flattened to two dimensions."""


class SavedStorage(NamedTuple):
    """A storage that nodes of a call have saved, and all of them that read it."""

    whole: torch.Tensor
    """Fills the storage densely, in the order in which it lies in memory; without a
    graph."""
    readers: Sequence[Reader]
    is_source: bool
    """Whether others are rebuilt from it, which then reads its values as well."""


class Packed(Protocol):
    """A storage as it is held between forward and backward."""

    @property
    def device_bytes(self) -> int:
        """What it takes on the device."""
        ...

    @property
    def host_bytes(self) -> int:
        """What it takes on the host, where that is not the device."""
        ...

    def unpack(self) -> torch.Tensor:
        """Return a tensor of the same shape, strides and precision as ``whole``."""
        ...


class Codec(Protocol):
    """One way to pack storages."""

    is_exact: bool
    """Whether what comes out is what went in, to the last bit, for every reader."""

    def takes(self, saved: SavedStorage) -> bool:
        """Whether a storage may be packed, for all who read it."""
        ...

    def pack(self, saved: SavedStorage) -> Packed | None:
        """Pack a storage, which is let go afterwards; None where it has to stay."""
        ...
