"""Which calls cost the same at the same sizes, and so share what is learned."""

from __future__ import annotations

import collections
import hashlib
import types
import weakref
from collections.abc import Hashable

import torch
from torch import nn

from mimose.inputs.shapes import CallShape

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
    """Return a key that is equal for units that cost the same, called the same way.

    It holds the classes and settings of the module and everything in it, the training
    flags, and the shapes, types and `requires_grad` of its parameters. Settings that a
    forward changes, such as a counter of its calls, make it another each time: read it
    once.

    Args:
        module: The unit.
    """
    return digest(
        (
            tuple(_describe(inner) for inner in module.modules()),
            tuple(
                (tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters()
            ),
        )
    )


def family_key(unit: str, shape: CallShape, device: torch.device) -> Hashable:
    """Return a key that is equal for calls that cost the same at the same sizes.

    Args:
        unit: What `module_key` said of the unit.
        shape: What it is called with; its structure counts, and the autocast state.
        device: Where it runs.
    """
    return unit, autocast_state(device), shape.structure


def autocast_state(device: torch.device) -> Hashable:
    """Return what autocast is set to for the device and for the CPU; None if off."""
    is_on = torch.is_autocast_enabled
    if not (is_on("cpu") or (device.type != "cpu" and is_on(device.type))):
        return None
    kinds = device.type, "cpu"
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in kinds
    )


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
    return _class_name(type(module)), module.training, attention, settings


_class_names: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_n_namesakes: collections.Counter[str] = collections.Counter()


def _class_name(cls: type) -> str:
    """Return a class's full name; classes made by one function are numbered."""
    found = _class_names.get(cls)
    if found is None:
        name = f"{cls.__module__}.{cls.__qualname__}"
        found = _class_names[cls] = f"{name}:{_n_namesakes[name]}"
        _n_namesakes[name] += 1
    return found


def _setting(value: object) -> Hashable:
    """Rates differ from layer to layer; what matters is whether they are zero."""
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
