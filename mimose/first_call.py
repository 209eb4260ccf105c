"""A layer's first call in a mode: what it changes, and whether it can be run again.

Note: [Run again]
A layer that reads what nobody saved for it (an object of its own, a global) returns
something else when it is run again. So its first output is compared with the first
recomputation's, to the bit on a CPU. No forward is run for that; what it finds comes
after the step in which it happened, and is kept from the next on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mimose.changes import (
    Before,
    Slot,
    all_slots,
    attribute_slots,
    bits,
    is_plain,
    running_statistics,
    tensor_attributes,
    union,
)
from mimose.tracker import tensors_in


class FirstCall:
    """One call, from before the forward.

    Args:
        module: The layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = tuple(module.modules())
        self._names = self._attributes()
        self._given = tensor_attributes(self._modules)
        self.before = Before(all_slots(self._modules))
        """To be put back around a recomputation."""

    def _attributes(self) -> set[object]:
        return {slot.key for slot in attribute_slots(self._modules)}

    def changed(self) -> tuple[Slot, ...]:
        """Return what later calls have to save; call it when the forward has run."""
        changed = self.before.changed()
        edited = {slot.key for slot in changed}
        given = [slot for slot in self._given if slot.edited().key not in edited]
        new = [s for s in attribute_slots(self._modules) if s.key not in self._names]
        slots = union(running_statistics(self._modules), changed, given, new)
        self.before.narrow(slots)
        self.before.add_missing(new)
        return slots


def fingerprint(output: Any) -> list[tuple[torch.Size, int]] | None:
    """Return numbers that differ where a bit of an output does, most likely.

    Args:
        output: What a layer returned; what is not on a CPU says nothing, where kernels
            may add in any order.

    Returns:
        Shape and sum of bits of each tensor; None where nothing can be told.
    """
    tensors = list(tensors_in(output))
    if not all(is_plain(tensor) and tensor.device.type == "cpu" for tensor in tensors):
        return None
    with torch.no_grad():
        return [(t.shape, int(bits(t).sum(dtype=torch.int64))) for t in tensors]
