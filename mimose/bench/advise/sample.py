"""Makes batches of other sizes from one batch of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from mimose.bench.usage import UsageError
from mimose.tensors import tensors_in


class Inputs(NamedTuple):
    """The arguments of a model's call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Sample:
    """A batch that can be resized by repeating its rows.

    Time and memory of a step depend on sizes and not on values, except for models whose
    work depends on values. So repeated rows do not change the measurements.

    Args:
        batch: A mapping of keyword arguments, a tuple or list of arguments, or a single
            argument. Tensors are on the CPU.

    Attributes:
        batch: The number of samples: the first size of its tensors.

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

    def resized(self, batch: int) -> Inputs:
        """Return the inputs with this number of samples, at least one."""

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.ndim or tensor.shape[0] == batch:
                return tensor
            return tensor[torch.arange(batch) % tensor.shape[0]]

        return Inputs(*_each(tuple(self._inputs), resize))


def moved(inputs: Inputs, device: torch.device) -> Inputs:
    """Return inputs with their tensors on a device."""
    return Inputs(*_each(tuple(inputs), lambda tensor: tensor.to(device)))


def _each(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same tree of mappings, lists and tuples with each tensor changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: _each(value, change) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_each(value, change) for value in tree)
    return tree
