"""The model and its sample, by name or from a file, and batches of other sizes."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from mimose.bench.by_name import called_by_name
from mimose.tensors import tensors_in
from mimose.usage import UsageError

_SUFFIX = ".advise.pt"


def make(source: str) -> tuple[nn.Module, Any]:
    """Return a model in training mode and a batch of it, new ones, both on the CPU.

    Args:
        source: ``module:function``, of a function that takes nothing and returns
            ``(model, sample)``; or the path of what `saved` wrote.

    Raises:
        UsageError: There is no such function, it failed, or returned something else.
    """
    if source.endswith(_SUFFIX):
        made = torch.load(source, map_location="cpu", weights_only=False)
        return made["model"], made["sample"]
    try:
        made = called_by_name(source)
    except ValueError as error:
        raise UsageError(str(error)) from error
    is_pair = isinstance(made, tuple) and len(made) == 2
    if not is_pair or not isinstance(made[0], nn.Module):
        found = type(made[0] if is_pair else made).__name__
        msg = (
            f"--model {source}: the function must return (model, sample), a "
            f"torch.nn.Module and one batch as the model takes it; it returned {found}"
        )
        raise UsageError(msg)
    model, sample = made
    return model, sample


@contextmanager
def saved(model: nn.Module, sample: Any) -> Iterator[str]:
    """Write a model and its sample for other processes, as long as the context lasts.

    Raises:
        UsageError: The model cannot be saved, or its class lies in the script that was
            started, where no other process finds it.
    """
    instead = "give 'module:function' of a function that returns (model, sample)"
    here = [each for each in model.modules() if type(each).__module__ == "__main__"]
    if here:
        msg = (
            f"{type(here[0]).__name__} is defined in the script itself, where the "
            f"measuring processes cannot import it: move it to a module of its own, or "
            f"{instead}"
        )
        raise UsageError(msg)
    with tempfile.TemporaryDirectory(prefix="mimose-advise-") as folder:
        path = str(Path(folder) / f"model{_SUFFIX}")
        try:
            torch.save({"model": model, "sample": sample}, path)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            msg = (
                f"{type(model).__name__} cannot be saved for the measuring processes "
                f"({error}): {instead}"
            )
            raise UsageError(msg) from error
        yield path


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
