"""The attributes of modules that are no tensors: read, compared, set and put back.

Note: [What a layer reads]
A layer reads its attributes (a dropout's ``p``, an adapter's name, a flag, a list) when
its forward runs, and again when it is recomputed. Between the two somebody may have set
another value, and a recomputation that ends early may leave a value that the rest of
the forward would have set back. So the values are read as a call enters, set again for
its recomputation where they differ, and put back behind it.

What is looked at: numbers, texts, flags, types, functions and tuples of these, by
equality; lists, dicts, sets and deques of these, by their content, as long as they hold
no more than ten thousand. So are the attributes of plain objects that layers hold, such
as a configuration: as a step begins, and once in a backward, for they are many and
shared by all layers. Where a forward of the model sets one, they are read
as each call enters. A state refers to no object that a forward may have made: it is
held until the backward, and through a tensor with a graph a chain of old steps would
stay alive. Tensors are looked at elsewhere (see `mimose.exactness.guard`).
"""

from __future__ import annotations

import contextlib
import copy
import enum
import operator
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
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
    slice,
    np.generic,
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
_CHOICES = (type(None), bool)
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = frozenset((list, set, deque, *_DICTS))
_MOST_ITEMS = 10_000
"""Of a container that is looked at, those inside included: to read dicts of 50,000
in three layers took 230 ms a step."""
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

    def are(self, others: Places) -> bool:
        """Whether these are the same places as others."""
        return (
            self.names == others.names
            and self.known == others.known
            and all(map(operator.is_, self.tables, others.tables))
        )


class Attributes:
    """The attributes that are looked at: Note: [What a layer reads].

    Args:
        owners: The modules, or other objects, whose they are.

    Attributes:
        places: Where they are, of what `read` has returned last.
        variant: Tells apart what flags there were then: a forward may go another way
            by them.
    """

    def __init__(self, owners: Iterable[object]) -> None:
        self._owners = tuple(owners)
        self._all = tuple(map(vars, self._owners))
        self.places = Places((), (), [])
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
        places = Places(self._tables, self._names, known)
        if not places.are(self.places):
            self.places = places
        self._containers = tuple(
            i for i, (table, name) in enumerate(found) if _is_container(table[name])
        )
        self._last = self._copied_now()
        chosen = [value for value in self._last if isinstance(value, _CHOICES)]
        self.variant = hash(tuple(chosen))

    def _copied_now(self) -> State:
        found = list(map(_get, self._tables, self._names))
        copies: dict[int, Any] = {}
        for i in self._containers:
            found[i] = _copied(found[i], copies)
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
            is_same = list(map(_get, self._tables, self._names)) == state
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
        self._take_away_new(places)
        copies: dict[int, Any] = {}
        for table, name, old in zip(places.tables, places.names, state, strict=True):
            if _is_container(old) or not _same(table.get(name, _MISSING), old):
                table[name] = _copied(old, copies)
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

    def undo(self, state: State, places: Places, containers: Sequence[Any]) -> None:
        """Put back what was there, its containers themselves.

        Args:
            state: What `read` has returned.
            places: What `places` was then.
            containers: What `containers` has returned then.
        """
        self._take_away_new(places)
        left, copies = iter(containers), dict[int, Any]()
        for table, name, old in zip(places.tables, places.names, state, strict=True):
            value = old
            if _is_container(old):
                value = next(left)
                if not _same(value, old):
                    _fill(value, _copied(old, copies))
            table[name] = value

    def _take_away_new(self, places: Places) -> None:
        """Delete the attributes that there were not, where such are looked for."""
        growing = set(map(id, self._growing))
        for table, known in zip(self._all, places.known, strict=True):
            if id(table) in growing:
                for name in table.keys() - known:
                    del table[name]


class Held(NamedTuple):
    """The attributes of held objects as they were found."""

    attributes: Attributes
    state: State
    places: Places

    def as_then(self) -> contextlib.AbstractContextManager[None]:
        """Return what sets them back for a while."""
        return self.attributes.as_in(self.state, self.places)


class HeldObjects:
    """Plain objects among the attributes of layers: Note: [What a layer reads].

    Attributes:
        now: As the running step began, or as the last call has found them.
    """

    def __init__(self) -> None:
        self.note(())

    def note(self, modules: Iterable[nn.Module]) -> None:
        """Find out which there are."""
        self._modules = list(modules)
        self._is_stale = False
        found = {
            id(value): value
            for module in self._modules
            for name, value in vars(module).items()
            if name not in INTERNAL and _is_plain_object(value)
        }
        self._attributes = Attributes(found.values())
        self._moving: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        """Attributes that a forward of the model has set."""
        self._moved: list[Any] = []
        """What they were when all were read last."""
        self._reads_all = True
        """Whether calls read all: in the first forward, or where much moves."""
        self._is_first = True
        self._state: State | None = None
        self._last: tuple[int, Held] | None = None
        self._is_other = False
        self._began: tuple[Held, tuple[Any, ...]]
        self.begin()

    def note_anew(self) -> None:
        """Find out, as the next step begins, which there are by then."""
        self._is_stale = True

    def begin(self) -> None:
        """Read them: a step begins."""
        if self._is_stale:
            before = self._moving, self._reads_all, self._is_first
            self.note(self._modules)
            self._moving, self._reads_all, self._is_first = before
        self._read()
        self._began = self.now, self._attributes.containers()

    def _read(self) -> None:
        state = self._attributes.read()
        self._moved = self._read_moving()
        if state is not self._state:
            self._state = state
            self.now = Held(self._attributes, state, self._attributes.places)

    def _read_moving(self) -> list[Any]:
        return [table.get(name) for table, name in self._moving.values()]

    def found(self) -> Held:
        """Return what a call finds that enters now."""
        if self._reads_all or (
            self._moving and not _same(self._read_moving(), self._moved)
        ):
            self._read()
        return self.now

    def begin_to_move(self) -> bool:
        """Whether the forward that has run has changed what none had changed before.

        What calls have found in it is not known then.
        """
        held, (is_first, self._is_first) = self._began[0], (self._is_first, False)
        if is_first:
            self._reads_all = False
        if self._reads_all or not held.attributes.differ(held.state):
            return False
        now = held.attributes.read()
        if held.attributes.places is not held.places:  # others have come
            self._reads_all = True
            return not is_first
        pairs = zip(held.places.tables, held.places.names, held.state, now, strict=True)
        new = {
            (id(table), name): (table, name)
            for table, name, old, value in pairs
            if not _same(old, value) and (id(table), name) not in self._moving
        }
        self._moving |= new
        self._reads_all = any(_is_container(t.get(n)) for t, n in new.values())
        return bool(new) and not is_first

    def put_back(self) -> None:
        """Have them be what they were as the step began."""
        held, containers = self._began
        held.attributes.undo(held.state, held.places, containers)

    def differ(self, before: Held) -> bool:
        """Whether one is not as it was found; asked anew in each backward."""
        task = current_graph_task()
        last = self._last
        if last is None or last[1] is not before or last[0] != task or task < 0:
            self._is_other = before.attributes.differ(before.state)
            self._last = task, before
        return self._is_other


def _is_torchs(owner: object) -> bool:
    return type(owner).__module__.startswith("torch.nn.modules.")


def _is_plain_object(value: object) -> bool:
    own = own_attributes(value)
    if type(own) is not dict or isinstance(value, _NO_OBJECTS):
        return False
    return not any(isinstance(each, torch.Tensor) for each in own.values())


def own_attributes(value: object) -> Any:
    """Return an object's own dictionary; None where it has none."""
    try:
        return getattr(value, "__dict__", None)
    except Exception:  # whatever a class of the user's raises
        return None


def _is_container(value: object) -> bool:
    return type(value) in _CONTAINERS


def _is_looked_at(value: Any) -> bool:
    """Whether a value can be compared and copied, and is not large."""
    left, n_seen = [value], 0
    while left:
        value = left.pop()
        n_seen += 1
        if n_seen > _MOST_ITEMS:  # or it holds itself
            return False
        if isinstance(value, _VALUES):
            continue
        kind = type(value)
        if kind not in _CONTAINERS and not isinstance(value, (tuple, frozenset)):
            return False
        if len(value) > _MOST_ITEMS:
            return False
        left += value
        if kind in _DICTS:
            left += value.values()
    return True


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Copy containers, and those inside; of each one copy alone.

    Args:
        value: What to copy.
        copies: By identity, what was copied.
    """
    kind = type(value)
    if kind is tuple:
        return tuple([_copied(item, copies) for item in value])
    if kind not in _CONTAINERS:
        return value
    found = copies.get(id(value))
    if found is None:
        found = copies[id(value)] = copy.copy(value)
        if kind in _DICTS:
            for key, item in value.items():
                if type(item) in _NESTED:
                    found[key] = _copied(item, copies)
        elif kind is not set and any(type(item) in _NESTED for item in value):
            _fill(found, [_copied(item, copies) for item in value])
    return found


_NESTED = frozenset((tuple, *_CONTAINERS))


def _fill(container: Any, content: Any) -> None:
    """Have a container hold again what it held."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)


def _same(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # whatever a class of the user's raises
        return False
