"""From a call's arguments to its structure and its named sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch

from mimose.exceptions import MimoseError
from mimose.size_names import rank, spoken

Structure: TypeAlias = tuple[object, ...]

_MOST_SETTINGS = 4
"""Distinct texts at one place that may be settings; with more they are data."""
_MOST_PLACES = 1024
"""Places remembered; where there are more, their names are data themselves."""
_MANY = (str, int, float)
_ANY = ".*"
"""Ends the path of a list's texts and numbers, wherever they stand in it."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """What a call's arguments look like.

    Two calls with the same `structure` differ in their `sizes` alone.
    """

    structure: Structure
    """Each argument's path, with what it is: dtype, rank, None, a flag …"""
    names: tuple[str, ...]
    """`path.dimension` of every dimension of every tensor."""
    sizes: tuple[int, ...]
    """The dimensions, in the order of `names`."""


class Texts:
    """Tells texts that are settings (``"mean"``) from texts that are data.

    Where a call may run differently, texts count by value; sample names and raw texts
    would make every call another. So they do while few were seen at one place.
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[str]] = {}

    def note(self, path: str, text: str) -> None:
        """Take note of a text at a path."""
        if path not in self._seen and len(self._seen) >= _MOST_PLACES:
            return
        seen = self._seen.setdefault(path, [])
        if text not in seen and len(seen) <= _MOST_SETTINGS:
            seen.append(text)

    def are_settings(self, path: str) -> bool:
        """Whether the texts noted at a path count by value."""
        return 0 < len(self._seen.get(path, ())) <= _MOST_SETTINGS

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen, ready for JSON."""
        return {path: list(seen) for path, seen in self._seen.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Texts:
        """Make what ``state_dict`` told of.

        Args:
            state: What it returned.
        """
        texts = cls()
        texts._seen = {str(p): list(map(str, seen)) for p, seen in state.items()}
        return texts


def call_shape(
    args: Sequence[Any], kwargs: Mapping[str, Any], texts: Texts | None = None
) -> CallShape:
    """Describe a call's arguments, nested containers included.

    A jagged tensor has the sizes of its batch and of its values, all rows together.

    Args:
        args: What it is called with.
        kwargs: What it is called with by name.
        texts: Knows which texts are data; without it none are.
    """
    return _describe(list(_leaves(args, kwargs)), texts)


def _describe(leaves: Sequence[tuple[str, object]], texts: Texts | None) -> CallShape:
    structure: list[object] = []
    names: list[str] = []
    sizes: list[int] = []
    if texts is not None:
        for path, leaf in leaves:
            if isinstance(leaf, str):
                texts.note(path, leaf)
    for path, leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            entry = path, _token(path, leaf, texts)
            is_data = path.endswith(_ANY) and entry[1] is not leaf
            if not (is_data and entry in structure[-1:]):  # many count as one
                structure.append(entry)
            continue
        structure.append((path, leaf.dtype, leaf.dim(), leaf.requires_grad))
        dimensions = _dimensions(leaf)
        names.extend(f"{path}.{axis}" for axis in range(len(dimensions)))
        sizes.extend(dimensions)
    return CallShape(tuple(structure), tuple(names), tuple(sizes))


def _dimensions(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes as numbers; of a nested tensor the batch and its values'."""
    if tensor.is_nested:
        return tensor.size(0), *tensor.detach().values().shape
    return tensor.shape


def argument_tensors(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the paths and tensors among a call's arguments."""
    for path, leaf in _leaves(args, kwargs):
        if isinstance(leaf, torch.Tensor):
            yield path, leaf


def fast_key(
    args: Sequence[Any], kwargs: Mapping[str, Any], texts: Texts | None = None
) -> tuple[object, ...]:
    """Return a hashable key that is equal for calls of the same shape.

    It tells no less apart than `call_shape`, costs a microsecond, and serves to find
    the `CallShape` of a call seen before.
    """
    key: list[object] = [_fast(path, value, texts) for path, value in enumerate(args)]
    for name, value in kwargs.items():
        key.append(name)
        key.append(_fast(name, value, texts))
    return tuple(key)


def _fast(path: str | int, value: Any, texts: Texts | None) -> object:
    if isinstance(value, torch.Tensor):
        shape = _dimensions(value) if value.is_nested else value.shape
        return (shape, value.dtype, value.requires_grad, value.device)
    if value is None or value is True or value is False:
        return value
    if isinstance(value, (int, float)):
        return type(value)
    if isinstance(value, str):
        if texts is not None:
            texts.note(str(path), value)
        return _token(str(path), value, texts)
    return _describe(list(_visit(str(path), value)), texts)


def _leaves(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, object]]:
    for index, value in enumerate(args):
        yield from _visit(str(index), value)
    for name in sorted(kwargs):
        yield from _visit(name, kwargs[name])


def _visit(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, torch.Tensor) or value is None:
        yield path, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _visit(f"{path}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            is_one_of_many = isinstance(item, _MANY) and not isinstance(item, bool)
            place = f"{path}{_ANY}" if is_one_of_many else f"{path}.{index}"
            yield from _visit(place, item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _visit(f"{path}.{field.name}", getattr(value, field.name))
    else:
        yield path, value


def _token(path: str, leaf: object, texts: Texts | None) -> object:
    """Say what a non-tensor argument is: settings by value, the rest by type."""
    if leaf is None or isinstance(leaf, bool):
        return leaf
    if isinstance(leaf, str) and (texts is None or texts.are_settings(path)):
        return leaf
    return type(leaf).__qualname__


def partial_masks(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths of the masks that hide something, or may do so.

    Attention runs differently under a mask of all ones. On an accelerator the host
    would have to wait to be told, and every mask is one that may: `mimose.variants`.
    """
    hiding = []
    for path, tensor in _mask_tensors(args, kwargs):
        is_readable = tensor.device.type == "cpu" and not tensor.is_nested
        if not is_readable or not bool(tensor.all()):
            hiding.append(path)
    return tuple(hiding)


def _mask_tensors(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    for index, value in enumerate(args):
        if isinstance(value, dict):
            yield from _mask_tensors((), value)
        elif isinstance(value, torch.Tensor) and value.dtype == torch.bool:
            yield str(index), value
    for name, value in kwargs.items():
        if isinstance(value, dict):
            yield from _mask_tensors((), value)
        elif (
            "mask" in name
            and isinstance(value, torch.Tensor)
            and not value.dtype.is_floating_point
            and value.dim() <= 2
        ):
            yield name, value


class SizeTable:
    """Merges the dimensions of one structure that are always equal.

    Dimensions stay together as long as they were equal in every call seen; the batch
    (dimension 0) is never merged with another dimension. What a size is called then:
    see `mimose.size_names`.

    Args:
        names: `CallShape.names` of the structure.
        positional: What the positional arguments are called.
    """

    def __init__(self, names: tuple[str, ...], positional: Sequence[str] = ()) -> None:
        self.names = names
        self._spoken = tuple(spoken(name, positional) for name in names)
        self._index = {name: i for i, name in enumerate(names)}
        self._index.update({name: i for i, name in enumerate(self._spoken)})
        self._group: list[int] | None = None
        self._constant: tuple[int, ...] = ()
        self._varies: list[bool] = []
        self._shown: list[tuple[str, int]] = []

    def add(self, sizes: tuple[int, ...]) -> None:
        """Take note of a call's sizes: they may part what was together."""
        parted: dict[tuple[int, bool, int], int] = {}
        group = []
        old = self._group or [0] * len(sizes)
        for index, size in enumerate(sizes):
            is_batch = self.names[index].endswith(".0")
            group.append(parted.setdefault((old[index], is_batch, size), index))
        if self._group is None:
            self._constant, self._varies = sizes, [False] * len(sizes)
        self._varies = [
            v or s != c
            for v, s, c in zip(self._varies, sizes, self._constant, strict=True)
        ]
        self._group = group
        self._show()

    def _show(self) -> None:
        """Settle which sizes are named: those that vary."""
        columns = self.columns()
        varying = [c for c in columns if self._varies[c]] or columns
        self._shown = [(self._name(c), c) for c in varying]

    def _name(self, column: int) -> str:
        """Return what a group's size is called."""
        group = self._group or list(range(len(self.names)))
        names = [n for n, c in zip(self._spoken, group, strict=True) if c == column]
        return min(names, key=rank)

    def spoken_names(self) -> list[str]:
        """Return what all sizes are called, those that are always equal once."""
        return [self._name(column) for column in self.columns()]

    def knows(self, name: str) -> bool:
        """Whether a size is called so."""
        return name in self._index

    def state_dict(self) -> dict[str, Any]:
        """Return the state as lists, ready for JSON."""
        return {
            "names": list(self.names),
            "group": self._group,
            "constant": list(self._constant),
            "varies": self._varies,
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], positional: Sequence[str] = ()
    ) -> SizeTable:
        """Make the table that ``state_dict`` told of.

        Args:
            state: What it returned.
            positional: What the positional arguments are called.
        """
        table = cls(tuple(map(str, state["names"])), positional)
        if state["group"] is not None:
            table._group = list(map(int, state["group"]))
            table._constant = tuple(map(int, state["constant"]))
            table._varies = list(map(bool, state["varies"]))
            table._show()
        return table

    def columns(self) -> list[int]:
        """Return one index a group, in order."""
        return sorted(set(self._group or ()))

    def named(self, sizes: tuple[int, ...]) -> dict[str, int]:
        """Return the sizes that vary, by name; all of them while none has varied."""
        return {name: sizes[column] for name, column in self._shown}

    def steps(self, round_to: int | Mapping[str, int]) -> list[int]:
        """Return the multiple that each size is rounded up to; 1 for none."""
        group = self._group or list(range(len(self.names)))
        if isinstance(round_to, int):
            rounded = [
                varies and not name.endswith(".0")
                for name, varies in zip(self.names, self._varies, strict=True)
            ]
            return [round_to if rounded[c] else 1 for c in group]
        named = {
            group[self._index[name]]: step
            for name, step in round_to.items()
            if name in self._index
        }
        return [named.get(c, 1) for c in group]

    def fill(
        self, shape: Mapping[str, int], others: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return all sizes of a shape given by name, the others as they are given.

        Raises:
            MimoseError: A name is not one of this structure's.
        """
        group = self._group or list(range(len(self.names)))
        sizes = list(others)
        for name, size in shape.items():
            if name not in self._index:
                known = ", ".join(self.spoken_names())
                msg = f"shape: no size is called {name!r}; the model's are {known}"
                raise MimoseError(msg)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                msg = f"shape: {name} must be an integer of at least 1, got {size!r}"
                raise MimoseError(msg)
            chosen = group[self._index[name]]
            for index, representative in enumerate(group):
                if representative == chosen:
                    sizes[index] = int(size)
        return tuple(sizes)


def round_up(
    table: SizeTable, sizes: tuple[int, ...], round_to: int | Mapping[str, int]
) -> tuple[int, ...]:
    """Round each size up by its rule; the batch (dimension 0) only if named.

    Sizes that were always equal have one rule, under any of their names, so that they
    stay equal.

    Args:
        table: Names the sizes.
        sizes: The sizes.
        round_to: A multiple for all sizes that vary but the batch, or one for each
            named size.
    """
    if round_to == 1:
        return sizes
    steps = table.steps(round_to)
    return tuple(
        -(-size // step) * step for size, step in zip(sizes, steps, strict=True)
    )
