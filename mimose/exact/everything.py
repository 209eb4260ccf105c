"""All that can be seen of a layer at a moment, to be compared with another moment's."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mimose.exact.attributes import own_attributes
from mimose.exact.global_flags import flags_now
from mimose.tensors import version

_VALUES = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_NOT_ENTERED = (nn.Module, type, types.ModuleType, types.FunctionType)
_DEPTH = 3
_MOST_ITEMS = 200
"""Of a container or an object that is looked at."""


def state_of(modules: Iterable[nn.Module]) -> Any:
    """Return what modules have now, and what is set of torch.

    Whoever compares it with a later one must hold what there was: what is replaced
    shows by its identity. It takes some microseconds a module.

    Args:
        modules: The modules.
    """
    tables = [_of(vars(module), _DEPTH) for module in modules]
    return tables, flags_now()


def _of(value: Any, depth: int) -> Any:
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), version(value), value.requires_grad
    own = value if isinstance(value, _CONTAINERS) else own_attributes(value)
    if own is None or isinstance(value, _NOT_ENTERED):
        return id(value)
    if not depth or len(own) > _MOST_ITEMS:
        return id(value), len(own)
    if isinstance(own, dict):
        return id(value), [(name, _of(item, depth - 1)) for name, item in own.items()]
    return id(value), [_of(item, depth - 1) for item in own]
