"""What a batch looks like: the sizes of its tensors, wherever it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mimose.inputs.families import digest
from mimose.inputs.shapes import call_shape, partial_masks
from mimose.tensors import tensors_in
from mimose.types import Sizes


class BatchShape(NamedTuple):
    """The sizes of a batch's tensors."""

    kind: str
    """Names the paths and ranks of its tensors, in every process alike. Types are left
    out: trainers change them on the way to the model."""
    sizes: Sizes
    """Every dimension of its tensors."""
    masks: tuple[str, ...] | None
    """Those that hide something; None where the host would have to wait for that."""

    @property
    def key(self) -> tuple[str, tuple[str, ...] | None]:
        """What batches have in common that are called alike, but for their sizes."""
        return self.kind, self.masks


def batch_shape(batch: object) -> BatchShape:
    """Read a batch's sizes.

    Args:
        batch: A tensor, or nested mappings, tuples, lists and dataclasses of tensors.
            What else is in it does not matter.
    """
    args, kwargs = _as_call(batch)
    shape = call_shape(args, kwargs)
    is_near = all(tensor.device.type == "cpu" for tensor in tensors_in((args, kwargs)))
    masks = partial_masks(args, kwargs) if is_near else None
    return BatchShape(digest(shape.names), tuple(map(int, shape.sizes)), masks)


def _as_call(batch: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take a batch for a call's arguments, which is what most become."""
    if isinstance(batch, Mapping):
        return (), {str(name): value for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(batch), {}
    return (batch,), {}
