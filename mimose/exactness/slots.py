"""Places of tensors beside the parameters (buffers, attributes), and copies of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import nn

from mimose.tensors import different_bits, same_bits, version
from mimose.torch_private import buffers_of


class TensorSlot:
    """The place of a tensor: a buffer of a module, or another attribute.

    Values are compared as well as versions, because batch norms change their statistics
    without a new version.

    Args:
        table: The dictionary that holds it.
        name: Its name there.
    """

    def __init__(self, table: dict[str, Any], name: str) -> None:
        self._table = table
        self._name = name

        self.key = id(table), name
        """Equal for slots of the same place."""

    def __eq__(self, other: object) -> bool:
        """Whether two slots are the same place."""
        return isinstance(other, TensorSlot) and other.key == self.key

    def __hash__(self) -> int:
        """Hash the place."""
        return hash(self.key)

    def now(self) -> torch.Tensor | None:
        """Return the tensor there; None if there is none."""
        try:
            found = self._table[self._name]  # those of scripted modules have no `get`
        except KeyError:
            return None
        return found if isinstance(found, torch.Tensor) else None

    def read(self) -> Any:
        """Return a copy, and the identity and version of the original."""
        tensor = self.now()
        if tensor is None:
            return None, None, 0
        return tensor.detach().clone(), id(tensor), version(tensor)

    def differs(self, state: Any) -> bool | torch.Tensor:
        """Compare identity, version and value.

        If only an accelerator can decide, the result is a flag on it, not read yet.
        """
        old, identity, counted = state
        tensor = self.now()
        if tensor is None or old is None:
            return tensor is not old
        if id(tensor) != identity or version(tensor) != counted:
            return True
        return different_bits(tensor, old)

    def swap_in_copies(self, state: Any) -> None:
        """Put a copy of the old tensor in its place."""
        self._table[self._name] = None if state[0] is None else state[0].clone()

    def restore(self, state: Any) -> None:
        """Copy the old values in place, if they have changed."""
        tensor, old = self.now(), state[0]
        if tensor is None or old is None or tensor.shape != old.shape:
            self._table[self._name] = old
        elif not same_bits(tensor, old):
            with torch.no_grad():
                tensor.copy_(old)


class SavedTensors:
    """Copies of the tensors at some places.

    Args:
        slots: The places.
    """

    def __init__(self, slots: Iterable[TensorSlot]) -> None:
        self.states: list[tuple[TensorSlot, Any]] = [(s, s.read()) for s in slots]

    def swap_in_copies(self) -> None:
        """Put copies in their places, for a run that may change them."""
        for slot, state in self.states:
            slot.swap_in_copies(state)

    def compare(self, known: Iterable[TensorSlot]) -> Changes:
        """Return the places that have changed, and those with a flag not read yet.

        Args:
            known: Places that are known to change, and need not be compared.
        """
        known, changed = set(known), []
        unclear: dict[TensorSlot, torch.Tensor] = {}
        for slot, state in self.states:
            found = slot in known or slot.differs(state)
            if isinstance(found, torch.Tensor):
                unclear[slot] = found
            elif found:
                changed.append(slot)
        return changed, unclear


Changes: TypeAlias = tuple[list[TensorSlot], dict[TensorSlot, torch.Tensor]]


def tensor_slots(modules: Iterable[nn.Module]) -> list[TensorSlot]:
    """Return the places of all buffers, and of tensors among the attributes."""
    found = []
    for module in modules:
        buffers, own = buffers_of(module), vars(module)
        found += [TensorSlot(buffers, name) for name, _ in buffers.items()]
        found += [TensorSlot(own, n) for n, value in own.items() if _is_tensor(value)]
    return found


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is None


def running_statistics(modules: Iterable[nn.Module]) -> list[TensorSlot]:
    """Return the buffers that forwards are known to change."""
    return [
        TensorSlot(buffers_of(module), name)
        for module in modules
        for name, buffer in buffers_of(module).items()
        if buffer is not None
        and (name.startswith("running_") or name == "num_batches_tracked")
    ]
