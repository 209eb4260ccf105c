"""What a forward changes besides its output, put back around its recomputation.

Which buffers, attributes and random states a layer changes is found in its first
call, by comparing all of them before and after; later calls save only those.

Note: [Attributes]
An attribute that the root sets before each call (a mask, a table) is put back for the
recomputation if it is a tensor without a graph: another graph's tensor, held from here,
could keep a chain of old steps alive. One that the layer's own forward changes (a
counter) is put back too, and given its present value again afterwards.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from mimose.tensors import different_bits, same_bits, version
from mimose.torch_private import buffers_of

INTERNAL = frozenset(vars(nn.Module())) | {"forward", "training"}
"""Attributes that are torch's own."""
_PLAIN = (type(None), bool, int, float, str, bytes, tuple)
_MISSING: Any = object()
_UNKNOWN: Any = object()


class Slot(Protocol):
    """A place whose state a forward may change."""

    @property
    def key(self) -> object:
        """Equal for slots of the same place."""
        ...

    def read(self) -> Any:
        """Return its state, safe from later changes."""
        ...

    def differs(self, state: Any) -> bool | torch.Tensor:
        """Whether something has changed since that state was read.

        What only an accelerator can tell is a flag there: to read it is to wait.
        """
        ...

    def lend(self, state: Any) -> Any:
        """Put an earlier state there; return what `give_back` takes."""
        ...

    def give_back(self, current: Any) -> None:
        """Put back what was there before `lend`."""
        ...

    def restore(self, state: Any) -> None:
        """Put an earlier state there for good."""
        ...


class BufferSlot:
    """A tensor of a module that is changed in place: most often a buffer.

    Values are compared, not versions alone: batch norms change their statistics
    without a trace in the version.
    """

    def __init__(self, table: dict[str, Any], name: str) -> None:
        self._table = table
        self._name = name

    @property
    def key(self) -> object:
        """Where it is."""
        return id(self._table), self._name

    @property
    def numel(self) -> int:
        """How many elements it has now."""
        tensor = self._table.get(self._name)
        return 0 if tensor is None else int(tensor.numel())

    def read(self) -> Any:
        """Return a copy, and the identity and version of the original."""
        tensor = self._table.get(self._name)
        if tensor is None:
            return None, None, 0
        return tensor.detach().clone(), id(tensor), version(tensor)

    def read_after(self, state: Any) -> Any:
        """Return its state; the earlier one, if its version is still that."""
        tensor = self._table.get(self._name)
        if tensor is None or (id(tensor), version(tensor)) != state[1:]:
            return self.read()
        return state

    def differs(self, state: Any) -> bool | torch.Tensor:
        """Compare identity, version and value."""
        old, identity, counted = state
        tensor = self._table.get(self._name)
        if tensor is None or old is None:
            return tensor is not old
        if id(tensor) != identity or version(tensor) != counted:
            return True
        return different_bits(tensor, old)

    def lend(self, state: Any) -> Any:
        """Put a copy of the old tensor there."""
        current = self._table.get(self._name)
        self._table[self._name] = None if state[0] is None else state[0].clone()
        return current

    def give_back(self, current: Any) -> None:
        """Put the present tensor back."""
        self._table[self._name] = current

    def restore(self, state: Any) -> None:
        """Copy the old values in place; where they are unchanged, touch nothing."""
        tensor, old = self._table.get(self._name), state[0]
        if tensor is None or old is None or tensor.shape != old.shape:
            self._table[self._name] = old
        elif not same_bits(tensor, old):
            with torch.no_grad():
                tensor.copy_(old)


class EditedSlot(BufferSlot):
    """A tensor among the attributes, edited in place."""

    def differs(self, state: Any) -> bool | torch.Tensor:
        """Compare its value; another tensor there is `AttributeSlot`'s affair."""
        is_same = id(self._table.get(self._name)) == state[1]
        return is_same and super().differs(state)


class AttributeSlot:
    """An attribute that is replaced: see Note: [Attributes]."""

    def __init__(self, table: dict[str, Any], name: str) -> None:
        self._table = table
        self._name = name

    @property
    def key(self) -> object:
        """Where it is, told apart from the tensor that is there."""
        return id(self._table), self._name, "attribute"

    def edited(self) -> EditedSlot:
        """Return the slot of the tensor that is there."""
        return EditedSlot(self._table, self._name)

    def read(self) -> Any:
        """Return the value, where it may be held."""
        value = self._table.get(self._name, _MISSING)
        return value if value is _MISSING or _may_be_held(value) else _UNKNOWN

    def differs(self, state: Any) -> bool:
        """Compare identities."""
        value = self._table.get(self._name, _MISSING)
        return value is not state and (state is not _UNKNOWN or _may_be_held(value))

    def lend(self, state: Any) -> Any:
        """Put the old value there."""
        current = self._table.get(self._name, _MISSING)
        self.restore(state)
        return current

    def give_back(self, current: Any) -> None:
        """Put the present value back."""
        self.restore(current)

    def restore(self, state: Any) -> None:
        """Put a value there, or take it away where there was none."""
        if state is _MISSING:
            self._table.pop(self._name, None)
        elif state is not _UNKNOWN:
            self._table[self._name] = state


class RandomSlot:
    """A random state that torch's own saving does not know."""

    def __init__(
        self, key: object, get: Callable[[], Any], put: Callable[[Any], Any]
    ) -> None:
        self.key = key
        self._get = get
        self._put = put

    def read(self) -> Any:
        """Return the state."""
        return self._get()

    def differs(self, state: Any) -> bool:
        """Compare the bytes of both states."""
        return pickle.dumps(self._get()) != pickle.dumps(state)

    def lend(self, state: Any) -> Any:
        """Put the old state there."""
        current = self._get()
        self._put(state)
        return current

    def give_back(self, current: Any) -> None:
        """Put the present state back."""
        self._put(current)

    def restore(self, state: Any) -> None:
        """Put an old state there."""
        self._put(state)


class Compared(NamedTuple):
    """Which slots' states have changed."""

    changed: list[Slot]
    unclear: list[Slot]
    """Those of which only an accelerator knows."""
    flags: list[torch.Tensor]
    """True for each of the unclear that has changed."""


class Before(contextlib.AbstractContextManager[None]):
    """The slots' states as they are now; entered, they are there again for a while.

    It can be entered more than once: a second backward recomputes again.

    Args:
        slots: The slots.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._states: list[tuple[Slot, Any]] = [(slot, slot.read()) for slot in slots]
        self._current: list[tuple[Slot, Any]] = []

    def __enter__(self) -> None:
        self._current = [(slot, slot.lend(state)) for slot, state in self._states]

    def __exit__(self, *_: object) -> None:
        for slot, current in reversed(self._current):
            slot.give_back(current)
        self._current = []

    def compare(self, without: Iterable[Slot] = ()) -> Compared:
        """Compare the slots' states with what they are now.

        Args:
            without: Slots that need not be compared.
        """
        left_out = {slot.key for slot in without}
        compared = Compared([], [], [])
        for slot, state in self._states:
            found = slot.key not in left_out and slot.differs(state)
            if isinstance(found, torch.Tensor):
                compared.unclear.append(slot)
                compared.flags.append(found)
            elif found:
                compared.changed.append(slot)
        return compared

    def narrow(self, slots: Iterable[Slot]) -> None:
        """Forget all slots but these."""
        keys = {slot.key for slot in slots}
        self._states = [pair for pair in self._states if pair[0].key in keys]

    def add(self, states: Iterable[tuple[Slot, Any]]) -> None:
        """Take in slots with states read before."""
        self._states += states

    def add_missing(self, slots: Iterable[Slot]) -> None:
        """Take in attributes that were not there."""
        self._states += [(slot, _MISSING) for slot in slots]

    def covers(self, keys: Iterable[object]) -> bool:
        """Whether the slots of all these keys could be restored."""
        return set(keys) <= {slot.key for slot, _ in self._states}

    def restore(self) -> None:
        """Put all states back for good."""
        for slot, state in self._states:
            slot.restore(state)


def buffer_slots(modules: Iterable[nn.Module]) -> list[BufferSlot]:
    """Return every buffer of these modules."""
    return [
        BufferSlot(buffers_of(module), name)
        for module in modules
        for name in buffers_of(module)
    ]


def running_statistics(modules: Iterable[nn.Module]) -> list[BufferSlot]:
    """Return the buffers that forwards are known to change."""
    return [
        BufferSlot(buffers_of(module), name)
        for module in modules
        for name, buffer in buffers_of(module).items()
        if buffer is not None
        and (name.startswith("running_") or name == "num_batches_tracked")
    ]


def attribute_slots(modules: Iterable[nn.Module]) -> list[AttributeSlot]:
    """Return the attributes that are numbers, texts, tensors or tuples of these."""
    return [
        AttributeSlot(vars(module), name)
        for module in modules
        for name in vars(module).keys() - INTERNAL
        if isinstance(vars(module)[name], (*_PLAIN, torch.Tensor))
    ]


def tensor_attributes(modules: Iterable[nn.Module]) -> list[AttributeSlot]:
    """Return the attributes that are tensors without a graph."""
    return [
        AttributeSlot(vars(module), name)
        for module in modules
        for name in vars(module).keys() - INTERNAL
        if isinstance(vars(module)[name], torch.Tensor)
        and _may_be_held(vars(module)[name])
    ]


def random_slots(modules: Iterable[nn.Module]) -> list[Slot]:
    """Return Python's and NumPy's random state, and the modules' own generators."""
    found: dict[object, Slot] = {
        "python": RandomSlot("python", random.getstate, random.setstate),
        "numpy": RandomSlot("numpy", _numpy_state, np.random.set_state),
    }
    for module in modules:
        for value in vars(module).values():
            slot = _generator_slot(value)
            if slot is not None:
                found[slot.key] = slot
    return list(found.values())


def _numpy_state() -> Any:
    return np.random.get_state(legacy=False)  # noqa: NPY002 - what users draw from


def _generator_slot(value: object) -> Slot | None:
    if isinstance(value, torch.Generator):
        return RandomSlot(id(value), value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return RandomSlot(id(value), value.getstate, value.setstate)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator

        def put(state: Any) -> None:
            bits.state = state

        return RandomSlot(id(value), lambda: bits.state, put)
    return None


def all_slots(modules: Sequence[nn.Module]) -> list[Slot]:
    """Return every place in these modules that a forward may change."""
    return [
        *buffer_slots(modules),
        *attribute_slots(modules),
        *[slot.edited() for slot in tensor_attributes(modules)],
        *random_slots(modules),
    ]


def union(*groups: Iterable[Slot]) -> tuple[Slot, ...]:
    """Join groups of slots, each place once."""
    return tuple({slot.key: slot for group in groups for slot in group}.values())


def _may_be_held(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    if isinstance(value, tuple):
        return all(map(_may_be_held, value))
    return isinstance(value, _PLAIN)
