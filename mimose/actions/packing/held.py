"""A packed storage, from the forward to the backward that asks for it."""

from __future__ import annotations

from typing import Any

import torch

from mimose.actions.packing.base import Packed
from mimose.torch_private import NO_GRAPH_TASK, current_graph_task


class HeldStorage:
    """Gives a packed storage back: in one backward once, to all who read it.

    It holds what was packed, and no node.

    Args:
        packed: The storage.
    """

    __slots__ = ("_left", "_made", "_n_readers", "_packed", "_task")

    def __init__(self, packed: Packed) -> None:
        self._packed = packed
        self._n_readers = 0
        self._left = 0
        self._task = NO_GRAPH_TASK
        self._made: torch.Tensor | None = None

    def part(self, tensor: torch.Tensor, n_times: int = 1) -> Part:
        """Return what stands for a tensor that lies in the storage.

        Args:
            tensor: Without a graph.
            n_times: How often one backward asks for it.
        """
        self._n_readers += n_times
        return Part(self, tensor)

    def whole(self) -> torch.Tensor:
        """Return the storage's tensor; after its last reader it is let go.

        Each backward counts its readers anew: one may be of a part of the graph.
        """
        task = current_graph_task()
        if task != self._task or task == NO_GRAPH_TASK:
            self._task, self._left, self._made = task, self._n_readers, None
        self._left -= 1
        made = self._packed.unpack() if self._made is None else self._made
        self._made = made if self._left > 0 else None
        return made


class Part:
    """A tensor that lies in a packed storage.

    Args:
        held: The storage.
        tensor: As it lay there.
    """

    __slots__ = ("_held", "_offset", "_shape", "_stride")

    def __init__(self, held: HeldStorage, tensor: torch.Tensor) -> None:
        self._held = held
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset: Any = tensor.storage_offset()

    def lend(self) -> torch.Tensor:
        """Return the tensor, in memory that is nobody else's."""
        whole = self._held.whole()
        if (
            whole.shape == self._shape
            and whole.stride() == self._stride
            and not self._offset
        ):
            return whole
        return whole.as_strided(self._shape, self._stride, self._offset)
