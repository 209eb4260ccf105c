"""Prevents transformers models from making a key-value cache in training."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mimose.inputs.compiled import unwrapped
from mimose.inputs.patch import Patch

_log = logging.getLogger(__name__)


def caching_modules(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that make a cache by default.

    A cache would hold keys and values of kept layers, and recomputed layers cannot fill
    it. Such a module's configuration has `use_cache` on, and its forward takes it. The
    configuration is saved with the model, so mimose changes the call instead.
    """
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not _makes_cache(module):
            continue
        found.append(module)
        inside.update(id(inner) for inner in module.modules())
    return found


def warn_of_cache(modules: list[nn.Module]) -> None:
    """Warn that no cache is made, and how this can change results.

    Args:
        modules: What `caching_modules` returned. Encoders get no warning, because they
            never have a cache.
    """
    decoders = [each for each in modules if not _is_encoder(each)]
    names = ", ".join(dict.fromkeys(type(module).__name__ for module in decoders))
    if not names:
        return
    _log.warning(
        "mimose: %s is called with use_cache=False in training, although its "
        "configuration has use_cache=True, because a recomputed layer cannot fill a "
        "key-value cache. With a cache attention may round differently, and attends "
        "across packed texts. To compare with runs without mimose, and to silence "
        "this, "
        "set use_cache = False in the configuration",
        names,
    )


def _makes_cache(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    if not getattr(config, "use_cache", False):
        return False
    return "use_cache" in inspect.signature(unwrapped(module).forward).parameters


def _is_encoder(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    has_choice = "is_decoder" in getattr(type(config), "__dataclass_fields__", ())
    roles = ("is_decoder", "is_encoder_decoder")
    return has_choice and not any(getattr(config, role, False) for role in roles)


def without_cache(module: nn.Module) -> Patch:
    """Pass ``use_cache=False`` to each call in training that does not set it.

    A caller can still ask for a cache; None means the configuration's value.
    """
    names = list(inspect.signature(unwrapped(module).forward).parameters)
    place = names.index("use_cache")

    def run(
        original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        is_on = module.training and torch.is_grad_enabled()
        if is_on and len(args) <= place and kwargs.get("use_cache") is None:
            kwargs["use_cache"] = False
        return original(*args, **kwargs)

    return Patch(module, run)
