"""One batch of the user's, and batches of other sizes made from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from mimose.tensors import tensors_in
from mimose.usage import UsageError


class Inputs(NamedTuple):
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Sample:
    """A batch that can be had in other sizes: rows and tokens of it are repeated.

    What a step takes and holds depends on sizes, not on what is written in a batch, so
    repeating costs no truth, but for models whose work depends on values.

    Args:
        batch: As the model takes it: a mapping of keyword arguments, a tuple or list
            of arguments, or the one argument. Tensors are on the CPU.

    Attributes:
        batch: How many samples it has: the first size of its tensors.
        length: How many tokens a text has: the second size of ``input_ids``, or else
            of its first integer tensor of two dimensions, truth values left out; None
            where there is none, as for images.

    Raises:
        UsageError: It has no tensor, tensors of different first sizes, no samples, or
            no data.
    """

    def __init__(self, batch: Any) -> None:
        if isinstance(batch, Mapping):
            self._inputs = Inputs((), dict(batch))
        elif isinstance(batch, (tuple, list)):
            self._inputs = Inputs(tuple(batch), {})
        else:
            self._inputs = Inputs((batch,), {})
        tensors = list(tensors_in(tuple(self._inputs)))
        first = {tensor.shape[0] for tensor in tensors if tensor.ndim}
        if len(first) != 1:
            found = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "none"
            msg = (
                f"the sample's tensors must all have the batch as their first "
                f"dimension; their shapes: {found}"
            )
            raise UsageError(msg)
        self.batch = first.pop()
        if not self.batch:
            msg = "the sample is an empty batch: give one with a sample at least"
            raise UsageError(msg)
        if any(tensor.is_meta for tensor in tensors):
            msg = "the sample's tensors are on the meta device: give one with data"
            raise UsageError(msg)
        texts: list[Any] = [self._inputs.kwargs.get("input_ids"), *tensors]
        self.length = next((e.shape[1] for e in texts if _is_text(e)), None)

    def resized(self, batch: int, length: int | None = None) -> Inputs:
        """Return the inputs with so many samples, of so many tokens.

        Args:
            batch: At least 1.
            length: At least 1; None for the sample's own.
        """

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.ndim:
                return tensor
            tensor = _repeated(tensor, 0, batch)
            if length is not None and self.length is not None:
                for dimension in _lengths(tensor, self.length):
                    tensor = _repeated(tensor, dimension, length)
            return tensor

        return Inputs(*_each(tuple(self._inputs), resize))


def moved(inputs: Inputs, device: torch.device) -> Inputs:
    """Return inputs with their tensors on a device."""
    return Inputs(*_each(tuple(inputs), lambda tensor: tensor.to(device)))


def _is_text(tensor: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.ndim == 2
        and not tensor.is_floating_point()
        and tensor.dtype != torch.bool
    )


def _lengths(tensor: torch.Tensor, length: int) -> list[int]:
    """Return the dimensions that are a text's: of features only the second is."""
    candidates = range(1, tensor.ndim)
    if tensor.is_floating_point():
        candidates = range(max(1, tensor.ndim - 2), tensor.ndim)  # of a mask
        if tensor.ndim == 3:
            candidates = range(1, 2)
    return [index for index in candidates if tensor.shape[index] == length]


def _repeated(tensor: torch.Tensor, dimension: int, size: int) -> torch.Tensor:
    if tensor.shape[dimension] == size:
        return tensor
    places = torch.arange(size) % tensor.shape[dimension]
    return tensor.index_select(dimension, places)


def _each(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same tree of mappings, lists and tuples with each tensor changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: _each(value, change) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_each(value, change) for value in tree)
    return tree
