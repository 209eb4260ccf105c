"""Which calls cost the same at the same sizes, and so share what is learned."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import nn

from mimose.shapes import CallShape

_POSITION = ("layer_idx", "layer_id", "layer_number", "training")


def family_key(module: nn.Module, shape: CallShape, device: torch.device) -> Hashable:
    """Return a key that is equal for calls that cost the same at the same sizes.

    It holds the classes and settings of the module and everything in it, the shapes,
    types and `requires_grad` of its parameters, its children's training flags, the
    autocast state and the structure of the arguments.

    Args:
        module: The unit.
        shape: What it is called with.
        device: Where it runs.
    """
    return (
        tuple(_describe(inner) for inner in module.modules()),
        tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters()),
        autocast_state(device),
        shape.structure,
    )


def autocast_state(device: torch.device) -> Hashable:
    """Return what autocast is set to for the device and for the CPU; None if off."""
    kind = device.type
    if torch.is_autocast_enabled(kind) or torch.is_autocast_enabled("cpu"):
        return tuple(
            torch.get_autocast_dtype(each) if torch.is_autocast_enabled(each) else None
            for each in (kind, "cpu")
        )
    return None


def _describe(module: nn.Module) -> Hashable:
    settings = tuple(
        (name, _setting(value))
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in _POSITION
        and isinstance(value, (bool, int, float, str, tuple))
    )
    config = getattr(module, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    return type(module), module.training, attention, settings


def _setting(value: object) -> Hashable:
    """Rates differ from layer to layer; what matters is whether they are zero."""
    if isinstance(value, float):
        return value == 0.0
    if isinstance(value, tuple):
        return tuple(_setting(item) for item in value)
    return value if isinstance(value, (bool, int, str)) else type(value).__qualname__
