"""Prevents transformers models from making a key-value cache in training."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mimose.model.compiled import unwrapped
from mimose.model.patch import Patch


def without_caches(model: nn.Module) -> Iterator[Patch]:
    """Patch the outermost modules that make a cache by default.

    A cache would hold keys and values of kept layers, and recomputed layers cannot fill
    it. Such a module's configuration has `use_cache` on, and its forward takes it. The
    configuration is saved with the model, so mimose changes the call instead. With a
    cache attention may round differently, and attends across packed texts.
    """
    inside: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if id(module) in inside or not getattr(config, "use_cache", False):
            continue
        names = list(inspect.signature(unwrapped(module).forward).parameters)
        if "use_cache" in names:
            place = names.index("use_cache")
            yield Patch(module, functools.partial(_without_cache, module, place))
            inside.update(id(inner) for inner in module.modules())


def _without_cache(
    module: nn.Module,
    place: int,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Pass ``use_cache=False`` to a call in training that does not set it.

    A caller can still ask for a cache; None means the configuration's value.
    """
    is_on = module.training and torch.is_grad_enabled()
    if is_on and len(args) <= place and kwargs.get("use_cache") is None:
        kwargs["use_cache"] = False
    return original(*args, **kwargs)
