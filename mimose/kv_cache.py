"""Keeping transformers models from making a key-value cache in training."""

from __future__ import annotations

import inspect

from torch import nn


def caching_modules(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that would make a cache unless told otherwise.

    A kept layer would hold its keys and values, and a recomputed one cannot make
    them. Such a module's configuration has `use_cache` on and its forward takes it;
    the configuration is saved with the model, so the call is changed instead.
    """
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not _makes_cache(module):
            continue
        found.append(module)
        inside.update(id(inner) for inner in module.modules())
    return found


def _makes_cache(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    if not getattr(config, "use_cache", False):
        return False
    return "use_cache" in inspect.signature(module.forward).parameters
