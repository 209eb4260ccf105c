"""From a call's arguments to its structure and its named sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch

from mimose.inputs.lists import Alike, Lists, alike
from mimose.inputs.size_names import COUNT

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
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    texts: Texts | None = None,
    lists: Lists | None = None,
) -> CallShape:
    """Describe a call's arguments, nested containers included.

    A jagged tensor has the sizes of its batch and of its values, all rows together.

    Args:
        args: What it is called with.
        kwargs: What it is called with by name.
        texts: Knows which texts are data; without it none are.
        lists: Knows which lists are told by their number; without it none are.
    """
    return _describe(list(_leaves(args, kwargs, lists)), texts)


def _describe(leaves: Sequence[tuple[str, object]], texts: Texts | None) -> CallShape:
    structure: list[object] = []
    names: list[str] = []
    sizes: list[int] = []
    for path, leaf in leaves:
        if isinstance(leaf, Alike):
            names.append(f"{path}.{COUNT}")
            sizes.append(leaf.number)
            path, leaf = f"{path}{_ANY}", leaf.one
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


def note_texts(args: Sequence[Any], kwargs: Mapping[str, Any], texts: Texts) -> None:
    """Take note of the texts among a call's arguments.

    Args:
        args: What it is called with.
        kwargs: What it is called with by name.
        texts: Takes note of them.
    """
    for path, leaf in _leaves(args, kwargs):
        if isinstance(leaf, str):
            texts.note(path, leaf)


def note_lists(args: Sequence[Any], kwargs: Mapping[str, Any], lists: Lists) -> None:
    """Take note of the lists of tensors among a call's arguments.

    Args:
        args: What it is called with.
        kwargs: What it is called with by name.
        lists: Takes note of them.
    """
    for path, value in _containers(args, kwargs):
        if isinstance(value, (list, tuple)):
            lists.note(path, value)


def fast_key(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    texts: Texts | None = None,
    lists: Lists | None = None,
) -> tuple[object, ...]:
    """Return a hashable key that is equal for calls of the same shape.

    It tells no less apart than `call_shape`, costs a microsecond, and serves to find
    the `CallShape` of a call seen before.
    """
    key: list[object] = []
    given: Iterable[tuple[str | int, Any]] = (*enumerate(args), *kwargs.items())
    for path, value in given:
        key.append(path)
        if type(value) is torch.Tensor and not value.is_nested:
            key += value.shape, value.dtype, value.requires_grad, value.device
        else:
            key.append(_fast(path, value, texts, lists))
    return tuple(key)


def _fast(
    path: str | int, value: Any, texts: Texts | None, lists: Lists | None
) -> object:
    if isinstance(value, torch.Tensor):
        shape = _dimensions(value) if value.is_nested else value.shape
        return (shape, value.dtype, value.requires_grad, value.device)
    if value is None or value is True or value is False:
        return value
    if isinstance(value, (int, float)):
        return type(value)
    if isinstance(value, str):
        return _token(str(path), value, texts)
    return _describe(list(_visit(str(path), value, lists)), texts)


def _leaves(
    args: Sequence[Any], kwargs: Mapping[str, Any], lists: Lists | None = None
) -> Iterator[tuple[str, object]]:
    for index, value in enumerate(args):
        yield from _visit(str(index), value, lists)
    for name in sorted(kwargs):
        yield from _visit(name, kwargs[name], lists)


def _visit(
    path: str, value: object, lists: Lists | None = None
) -> Iterator[tuple[str, object]]:
    if lists is not None and lists.vary(path) and isinstance(value, (list, tuple)):
        found = alike(value)
        if found is not None:
            yield path, found
            return
    items = _items(path, value)
    if items is None:
        yield path, value
    else:
        for place, item in items:
            yield from _visit(place, item, lists)


def _items(path: str, value: object) -> Iterable[tuple[str, object]] | None:
    """Return what a container holds, by path; None of anything else."""
    if isinstance(value, torch.Tensor) or value is None:
        return None
    if isinstance(value, Mapping):
        return [(f"{path}.{key}", value[key]) for key in value]
    if isinstance(value, (list, tuple)):
        return [(_place(path, i, item), item) for i, item in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(f"{path}.{f.name}", getattr(value, f.name)) for f in fields(value)]
    return None


def _place(path: str, index: int, item: object) -> str:
    is_one_of_many = isinstance(item, _MANY) and not isinstance(item, bool)
    return f"{path}{_ANY}" if is_one_of_many else f"{path}.{index}"


def _containers(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, object]]:
    waiting: list[tuple[str, object]] = [(str(i), v) for i, v in enumerate(args)]
    waiting.extend(kwargs.items())
    while waiting:
        path, value = waiting.pop()
        items = _items(path, value)
        if items is not None:
            yield path, value
            waiting.extend(items)


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
    would have to wait to be told, and every mask is one that may: see
    `mimose.inputs.variants`.
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
