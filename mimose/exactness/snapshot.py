"""What a forward changes, as when a step began."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mimose.exactness.changes import BufferSlot, Compared, Saved, Slot, union
from mimose.exactness.random_state import RandomState

_NOTHING = Saved(())


class Snapshot:
    """Random state and all else that a forward changes, as when a step began.

    Args:
        devices: The model's accelerators, whose random state is taken along.
        slots: What forwards are known to change.
        others: What they might change besides; saved where `take` is told to.
        constants: Buffers that have not changed yet; copied again where their version
            is another.
    """

    def __init__(
        self,
        devices: Iterable[torch.device],
        slots: Iterable[Slot],
        others: Iterable[Slot] = (),
        constants: Iterable[BufferSlot] = (),
    ) -> None:
        self._devices = tuple(devices)
        self._slots = union(slots)
        changing = {slot.key for slot in self._slots}
        self._constants = [
            (slot, slot.read()) for slot in constants if slot.key not in changing
        ]
        self._others = union(others)
        self._random: RandomState | None = None
        self._states = Saved(())

    def take(self, *, is_wide: bool = True) -> None:
        """Take the snapshot, over an earlier one.

        Args:
            is_wide: Whether to save what might change, too.
        """
        self._random = RandomState(self._devices)
        if not (is_wide or self._slots or self._constants):
            self._states = _NOTHING
            return
        slots = union(self._slots, self._others) if is_wide else self._slots
        self._states = Saved(slots)
        self._constants = [
            (slot, slot.read_after(old)) for slot, old in self._constants
        ]
        self._states.add(self._constants)

    def compare(self, without: Iterable[Slot] = ()) -> Compared:
        """Return what has changed since, of all that was saved.

        Args:
            without: What need not be compared.
        """
        return self._states.compare(without)

    def covers(self, keys: Iterable[object]) -> bool:
        """Whether the slots of all these keys were saved."""
        return self._states.covers(keys)

    def restore(self) -> None:
        """Put everything back, tensors in place."""
        if self._random is not None:
            self._random.restore()
        self._states.restore()
