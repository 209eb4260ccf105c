"""Makes a recomputation find the layer's state as its forward found it.

Note: [As a call finds it]
A layer reads its attributes (a dropout's ``p``, a flag, a list), modules, weights,
buffers and hooks when its forward runs, and again when it is recomputed. Other code may
change them between the two. A recomputation that ends early may also leave a value that
the rest of the forward would have reset. All of these are values in dictionaries. So
a `Layer` records them when a call enters: all values by identity, and the content of
lists, dicts and sets as well. If a value has changed by the recomputation, the layer
restores it for the recomputation, and afterwards puts back the newer value. The same
holds for attributes of plain objects that layers hold, such as a configuration. While
nothing changes, one record serves all calls.

The record is held until the backward. If modules inside the layer have hooks that were
not there in the last call, the call is kept: what these hooks collect may refer to the
graph that holds the record, a cycle that is never freed.

A tensor that is replaced is restored like any other value. If one was edited in place,
the recomputation raises an error. Writes through ``.data`` cannot be detected.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from mimose.model.patch import Patch
from mimose.model.sharding import is_sharded
from mimose.tensors import tensors_in
from mimose.torch_private import (
    buffers_of,
    forward_hooks_of,
    global_forward_hooks,
    parameters_of,
    sharded_weights,
    submodules_of,
    version_of,
)

Key: TypeAlias = tuple[int, str]
"""The place of a tensor: its table, by identity, and its name there."""

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes of a module that are torch's own tables."""
_LEARNS = operator.attrgetter("requires_grad")
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = frozenset((list, set, deque, *_DICTS))
MOST_ITEMS = 10_000
"""Containers with more items are not recorded: to read dicts of 50,000 in three layers
took 230 ms a step."""
_MOST_OF_OBJECTS = 256
"""The same for containers that plain objects hold. All layers may share one, such as a
configuration, and read it in each call: a thousand labels take 60 µs."""
_NO_OBJECTS = (
    torch.Tensor,
    nn.Module,
    ModuleType,
    MethodType,
    FunctionType,
    type,
    Patch,  # it counts calls
)
_WITH_GRAPH: Any = object()
"""Stands for a tensor with a graph, which would keep a chain of steps alive."""


class State:
    """The content of some dictionaries now: Note: [As a call finds it].

    Args:
        tables: The dictionaries.
        others: More tensors that belong to the state.

    Attributes:
        tables: The dictionaries.
        tensors: All tensors in them, by place.
        trouble: Why a layer that reads this may not run again; "" if it may.
        has_graph: Whether a tensor has a `grad_fn`: weights made for one call, or an
            attribute that the layer itself computed.
    """

    def __init__(
        self, tables: list[dict[str, Any]], others: Iterable[torch.Tensor] = ()
    ) -> None:
        self.tables = tables
        self.tensors: dict[Key, torch.Tensor] = {}
        self.trouble = ""
        self.has_graph = False
        self._empty = [table for table in tables if not table]
        """Most tables of torch's modules, and quicker to read."""
        self._filled = [table for table in tables if table]
        self._values = list(chain.from_iterable(map(dict.values, self._filled)))
        self._copies = list(map(dict, tables))
        self.graph_ids: dict[Key, int] = {}
        """Of what holds a tensor with a graph, by place."""
        self._containers: list[Any] = []
        self._contents: list[Any] = []
        for table, copied in zip(tables, self._copies, strict=True):
            for name, value in copied.items():
                if name not in INTERNAL:
                    self._note(table, copied, name, value)
        self.tensors.update(((id(t), ""), t) for t in others)
        self._all = list(self.tensors.values())
        self._learn = list(map(_LEARNS, self._all))

    def _note(
        self, table: dict[str, Any], copied: dict[str, Any], name: str, value: Any
    ) -> None:
        """Record the tensors in one value, and its content."""
        is_container, is_modules = type(value) in _CONTAINERS, "training" in copied
        most = MOST_ITEMS if is_modules else _MOST_OF_OBJECTS
        if is_container and _has_at_most(most, value):
            self._containers.append(value)
            self._contents.append(_copied(value))
        elif is_container or not isinstance(value, (torch.Tensor, tuple)):
            return
        for place, tensor in enumerate(tensors_in(value)):
            self.has_graph = self.has_graph or tensor.grad_fn is not None
            if tensor.grad_fn is not None and is_modules:
                self.trouble = f"its attribute {name!r} holds a tensor with a graph"
                copied[name] = _WITH_GRAPH
                self.graph_ids[id(table), name] = id(value)
            elif tensor.is_inference():
                self.trouble = (
                    f"its tensor {name!r} was made under torch.inference_mode(), so "
                    f"edits of it cannot be seen"
                )
            else:
                key = name if value is tensor else f"{name}.{place}"
                self.tensors[id(table), key] = tensor

    def is_now(self) -> bool:
        """Whether the dictionaries still hold the same."""
        found = list(chain.from_iterable(map(dict.values, self._filled)))
        return (
            not any(self._empty)
            and len(found) == len(self._values)
            and all(map(operator.is_, found, self._values))
            and list(map(_LEARNS, self._all)) == self._learn
            and (not self._contents or _same(self._containers, self._contents))
        )

    def put(self) -> None:
        """Restore the dictionaries."""
        for table, before in zip(self.tables, self._copies, strict=True):
            for name in table.keys() - before.keys():
                del table[name]
            for name, value in before.items():
                if value is not _WITH_GRAPH and table.get(name, self) is not value:
                    table[name] = value
            if list(table) != list(before):  # modules run in the order of their table
                now = dict(table)
                table.clear()
                table.update({name: now[name] for name in before if name in now})
        for value, content in zip(self._containers, self._contents, strict=True):
            if not _same(value, content):
                value.clear()
                refill = getattr(value, "extend", None) or value.update
                refill(_copied(content))
        for tensor, learns in zip(self._all, self._learn, strict=True):
            if tensor.requires_grad != learns:
                tensor.requires_grad_(learns)


def _same(value: Any, content: Any) -> bool:
    try:
        return bool(value == content)
    except Exception:  # whatever a class of the user's raises
        return False


def _has_at_most(most: int, container: Any) -> bool:
    left, n_seen = [container], 0
    while left:
        value = left.pop()
        n_seen += 1
        if type(value) in _CONTAINERS or type(value) is tuple:
            if n_seen + len(left) + len(value) > most:  # or it holds itself
                return False
            left += value.values() if isinstance(value, dict) else value
    return True


def _copied(value: Any) -> Any:
    """Copy containers and those inside, but not their items."""
    kind = type(value)
    if kind is tuple:
        return tuple([_copied(item) for item in value])
    if kind not in _CONTAINERS:
        return value
    found = value.copy()
    if kind is not set:
        items = found.items() if kind in _DICTS else enumerate(value)
        for key, item in items:
            if type(item) in _CONTAINERS or type(item) is tuple:
                found[key] = _copied(item)
    return found


def held_objects(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Return the attributes of the plain objects among the modules' attributes."""
    found: dict[int, dict[str, Any]] = {}
    for module in modules:
        for name, value in vars(module).items():
            if name not in INTERNAL and not isinstance(value, _NO_OBJECTS):
                own = _own_attributes(value)
                if own is not None:
                    found[id(own)] = own
    return list(found.values())


def _own_attributes(value: object) -> dict[str, Any] | None:
    if type(value).__module__.partition(".")[0] == "torch":
        return None
    try:
        own = getattr(value, "__dict__", None)
    except Exception:  # whatever a class of the user's raises
        return None
    if type(own) is not dict or any(isinstance(v, torch.Tensor) for v in own.values()):
        return None
    return own


def state_of_layer(modules: tuple[nn.Module, ...]) -> State:
    """Record everything that a layer reads.

    FSDP puts whole and sharded weights by turns into the tables of its modules. So for
    FSDP groups inside, the sharded weights are recorded, which an optimizer changes.

    Args:
        modules: The layer and the modules inside it.
    """
    sharded: dict[int, list[torch.Tensor]] = {}
    for inner in modules[1:]:
        if is_sharded(inner):
            for module, _, weight in sharded_weights(inner):
                sharded.setdefault(id(module), []).append(weight)
    tables: list[Any] = []
    for module in modules:
        tables += (vars(module), buffers_of(module), submodules_of(module))
        if id(module) not in sharded:
            tables.append(parameters_of(module))
        if module is not modules[0]:  # its own hooks run outside of its forward
            tables += chain.from_iterable(forward_hooks_of(module))
    tables += chain.from_iterable(global_forward_hooks)
    tables += held_objects(modules)
    # Those of scripted modules are no dicts, and cannot change.
    own = [table for table in tables if isinstance(table, dict)]
    return State(own, chain.from_iterable(sharded.values()))


class Found(NamedTuple):
    """The state that a call found when it began: Note: [As a call finds it]."""

    state: State
    tensors: list[torch.Tensor]
    """Tensors that nothing may edit before the recomputation."""
    versions: list[int]

    @property
    def are_edited(self) -> bool:
        """Whether a tensor was edited since."""
        return list(map(version_of, self.tensors)) != self.versions

    def edited(self) -> list[Key]:
        """Return the places of the tensors that were edited since."""
        pairs = zip(self.tensors, self.versions, strict=True)
        edited = {id(tensor) for tensor, old in pairs if version_of(tensor) != old}
        return [key for key, t in self.state.tensors.items() if id(t) in edited]
