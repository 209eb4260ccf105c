"""The last step's outputs that the user still holds."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from mimose.torch_private import storage_key

_LEAST_BYTES = 65536
"""Smaller outputs are not worth looking after."""


class RetainedOutputs:
    """The bytes of the last step's outputs that the user still holds.

    They are part of what the next step starts from, and usually go when its outputs
    take their names: after its forward, before its backward.

    Args:
        tensors: What the root returned.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._held: list[tuple[weakref.ref[Any], int]] = []
        seen: set[int] = set()
        for tensor in tensors:
            if tensor.numel() < _LEAST_BYTES // 8:
                continue
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            if key not in seen and storage.nbytes() >= _LEAST_BYTES:
                seen.add(key)
                self._held.append((weakref.ref(storage), storage.nbytes()))

    def and_those(self, others: RetainedOutputs) -> RetainedOutputs:
        """Return these and those of an earlier forward of the same step."""
        both = RetainedOutputs([])
        both._held = [*others._held, *self._held]
        return both

    def live_bytes(self) -> int:
        """Return how much of it is still alive."""
        if not self._held:
            return 0
        return sum(n_bytes for ref, n_bytes in self._held if ref() is not None)
