"""The structure and the sizes of a call's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

_MANY = ".*"
"""Ends the path of texts and numbers in a list, which are data and count as one."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """The structure and sizes of a call's arguments."""

    structure: tuple[object, ...]
    """The path of each argument with its dtype and rank, or its value or type."""
    names: tuple[str, ...]
    """`path.dimension` of every dimension of every tensor."""
    sizes: tuple[int, ...]
    """The dimensions, in the order of `names`."""


def call_shape(args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallShape:
    """Describe a call's arguments, with nested containers.

    A jagged tensor has the sizes of its batch and of its values, all rows together. A
    text that is an argument itself is a setting and counts by value. Texts and numbers
    in a container count by type.

    Args:
        args: The arguments.
        kwargs: The keyword arguments.
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


def argument_values(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[str, str], ...] | None:
    """Return paths and values of a call's arguments, tensors aside.

    None if one is an object that may change while it stays the same.
    """
    leaves = [
        leaf for leaf in _leaves(args, kwargs) if not isinstance(leaf[1], torch.Tensor)
    ]
    if not {type(value) for _, value in leaves} <= _VALUES:
        return None
    return tuple((path, repr(value)) for path, value in leaves)


_VALUES = {type(None), bool, int, float, complex, str, torch.dtype, torch.device}


def fast_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[object, ...]:
    """Return a hashable key, to look up the `CallShape` of an earlier call.

    Calls with equal keys have equal shapes. The key takes a microsecond.
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


def partial_masks(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, waits: bool = False
) -> tuple[str, ...]:
    """Return the names of masks that hide something, or may do so.

    Attention runs differently under a mask of all ones. To read a mask on an
    accelerator, the host must wait; otherwise each mask there may hide something.

    Args:
        args: The model's arguments.
        kwargs: Its keyword arguments.
        waits: Whether the host waits.
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
            is_readable = waits or value.device.type == "cpu"
            is_readable = is_readable and not value.is_nested
            if not is_readable or not bool(value.all()):
                hiding.append(str(name))
    return tuple(sorted(hiding))


def _dimensions(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's sizes; of a nested one, the batch and its values' sizes."""
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
    """Return what stands for an argument: settings by value, others by type."""
    is_setting = isinstance(leaf, str) and "." not in path
    is_value = leaf is None or isinstance(leaf, bool) or is_setting
    return leaf if is_value else type(leaf).__qualname__
