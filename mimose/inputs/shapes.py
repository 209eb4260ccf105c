"""From a call's arguments to its structure and its sizes.

Two calls with one structure differ in their sizes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch

Structure: TypeAlias = tuple[object, ...]

_MANY = ".*"
"""Ends the path of a list's texts and numbers: they are data, and count as one."""


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
    named: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
    while named:
        name, value = named.pop()
        if isinstance(value, dict):
            named += value.items()
        elif isinstance(value, torch.Tensor) and (
            ("mask" in name and not value.dtype.is_floating_point and value.dim() <= 2)
            if isinstance(name, str)
            else value.dtype == torch.bool
        ):
            is_readable = value.device.type == "cpu" and not value.is_nested
            if not is_readable or not bool(value.all()):
                hiding.append(str(name))
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
    return (
        leaf
        if leaf is None or isinstance(leaf, bool) or is_setting
        else (type(leaf).__qualname__)
    )
