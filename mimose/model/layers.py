"""Finds the layers of a model."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from mimose.exceptions import CheckpointingConflictError, MimoseError, NoUnitsError
from mimose.model.compiled import wrappers
from mimose.torch_private import CHECKPOINT_WRAPPED, submodules_of

Predicate: TypeAlias = Callable[..., bool]
LayersSpec: TypeAlias = (
    str | type[nn.Module] | Predicate | Iterable[str | type[nn.Module]] | None
)
Named: TypeAlias = tuple[str, nn.Module]

_WRAPPED = (
    "is wrapped by torch's checkpoint_wrapper: attach to the model without the wrapper"
)
_SWITCHED_ON = (
    "has its own activation checkpointing switched on: call "
    "model.gradient_checkpointing_disable(), or set gradient_checkpointing = False. If "
    "a Trainer switches it on, set TrainingArguments(gradient_checkpointing=False); "
    "TRL has it on by default: SFTConfig(gradient_checkpointing=False)"
)


def find_layers(model: nn.Module, layers: LayersSpec = None) -> tuple[Named, ...]:
    """Return the qualified names and modules of the layers, in module order.

    With None, it takes the first of these that finds something: Hugging Face's
    checkpointable layers; modules repeated in a ``ModuleList`` or ``Sequential`` (all
    of a class, if two siblings have the same parameter shapes); the classes in
    ``_no_split_modules``; the elements of any ``ModuleList``. If `torch.compile` wraps
    such a module, the wrapper is the layer.

    Args:
        model: The model.
        layers: None to search; or a module class, a qualified name (of a module, or
            of a ``ModuleList`` for its elements), several of these, or a predicate
            that takes ``(module)`` or ``(name, module)``.

    Raises:
        NoUnitsError: Nothing was found, or a name is not in the model.
        MimoseError: The model is scripted.
    """
    if isinstance(model, torch.jit.ScriptModule):
        msg = (
            "the model is scripted as a whole (torch.jit), so mimose cannot plan its "
            "layers. Train it without torch.jit, or script only parts of it"
        )
        raise MimoseError(msg)
    if layers is None:
        found = _discover(model)
    elif callable(layers) and not isinstance(layers, (type, nn.Module)):
        found = _by_predicate(model, layers)
    else:
        is_one = isinstance(layers, (str, type, nn.Module))
        items: Any = [layers] if is_one or not isinstance(layers, Iterable) else layers
        found = [named for item in items for named in _by_item(model, item)]
    compiled = wrappers(model)
    found = [compiled.get(id(named[1]), named) for named in found]
    found = _outermost(model, found)
    if not found:
        msg = (
            f"no layers found in {type(model).__name__}"
            + ("" if layers is None else f" for layers={layers!r}")
            + ": name them with attach(layers=...), by the class of the repeated "
            "layers, their qualified names, or a predicate over modules"
        )
        raise NoUnitsError(msg)
    return tuple(found)


def _discover(model: nn.Module) -> list[Named]:
    searches = (_checkpointable, _repeated, _no_split, _listed)
    return next(filter(None, (search(model) for search in searches)), [])


def _checkpointable(model: nn.Module) -> list[Named]:
    """Return transformers' `GradientCheckpointingLayer`s, without an import."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if any(c.__name__ == "GradientCheckpointingLayer" for c in type(module).__mro__)
    ]
    layers = {id(module) for _, module in found}
    return [  # a stage of several such layers is one itself, in Swin
        (name, module)
        for name, module in found
        if not any(id(m) in layers for m in module.modules() if m is not module)
    ]


def _repeated(model: nn.Module) -> list[Named]:
    classes: set[type[nn.Module]] = set()
    for container in _lists(model):
        shapes: set[object] = set()
        for child in filter(_is_block, container.children()):
            shape = type(child), tuple(tuple(p.shape) for p in child.parameters())
            if shape in shapes:
                classes.add(type(child))
            shapes.add(shape)
    return _elements(model, classes)


def _lists(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]


def _elements(model: nn.Module, classes: set[type[nn.Module]]) -> list[Named]:
    inside = {id(child) for each in _lists(model) for child in each.children()}
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module) in classes and id(module) in inside
    ]


def _no_split(model: nn.Module) -> list[Named]:
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [(n, m) for n, m in model.named_modules() if type(m).__name__ in names]


def _listed(model: nn.Module) -> list[Named]:
    classes = {
        type(child)
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for child in module.children()
        if _is_block(child)
    }
    return _elements(model, classes)


def _is_block(module: nn.Module) -> bool:
    """Whether a module is neither a container nor a single layer of `torch.nn`."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    has_parameters = next(module.parameters(), None) is not None
    is_single = next(module.children(), None) is None
    from_torch = type(module).__module__.startswith("torch.nn")
    return has_parameters and not (is_single and from_torch)


def _by_predicate(model: nn.Module, predicate: Predicate) -> list[Named]:
    takes_name = False
    try:
        inspect.signature(predicate).bind(model)
    except TypeError:  # one argument is too few
        takes_name = True
    return [
        (name, module)
        for name, module in model.named_modules()
        if module is not model
        and (predicate(name, module) if takes_name else predicate(module))
    ]


def _by_item(model: nn.Module, item: object) -> list[Named]:
    if isinstance(item, type):
        kind: type[nn.Module] = item
        return [(n, m) for n, m in model.named_modules() if isinstance(m, kind)]
    modules = dict(model.named_modules())
    if not isinstance(item, str) or item not in modules:
        msg = f"layers: {_why_not(model, modules, item)}"
        raise NoUnitsError(msg)
    module = modules[item]
    if isinstance(module, nn.ModuleList):
        return [(f"{item}.{name}", child) for name, child in module.named_children()]
    return [(item, module)]


def _why_not(model: nn.Module, modules: Mapping[str, nn.Module], item: object) -> str:
    """Return why an item finds nothing, and what the user may have meant."""
    if not isinstance(item, str):
        return (
            f"pass a module's class or qualified name, several of these, or a "
            f"predicate over modules, not {type(item).__name__} objects"
        )
    here = f"no module named {item!r} in {type(model).__name__}"
    classes = {type(module).__name__ for module in modules.values()}
    if item in classes:
        return f"{here}; it is the name of a class: pass the class, layers={item}"
    near = difflib.get_close_matches(item, [*modules, *classes])
    if near:
        return f"{here}; did you mean {' or '.join(near)}?"
    return f"{here}; print(model) shows all names"


def _outermost(model: nn.Module, found: list[Named]) -> list[Named]:
    """Drop repeats, the model itself and layers inside other layers."""
    chosen = {id(module): (name, module) for name, module in found}
    chosen.pop(id(model), None)
    inside = {
        id(inner)
        for _, module in chosen.values()
        for inner in module.modules()
        if inner is not module
    }
    order = [id(module) for module in model.modules()]
    return [chosen[key] for key in order if key in chosen and key not in inside]


def raise_if_checkpointed(model: nn.Module) -> None:
    """Check that no other code recomputes parts of this model.

    Raises:
        CheckpointingConflictError: A module's own checkpointing is switched on, or a
            module is wrapped by `checkpoint_wrapper`.
    """
    for name, module in model.named_modules():
        wrapped = CHECKPOINT_WRAPPED in submodules_of(module)
        if wrapped or getattr(module, "gradient_checkpointing", False) is True:
            msg = (
                f"{name or 'the model'} ({type(module).__name__}) "
                f"{_WRAPPED if wrapped else _SWITCHED_ON}. mimose decides what is "
                f"recomputed; with both, layers would be recomputed twice."
            )
            raise CheckpointingConflictError(msg)
