"""Batches of a rehearsal: the user's own, or one batch stretched to other sizes."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from mimose.bench.rehearse.foreign import NESTED
from mimose.bench.usage import UsageError

Lengths: TypeAlias = Sequence[int] | Mapping[str, Sequence[int]]
"""Values of one size, or of several by name, batch by batch."""
Sizes: TypeAlias = tuple[int, ...]


def read_lengths(path: Path) -> Lengths:
    """Read lengths from JSON: a list of integers, or lists by the name of a size.

    Raises:
        OSError: The file cannot be read.
        UsageError: It holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        msg = f"{path} is no JSON: {error}"
        raise UsageError(msg) from error
    return checked(found)


def checked(lengths: Any) -> Lengths:
    """Return lengths if they are such.

    Raises:
        UsageError: They are not, or lists of several sizes differ in length.
    """
    lists = list(lengths.values()) if isinstance(lengths, Mapping) else [lengths]
    good = lists and all(
        isinstance(each, Sequence)
        and each
        and all(type(n) is int and n >= 1 for n in each)
        for each in lists
    )
    if not good or len({len(each) for each in lists}) > 1:
        msg = (
            "lengths must be a list of whole numbers of at least 1, or such lists of "
            'one length by the name of a size: {"input_ids.1": [...], "labels.1": '
            "[...]}"
        )
        raise UsageError(msg)
    found: Lengths = lengths
    return found


class Batches:
    """Makes batches of other sizes from one: its rows and columns repeat.

    A size is a tensor's dimension, named as in records (``input_ids.1``). With it, the
    same number at other places follows: at a dimension 0 if it is one, else elsewhere.

    Args:
        model: The model, whose arguments name the sizes of a tuple's tensors.
        batch: A mapping of keyword arguments, a tuple of arguments, or one argument.
        lengths: See `Lengths`; None for the batch as it is.

    Attributes:
        names: The names of the sizes that vary.
        own: Their values in the batch.

    Raises:
        UsageError: The batch has no such size, or two sizes have one value.
    """

    def __init__(self, model: nn.Module, batch: Any, lengths: Lengths | None) -> None:
        if isinstance(batch, Mapping):
            self._by_name, self._is_named = dict(batch), True
        else:
            given = batch if isinstance(batch, (tuple, list)) else (batch,)
            names = list(inspect.signature(model.forward).parameters)
            names += [str(i) for i in range(len(names), len(given))]
            self._by_name = dict(zip(names, given, strict=False))
            self._is_named = False
        for name, each in self._by_name.items():
            if isinstance(each, torch.Tensor) and each.is_nested:
                msg = f"{name} in the batch is a nested tensor: {NESTED}"
                raise UsageError(msg)
        self._tensors = {
            name: each.detach().cpu()
            for name, each in self._by_name.items()
            if isinstance(each, torch.Tensor)
        }
        if not any(each.ndim for each in self._tensors.values()):
            msg = "the batch has no tensor with a dimension: return one as training has"
            raise UsageError(msg)
        if not isinstance(lengths, Mapping):
            lengths = {self._length(): lengths or ()}
        self.names = tuple(lengths)
        self.own = tuple(map(self.own_size, lengths))
        if len(self._wanted(self.shape())) < len(self.names):
            msg = (
                f"{' and '.join(self.names)} have one value in the batch, so which "
                f"tensor follows which is not known: return a batch in which they "
                f"differ"
            )
            raise UsageError(msg)
        self.sizes: list[Sizes] = list(zip(*lengths.values(), strict=True)) or [
            self.own
        ]

    def _length(self) -> str:
        """Return the size that a list of lengths means: that of a sequence, or rows."""
        for name, each in self._tensors.items():
            if each.ndim in (2, 3):
                return f"{name}.1"
        return self.rows

    def own_size(self, name: str) -> int:
        """Return a size in the batch.

        Raises:
            UsageError: The batch has no such size.
        """
        argument, _, dim = name.rpartition(".")
        tensor = self._tensors.get(argument)
        if tensor is None or not dim.isdigit() or int(dim) >= tensor.ndim:
            known = ", ".join(
                f"{name}.{i}"
                for name, t in self._tensors.items()
                for i in range(t.ndim)
            )
            msg = f"the batch has no size {name}; its sizes: {known}"
            raise UsageError(msg)
        return int(tensor.shape[int(dim)])

    def shape(self, sizes: Sizes | None = None) -> Mapping[str, int]:
        """Return sizes by name; without an argument those of the batch."""
        return dict(zip(self.names, self.own if sizes is None else sizes, strict=True))

    @property
    def rows(self) -> str:
        """The name of the size that counts rows."""
        return f"{next(name for name, t in self._tensors.items() if t.ndim)}.0"

    @property
    def longest(self) -> Sizes:
        """The sizes with the most elements."""
        return max(self.sizes, key=lambda sizes: (sum(sizes), sizes))

    def drawn(self, n: int, seed: int) -> Iterator[Sizes]:
        """Yield sizes of so many steps, in random order.

        The longest comes in the middle, when plans are learned, and at the end.
        """
        rng, order = random.Random(seed), list[Sizes]()
        while len(order) < n:
            order += rng.sample(self.sizes, len(self.sizes))
        order = order[:n]
        for at in (n // 2, -1):
            order[at] = self.longest
        yield from order

    def made(self, shape: Mapping[str, int]) -> Any:
        """Return the arguments of a call at a shape, on the CPU."""
        wanted = self._wanted(shape)

        def stretched(tensor: torch.Tensor) -> torch.Tensor:
            for dim, own in enumerate(tensor.shape):
                size = wanted.get((dim == 0, own), own)
                if size != own:
                    tensor = tensor.index_select(dim, torch.arange(size) % own)
            return tensor

        made = self._by_name | {
            name: stretched(tensor) for name, tensor in self._tensors.items()
        }
        return made if self._is_named else tuple(made.values())

    def _wanted(self, shape: Mapping[str, int]) -> Mapping[tuple[bool, int], int]:
        """Return sizes by whether they count rows, and their number in the batch."""
        return {
            (name.endswith(".0"), self.own_size(name)): n for name, n in shape.items()
        }

    @property
    def unit(self) -> str:
        """What a batch holds: ``tokens``, if its first tensor has rows of integers."""
        first = next(t for t in self._tensors.values() if t.ndim)
        is_text = first.ndim == 2 and not first.is_floating_point()
        return "tokens" if is_text else "samples"
