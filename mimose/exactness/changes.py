"""Places whose state a forward may change: read, compared, put back.

Which buffers a layer changes is found in its first call, by comparing all of them
before and after; later calls save only those, and find them in the recomputation as
the forward did. What else a forward changes is found too, and not served: see
`mimose.exactness.impurities`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from mimose.tensors import different_bits, same_bits, version
from mimose.torch_private import buffers_of


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

    def restore(self, state: Any) -> None:
        """Put an earlier state there for good."""
        ...


_AnySlot = TypeVar("_AnySlot", bound=Slot)


class BufferSlot:
    """A buffer of a module.

    Values are compared, not versions alone: batch norms change their statistics
    without a trace in the version.
    """

    def __init__(self, table: dict[str, Any], name: str) -> None:
        self._table = table
        self._name = name

    @property
    def key(self) -> tuple[int, str]:
        """Where it is: its table, by identity, and its name in it."""
        return id(self._table), self._name

    @property
    def numel(self) -> int:
        """How many elements it has now."""
        tensor = self._now()
        return 0 if tensor is None else int(tensor.numel())

    def _now(self) -> Any:
        try:
            return self._table[self._name]  # those of scripted modules have no `get`
        except KeyError:
            return None

    def read(self) -> Any:
        """Return a copy, and the identity and version of the original."""
        tensor = self._now()
        if tensor is None:
            return None, None, 0
        return tensor.detach().clone(), id(tensor), version(tensor)

    def read_after(self, state: Any) -> Any:
        """Return its state; the earlier one, if its version is still that."""
        tensor = self._now()
        if tensor is None or (id(tensor), version(tensor)) != state[1:]:
            return self.read()
        return state

    def differs(self, state: Any) -> bool | torch.Tensor:
        """Compare identity, version and value."""
        old, identity, counted = state
        tensor = self._now()
        if tensor is None or old is None:
            return tensor is not old
        if id(tensor) != identity or version(tensor) != counted:
            return True
        return different_bits(tensor, old)

    def swap_in(self, state: Any) -> Any:
        """Put a copy of the old tensor there; return the present one."""
        current = self._now()
        self._table[self._name] = None if state[0] is None else state[0].clone()
        return current

    def swap_out(self, current: Any) -> None:
        """Put the present tensor back."""
        self._table[self._name] = current

    def restore(self, state: Any) -> None:
        """Copy the old values in place; where they are unchanged, touch nothing."""
        tensor, old = self._now(), state[0]
        if tensor is None or old is None or tensor.shape != old.shape:
            self._table[self._name] = old
        elif not same_bits(tensor, old):
            with torch.no_grad():
                tensor.copy_(old)


class Compared(NamedTuple):
    """Which slots' states have changed."""

    changed: list[tuple[Slot, Any]]
    """With what they were."""
    unclear: list[Slot]
    """Those of which only an accelerator knows."""
    flags: list[torch.Tensor]
    """True for each of the unclear that has changed."""


class Saved:
    """The states of slots as they are now.

    Args:
        slots: The slots.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._states: list[tuple[Slot, Any]] = [(slot, slot.read()) for slot in slots]

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
                compared.changed.append((slot, state))
        return compared

    def add(self, states: Iterable[tuple[Slot, Any]]) -> None:
        """Take in slots with states read before."""
        self._states += states

    def covers(self, keys: Iterable[object]) -> bool:
        """Whether the slots of all these keys could be restored."""
        return set(keys) <= {slot.key for slot, _ in self._states}

    def restore(self) -> None:
        """Put all states back for good."""
        for slot, state in self._states:
            slot.restore(state)


class SavedBuffers(contextlib.AbstractContextManager[None]):
    """Buffers as they are now; entered, they are so again for a while.

    It can be entered more than once: a second backward recomputes again.

    Args:
        slots: The buffers.
    """

    def __init__(self, slots: Iterable[BufferSlot]) -> None:
        self._states = [(slot, slot.read()) for slot in slots]
        self._current: list[tuple[BufferSlot, Any]] = []

    def __enter__(self) -> None:
        self._current = [(slot, slot.swap_in(state)) for slot, state in self._states]

    def __exit__(self, *_: object) -> None:
        for slot, current in reversed(self._current):
            slot.swap_out(current)
        self._current = []

    def changed(
        self, known: Iterable[BufferSlot]
    ) -> tuple[list[BufferSlot], list[tuple[BufferSlot, torch.Tensor]]]:
        """Return which buffers have changed, and of which only an accelerator knows.

        The others are forgotten.

        Args:
            known: Buffers that are known to change, and need not be compared.
        """
        keys = {slot.key for slot in known}
        changed, unclear, states = [], [], []
        for slot, state in self._states:
            found = slot.key in keys or slot.differs(state)
            if isinstance(found, torch.Tensor):
                unclear.append((slot, found))
            elif found:
                changed.append(slot)
            else:
                continue
            states.append((slot, state))
        self._states = states
        return changed, unclear


def buffer_slots(modules: Iterable[nn.Module]) -> list[BufferSlot]:
    """Return every buffer of these modules."""
    return [
        BufferSlot(buffers_of(module), name)
        for module in modules
        for name, _ in buffers_of(module).items()
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


def union(*groups: Iterable[_AnySlot]) -> tuple[_AnySlot, ...]:
    """Join groups of slots, each place once."""
    return tuple({slot.key: slot for group in groups for slot in group}.values())
