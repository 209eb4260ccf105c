"""Compiled and scripted code that a layer runs, as far as that shows before it runs.

Note: [What a layer names]
Code of `torch.compile` and of TorchScript need not be a module of the layer's: it may
be a function that the layer's forward finds among the globals, in a closure, or in an
attribute. So what can be reached is looked at: the modules inside and their attributes,
what their forwards name, and the same of functions and modules named there. What a
forward finds in other ways shows in the graph that its first call makes.

Note: [Why scripted layers are kept]
TorchScript's executor watches the first run of a function and rewrites it for later
ones, and again for other sizes. A recomputation is a later run than its forward, and
may save other tensors, in another order.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from mimose.inputs.compiled import is_compiled
from mimose.tensors import operators_of
from mimose.torch_private import (
    COMPILED_FROM,
    COMPILED_NODE,
    NOT_COMPILED,
    SCRIPTED_NODE,
    SCRIPTED_TYPES,
)

SCRIPTED = (
    "it runs TorchScript, which may save other tensors each time that it runs; "
    "train it without torch.jit to have it recomputed"
)
_COMPILED = "compiled"
_SCRIPTED = "scripted"
_MOST = 20_000
"""Things looked at of one layer."""
_NOT_ENTERED = frozenset(("torch", "numpy", "mimose", *sys.stdlib_module_names))
"""Packages whose functions call no code of the user's that they are not given."""


class CodeInside:
    """What a layer runs besides plain Python: Note: [What a layer names].

    Args:
        root: The layer.

    Attributes:
        is_compiled: Whether `torch.compile` made a part of it.
        is_scripted: Whether TorchScript did.
    """

    def __init__(self, root: nn.Module) -> None:
        self._seen: dict[int, Any] = {}
        """Alive as long as their identities count."""
        found = set(self._look(root))
        self.is_compiled = _COMPILED in found
        self.is_scripted = _SCRIPTED in found

    def _look(self, root: object) -> Iterator[str]:
        left = [root]
        while left and len(self._seen) < _MOST:
            value = left.pop()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, SCRIPTED_TYPES):
                yield _SCRIPTED
            elif isinstance(value, nn.Module):
                if is_compiled(value):
                    yield _COMPILED
                left += _of_module(value)
            elif isinstance(value, FunctionType):
                if _is_made_by_compiler(value):
                    yield _COMPILED
                left += _of_function(value)
            else:
                left += _inside(value)


def _is_made_by_compiler(function: FunctionType) -> bool:
    own = vars(function)
    return COMPILED_FROM in own and NOT_COMPILED not in own


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    return ()


def _of_module(module: nn.Module) -> Iterator[object]:
    yield from module.children()
    own = vars(module)
    values = [value for name, value in own.items() if not name.startswith("_")]
    if not _is_entered(type(module).__module__):
        yield from values
        return
    forward = own.get("forward", type(module).forward)
    methods = [forward, *_of_class(type(module), _names(forward))]
    names = set[str]().union(*map(_names, methods))
    yield from methods
    yield from _reached(values, names)


def _of_class(cls: type, names: Iterable[str]) -> Iterator[object]:
    """Return what a class has of the names, and of those that its methods name."""
    left, seen = list(names), set[str]()
    while left:
        name = left.pop()
        owner = next((c for c in cls.__mro__ if name in vars(c)), None)
        if name in seen or owner is None or not _is_entered(owner.__module__):
            continue
        seen.add(name)
        value = vars(owner)[name]
        yield value
        left += _names(getattr(value, "__func__", value))


def _of_function(function: FunctionType) -> Iterator[object]:
    yield from _reached(_closed_over(function), _names(function))
    yield from function.__defaults__ or ()
    yield getattr(function, "__wrapped__", None)
    yield vars(function).get(COMPILED_FROM)
    if not _is_entered(function.__module__):
        return
    names = _names(function)
    own = function.__globals__
    yield from _reached([own[name] for name in names if name in own], names)


def _closed_over(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _reached(values: Iterable[object], names: Iterable[str]) -> Iterator[object]:
    """Return values, and attributes of these that have one of some names.

    Modules and functions are looked at for themselves.
    """
    left, seen = list(values), dict[int, object]()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield value
        own = getattr(value, "__dict__", {})
        if isinstance(value, (nn.Module, FunctionType)) or (
            isinstance(value, ModuleType) and not _is_entered(value.__name__)
        ):
            continue
        left += [own[name] for name in names if name in own]


def _names(function: object) -> set[str]:
    """Return all names in a function's code, and in that of functions made inside."""
    code = getattr(function, "__code__", None)
    left: list[object] = [code]
    found: set[str] = set()
    while left:
        code = left.pop()
        if isinstance(code, CodeType):
            found.update(code.co_names)
            left += code.co_consts
    return found


def _is_entered(package: str | None) -> bool:
    return (package or "").partition(".")[0] not in _NOT_ENTERED


def code_in_graph(output: object, began: int) -> tuple[bool, bool]:
    """Return whether compiled, and whether scripted code made a part of a graph.

    Args:
        output: What a call has returned.
        began: What `next_sequence_number` said before.
    """
    names = operators_of(output, began)
    return (
        any(name.startswith(COMPILED_NODE) for name in names),
        any(name.endswith(SCRIPTED_NODE) for name in names),
    )
