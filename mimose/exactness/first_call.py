"""A layer's first call in a mode: what it changes, and whether it may run twice.

Note: [Until it is clear]
Whether a buffer on an accelerator has changed without a new version is clear when the
step has ended (see `mimose.exactness.late_answers`). Until then it counts as one that
changes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from mimose.exactness.changes import (
    BufferSlot,
    SavedBuffers,
    buffer_slots,
    running_statistics,
)
from mimose.exactness.impurities import Draws
from mimose.tensors import version


class Told(NamedTuple):
    """What a first call has told."""

    buffers: list[BufferSlot]
    """Those it changes."""
    unclear: list[tuple[BufferSlot, torch.Tensor]]
    """Those of which only an accelerator knows: flags, true where one has changed."""
    changes_weights: bool
    impurity: str
    """Why the layer may not run again; empty where it may."""


class FirstCall:
    """One call, from before the forward.

    Args:
        module: The layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = tuple(module.modules())
        self._weights = tuple(module.parameters())
        self._versions = self._count()
        self._draws = Draws(self._modules)
        self.buffers = SavedBuffers(buffer_slots(self._modules))
        """To be put back around a recomputation."""

    def _count(self) -> list[int]:
        return list(map(version, self._weights))

    def tell(self) -> Told:
        """Compare, when the forward has run. See Note: [Until it is clear]."""
        changed, unclear = self.buffers.changed(running_statistics(self._modules))
        changes_weights = self._versions != self._count()
        return Told(changed, unclear, changes_weights, self._draws.why())
