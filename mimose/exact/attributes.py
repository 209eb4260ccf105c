"""The attributes of modules that are no tensors: read, compared, set and put back.

Note: [What a layer reads]
A layer reads its attributes (a dropout's ``p``, an adapter's name, a flag, a list) when
its forward runs, and again when it is recomputed. Between the two somebody may have set
another value, and a recomputation that ends early may leave a value that the rest of
the forward would have set back. So the values are read as a call enters, set again for
its recomputation where they differ, and put back behind it.

What is looked at: numbers, texts, flags, types, functions and tuples of these, by
equality; lists, dicts and sets of these, by their content. So are the attributes of
plain objects that layers hold, such as a configuration: as a step begins, and once in a
backward, for they are many and shared by all layers. A state refers to no object
that a forward may have made: it is held until the backward, and through a tensor with a
graph a chain of old steps would stay alive. Tensors are looked at elsewhere (see
`mimose.exact.guard`).
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from mimose.torch_private import current_graph_task

State: TypeAlias = "list[Any]"
"""Of each attribute its value; of containers a copy."""

INTERNAL = frozenset(vars(nn.Module())) | {"forward", "training"}
"""Attributes that are torch's own."""
_VALUES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    type,
    torch.dtype,
    torch.device,
    torch.Size,
    types.FunctionType,
    types.BuiltinFunctionType,
)
_NO_OBJECTS = (
    *_VALUES,
    torch.Tensor,
    nn.Module,
    types.ModuleType,
    types.MethodType,
)
_CONTAINERS = (list, dict, set)
_UNREAD = frozenset(("in_features", "out_features", "elementwise_affine"))
"""Attributes of torch's own modules that no forward of these reads."""
_get = dict.get
_MISSING: Any = object()


class Places(NamedTuple):
    """Where the attributes are that a state is of."""

    tables: tuple[dict[str, Any], ...]
    """The modules' own dictionaries, one for each attribute."""
    names: tuple[str, ...]
    known: list[frozenset[str]]
    """By module, the names of all its attributes."""


class Attributes:
    """The attributes that are looked at: Note: [What a layer reads].

    Args:
        owners: The modules, or other objects, whose they are.

    Attributes:
        places: Where they are, of what `read` has returned last.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        self._owners = tuple(owners)
        self._all = tuple(map(vars, self._owners))
        # Those of torch's own modules get no others.
        self._growing = [vars(owner) for owner in self._owners if not _is_torchs(owner)]
        self._note()

    def _note(self) -> None:
        """Find out which attributes there are."""
        self._n_growing = sum(map(len, self._growing))
        known = [frozenset(table) for table in self._all]
        found = [
            (table, name)
            for owner, table in zip(self._owners, self._all, strict=True)
            for name, value in table.items()
            if name not in INTERNAL
            and _is_looked_at(value)
            and not (name in _UNREAD and _is_torchs(owner))
        ]
        self._tables = tuple(table for table, _ in found)
        self._names = tuple(name for _, name in found)
        self.places = Places(self._tables, self._names, known)
        self._containers = tuple(
            i for i, (table, name) in enumerate(found) if _is_container(table[name])
        )
        self._last = self._read()

    def _read(self) -> State:
        found = list(map(_get, self._tables, self._names))
        for i in self._containers:
            found[i] = _copied(found[i])
        return found

    def read(self) -> State:
        """Return what the attributes are; the same object as long as nothing changes.

        Which there are is noted anew where one has come, gone or become another.
        """
        if self.differ(self._last):
            self._note()
        return self._last

    def differ(self, state: State) -> bool:
        """Whether an attribute is not what `read` has returned, or has come since."""
        if state is not self._last:
            return True
        try:
            is_same = self._read() == state
        except Exception:  # whatever a class of the user's raises
            return True
        return not is_same or sum(map(len, self._growing)) != self._n_growing

    @contextlib.contextmanager
    def as_in(self, state: State, places: Places) -> Iterator[None]:
        """Set attributes for a while to what they were; containers to copies.

        Args:
            state: What `read` has returned.
            places: What `places` was then.
        """
        now = [(table, dict(table)) for table in self._all]
        for table, known in zip(self._all, places.known, strict=True):
            for name in table.keys() - known:
                del table[name]
        for table, name, old in zip(places.tables, places.names, state, strict=True):
            if _is_container(old) or not _same(table.get(name, _MISSING), old):
                table[name] = _copied(old)
        try:
            yield
        finally:
            for table, before in now:
                for name in table.keys() - before.keys():
                    del table[name]
                for name, value in before.items():
                    if table.get(name, _MISSING) is not value:
                        table[name] = value

    def containers(self) -> tuple[Any, ...]:
        """Return the lists, dicts and sets among them, themselves."""
        if not self._containers:
            return ()
        return tuple([self._tables[i].get(self._names[i]) for i in self._containers])

    def undo(self, containers: Sequence[Any]) -> None:
        """Put back what `read` has returned last.

        Args:
            containers: What `containers` has returned then.
        """
        for table, known in zip(self._all, self.places.known, strict=True):
            for name in table.keys() - known:
                del table[name]
        own = dict(zip(self._containers, containers, strict=True))
        for i, old in enumerate(self._last):
            if i in own and not _same(own[i], old):
                _fill(own[i], old)
            self._tables[i][self._names[i]] = own.get(i, old)


class Held(NamedTuple):
    """The attributes of held objects as a step began."""

    attributes: Attributes
    state: State
    places: Places

    def as_then(self) -> contextlib.AbstractContextManager[None]:
        """Return what sets them back for a while."""
        return self.attributes.as_in(self.state, self.places)


class HeldObjects:
    """Plain objects among the attributes of layers: Note: [What a layer reads].

    Attributes:
        now: As the running step began.
    """

    def __init__(self) -> None:
        self.note(())

    def note(self, modules: Iterable[nn.Module]) -> None:
        """Find out which there are."""
        found = {
            id(value): value
            for module in modules
            for name, value in vars(module).items()
            if name not in INTERNAL and _is_plain_object(value)
        }
        self._attributes = Attributes(found.values())
        self._state: State | None = None
        self._last: tuple[int, Held] | None = None
        self._is_other = False
        self.begin()

    def begin(self) -> None:
        """Read them: a step begins."""
        state = self._attributes.read()
        if state is self._state:
            return
        self._state = state
        self.now = Held(self._attributes, state, self._attributes.places)

    def differ(self, before: Held) -> bool:
        """Whether one is not as a step began; asked anew in each backward."""
        task = current_graph_task()
        last = self._last
        if last is None or last[1] is not before or last[0] != task or task < 0:
            self._is_other = before.attributes.differ(before.state)
            self._last = task, before
        return self._is_other


def _is_torchs(owner: object) -> bool:
    return type(owner).__module__.startswith("torch.nn.modules.")


def _is_plain_object(value: object) -> bool:
    own = getattr(value, "__dict__", None)
    if type(own) is not dict or isinstance(value, _NO_OBJECTS):
        return False
    return not any(isinstance(each, torch.Tensor) for each in own.values())


def _is_container(value: object) -> bool:
    return type(value) in _CONTAINERS


def _is_looked_at(value: object) -> bool:
    if isinstance(value, _VALUES):
        return True
    if type(value) is dict:
        return all(map(_is_looked_at, itertools.chain(value, value.values())))
    if type(value) in (list, set, tuple, frozenset):
        return all(map(_is_looked_at, value))  # type: ignore[call-overload]
    return False


def _copied(value: Any) -> Any:
    """Copy lists, dicts and sets, and those inside."""
    kind = type(value)
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind is list:
        return [_copied(item) for item in value]
    return set(value) if kind is set else value


def _fill(container: Any, content: Any) -> None:
    """Have a container hold again what it held."""
    container.clear()
    if type(container) is list:
        container.extend(content)
    else:
        container.update(content)


def _same(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # whatever a class of the user's raises
        return False
