"""Which calls cost the same: keys of layers, and of what else changes costs."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Hashable

import torch
from torch import nn

_POSITION = ("layer_idx", "layer_id", "layer_number", "training")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_SETTINGS = (bool, int, float, str, tuple, *_FUNCTIONS)


def digest(key: Hashable) -> str:
    """Return a short text that is equal for equal keys, in every process.

    Args:
        key: Nested tuples of numbers, texts, types of torch and names of classes.
    """
    return hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()


def module_key(module: nn.Module) -> str:
    """Return a key that is equal for layers that cost the same in equal calls.

    It holds the classes and settings of the module and all modules inside, the training
    flags, and the shapes, dtypes and `requires_grad` of its parameters. Read it only
    once, because a forward may change settings, such as a counter of its calls.

    Args:
        module: The layer.
    """
    return digest(
        (
            tuple(_describe(inner) for inner in module.modules()),
            tuple(
                (tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters()
            ),
        )
    )


def autocast_state(device: torch.device) -> Hashable:
    """Return autocast's dtypes for the device and the CPU; None if it is off."""
    kinds, is_on = (device.type, "cpu"), torch.is_autocast_enabled
    if not any(map(is_on, kinds)):
        return None
    return tuple(torch.get_autocast_dtype(k) if is_on(k) else None for k in kinds)


def _describe(module: nn.Module) -> Hashable:
    settings = tuple(
        (name, _setting(value))
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in _POSITION
        and isinstance(value, _SETTINGS)
    )
    config = getattr(module, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    cls = type(module)
    name = f"{cls.__module__}.{cls.__qualname__}"
    return name, module.training, attention, settings


def _setting(value: object) -> Hashable:
    """Return what counts of a setting: of floats (rates) only whether they are 0."""
    if isinstance(value, float):
        return value == 0.0
    if isinstance(value, tuple):
        return tuple(_setting(item) for item in value)
    if isinstance(value, _FUNCTIONS):
        return value.__module__, value.__qualname__
    return value if isinstance(value, (bool, int, str)) else type(value).__qualname__


def autocast_keeps_copies() -> bool:
    """Whether autocast is on, and keeps its copies of weights."""
    if not torch.is_autocast_cache_enabled():
        return False
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu", "cpu" if accelerator is None else accelerator.type}
    return any(map(torch.is_autocast_enabled, kinds))
