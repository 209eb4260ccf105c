"""From a call's arguments to its structure and its named sizes. No sizes are lost.

Two calls with one structure differ in their sizes alone. Sizes that were equal in every
call count as one, and one name stands for all: that of what the model is about, if it
is among them (a text is told as ``input_ids`` rather than by its mask). A tensor passed
by position is called as the model's forward calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch

from mimose.exceptions import MimoseError

Structure: TypeAlias = tuple[object, ...]

_MANY = ".*"
"""Ends the path of a list's texts and numbers: they are data, and count as one."""
_MOST_NAMED = 1024
_ABOUT = (
    "input_ids",
    "inputs_embeds",
    "pixel_values",
    "input_values",
    "input_features",
)
"""What models of transformers are about, in this order."""
_ASIDE = ("label", "token_type", "position", "mask")
"""What belongs to something else; masks say least."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """What a call's arguments look like."""

    structure: Structure
    """Each argument's path, with what it is: dtype, rank, None, a flag …"""
    names: tuple[str, ...]
    """`path.dimension` of every dimension of every tensor."""
    sizes: tuple[int, ...]
    """The dimensions, in the order of `names`."""


def call_shape(args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallShape:
    """Describe a call's arguments, nested containers included.

    A jagged tensor has the sizes of its batch and of its values, all rows together.
    Texts that are arguments themselves are settings and count by value; texts and
    numbers in a container count by their type.

    Args:
        args: What it is called with.
        kwargs: What it is called with by name.
    """
    structure: list[object] = []
    names: list[str] = []
    sizes: list[int] = []
    for path, leaf in _leaves(args, kwargs):
        if isinstance(leaf, torch.Tensor):
            structure.append((path, leaf.dtype, leaf.dim(), leaf.requires_grad))
            dimensions = _dimensions(leaf)
            names.extend(f"{path}.{axis}" for axis in range(len(dimensions)))
            sizes.extend(dimensions)
            continue
        entry = path, _token(path, leaf)
        if not path.endswith(_MANY) or structure[-1:] != [entry]:
            structure.append(entry)
    return CallShape(tuple(structure), tuple(names), tuple(sizes))


def argument_tensors(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the paths and tensors among a call's arguments."""
    for path, leaf in _leaves(args, kwargs):
        if isinstance(leaf, torch.Tensor):
            yield path, leaf


def fast_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[object, ...]:
    """Return a hashable key that is equal for calls of the same shape.

    It tells no less apart than `call_shape`, costs a microsecond, and serves to find
    the `CallShape` of a call seen before.
    """
    key: list[object] = []
    for path, value in (*enumerate(args), *kwargs.items()):
        key.append(path)
        if type(value) is torch.Tensor and not value.is_nested:
            key += value.shape, value.dtype, value.requires_grad, value.device
        elif value is None or value is True or value is False:
            key.append(value)
        else:
            shape = call_shape((value,), {})
            key += shape.structure, shape.sizes
    return tuple(key)


def partial_masks(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the masks that hide something, or may do so.

    Attention runs differently under a mask of all ones. On an accelerator the host
    would have to wait to be told, so every mask there is one that may.
    """
    hiding = []
    named = [(str(i), value, False) for i, value in enumerate(args)]
    named += [(name, value, True) for name, value in kwargs.items()]
    while named:
        name, value, has_name = named.pop()
        if isinstance(value, dict):
            named += [(str(key), inner, True) for key, inner in value.items()]
        elif isinstance(value, torch.Tensor) and (
            ("mask" in name and not value.dtype.is_floating_point and value.dim() <= 2)
            if has_name
            else value.dtype == torch.bool
        ):
            is_readable = value.device.type == "cpu" and not value.is_nested
            if not is_readable or not bool(value.all()):
                hiding.append(name)
    return tuple(sorted(hiding))


def _dimensions(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes as numbers; of a nested tensor the batch and its values'."""
    if tensor.is_nested:
        return tensor.size(0), *tensor.detach().values().shape
    return tensor.shape


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
            is_data = type(item) in (str, int, float)
            yield from _visit(f"{path}{_MANY if is_data else f'.{index}'}", item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _visit(f"{path}.{field.name}", getattr(value, field.name))
    else:
        yield path, value


def _token(path: str, leaf: object) -> object:
    """Say what a non-tensor argument is: settings by value, the rest by type."""
    is_setting = isinstance(leaf, str) and "." not in path
    return leaf if leaf is None or isinstance(leaf, bool) or is_setting else (
        type(leaf).__qualname__
    )


class SizeTable:
    """Merges the dimensions of one structure that are always equal, and names them.

    Dimensions stay together as long as they were equal in every call seen; the batch
    (dimension 0) is never merged with another dimension.

    Args:
        names: `CallShape.names` of the structure.
        positional: What the positional arguments are called.
    """

    def __init__(self, names: tuple[str, ...], positional: Sequence[str] = ()) -> None:
        self.names = names
        self._spoken = tuple(_spoken(name, positional) for name in names)
        self._index = {name: i for i, name in enumerate(names)}
        self._index.update({name: i for i, name in enumerate(self._spoken)})
        self._group: list[int] = []
        self._constant: tuple[int, ...] = ()
        self._varies: list[bool] = []
        self._shown: list[tuple[str, int]] = []
        self._named: dict[tuple[int, ...], Mapping[str, int]] = {}
        """By sizes, what `named` has returned."""

    def add(self, sizes: tuple[int, ...]) -> None:
        """Take note of a call's sizes: they may part what was together."""
        if not self._constant:
            self._constant, self._varies = sizes, [False] * len(sizes)
        together: dict[tuple[int, bool, int], int] = {}
        old = self._group or [0] * len(sizes)
        self._group = [
            together.setdefault((old[i], self.names[i].endswith(".0"), size), i)
            for i, size in enumerate(sizes)
        ]
        self._varies = [
            varies or size != first
            for varies, size, first in zip(
                self._varies, sizes, self._constant, strict=True
            )
        ]
        self._show()

    def _show(self) -> None:
        """Settle which sizes are named: those that vary."""
        columns = sorted(set(self._group))
        varying = [c for c in columns if self._varies[c]] or columns
        self._shown = [(self._name(c), c) for c in varying]
        self._named = {}

    def _name(self, column: int) -> str:
        """Return what a group's size is called."""
        named = zip(self._spoken, self._group, strict=True)
        return min((name for name, c in named if c == column), key=_rank)

    def spoken_names(self) -> list[str]:
        """Return what all sizes are called, those that are always equal once."""
        return [self._name(column) for column in sorted(set(self._group))]

    def knows(self, name: str) -> bool:
        """Whether a size is called so."""
        return name in self._index

    def named(self, sizes: tuple[int, ...]) -> Mapping[str, int]:
        """Return the sizes that vary, by name; all of them while none has varied."""
        named, shown = self._named, self._shown  # another thread may add a call's sizes
        found = named.get(sizes)
        if found is None:
            found = {name: sizes[column] for name, column in shown}
            if len(named) >= _MOST_NAMED:
                named.clear()
            named[sizes] = found
        return found

    def fill(
        self, shape: Mapping[str, int], others: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return all sizes of a shape given by name, the others as they are given.

        Raises:
            MimoseError: A name is not one of this structure's, or a size is no
                positive integer.
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
            sizes = [
                size if column == chosen else other
                for column, other in zip(group, sizes, strict=True)
            ]
        return tuple(sizes)

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
        table._group = list(map(int, state["group"]))
        table._constant = tuple(map(int, state["constant"]))
        table._varies = list(map(bool, state["varies"]))
        table._show()
        return table


def _spoken(name: str, positional: Sequence[str]) -> str:
    """Return a size's name, with the argument's in place of its position."""
    first, dot, rest = name.partition(".")
    is_known = first.isdecimal() and int(first) < len(positional)
    return positional[int(first)] + dot + rest if is_known else name


def _rank(name: str) -> int:
    """Return which of several names is to stand for all: that of the lowest rank."""
    *path, _ = name.split(".")
    if path and path[-1] in _ABOUT:
        return _ABOUT.index(path[-1])
    found = [i for i, word in enumerate(_ASIDE, start=1) if word in name]
    return len(_ABOUT) + max(found, default=0)
