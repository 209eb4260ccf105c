"""One call whose saved tensors are packed: codecs alone, without a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from mimose.run.actions.packing.base import Codec, Packed, Reader, SavedStorage
from mimose.run.actions.packing.roles import reader_of
from mimose.run.actions.replay.unit_graph import Nodes, Slot
from mimose.torch_private import (
    next_sequence_number,
    saved_handle,
    saved_names,
    saved_value,
    storage_key,
)

_MOST_NODES = 4096

_Slots: TypeAlias = Mapping[Slot, torch.Tensor]


class PackedStorage(NamedTuple):
    """What has become of one storage."""

    saved_bytes: int
    packed: Packed | None
    """None where no codec took it."""
    readers: tuple[str, ...]
    """Kind of node, name and role, of each."""

    @property
    def device_bytes(self) -> int:
        """What is held of it."""
        return self.saved_bytes if self.packed is None else self.packed.device_bytes


@dataclass(frozen=True, slots=True)
class PackedCall:
    """What a call returned, and what is held of what it saved."""

    output: torch.Tensor
    storages: list[PackedStorage] = field(default_factory=list)

    @property
    def saved_bytes(self) -> int:
        """What it would hold."""
        return sum(storage.saved_bytes for storage in self.storages)

    @property
    def device_bytes(self) -> int:
        """What it holds."""
        return sum(storage.device_bytes for storage in self.storages)


def packed_call(
    run: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    codecs: Sequence[Codec],
    own: Sequence[torch.Tensor] = (),
) -> PackedCall:
    """Call something, and pack what its graph has saved.

    Args:
        run: What is called.
        x: With what.
        codecs: The first that takes a storage packs it.
        own: Weights, which are not packed.
    """
    began = next_sequence_number()
    output = run(x)
    nodes = Nodes([output], [x], began, _MOST_NODES)
    held = {storage_key(tensor.untyped_storage()) for tensor in own}
    call = PackedCall(output)
    for key, slots in _storages(nodes).items():
        if key not in held:
            call.storages.append(_packed(nodes, slots, codecs))
    return call


def _storages(nodes: Nodes) -> Mapping[int, _Slots]:
    found: dict[int, dict[Slot, torch.Tensor]] = {}
    for number, node in enumerate(nodes.nodes):
        for name in saved_names(node):
            tensor = saved_value(node, name)
            if isinstance(tensor, torch.Tensor):
                key = storage_key(tensor.untyped_storage())
                found.setdefault(key, {})[Slot(number, name)] = tensor
    return found


def _packed(nodes: Nodes, slots: _Slots, codecs: Sequence[Codec]) -> PackedStorage:
    saved = saved_storage(nodes, slots)
    packed = next((c.pack(saved) for c in codecs if c.takes(saved)), None)
    if packed is not None:
        for slot, tensor in slots.items():
            handle = saved_handle(nodes.nodes[slot.node], slot.name)
            handle.register_hooks(_nothing, partial(_unpacked, packed, _place(tensor)))
    told = tuple(map(_told, [nodes] * len(slots), slots, saved.readers))
    return PackedStorage(saved.whole.nbytes, packed, told)


def saved_storage(nodes: Nodes, slots: _Slots) -> SavedStorage:
    """Return what codecs are given of a storage, nothing rebuilt from it.

    Args:
        nodes: The call's.
        slots: All that lie in the storage.
    """
    first = next(iter(slots.values())).detach()
    whole = first.new_empty(0).set_(first.untyped_storage())
    readers = [reader_of(nodes, slot, tensor) for slot, tensor in slots.items()]
    return SavedStorage(whole, readers, is_source=False)


def _told(nodes: Nodes, slot: Slot, reader: Reader) -> str:
    return f"{nodes.kinds[slot.node]}.{slot.name}: {reader.role.name}"


def _place(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _nothing(tensor: torch.Tensor) -> None:
    del tensor


def _unpacked(packed: Packed, place: Any, nothing: None) -> torch.Tensor:
    del nothing
    return packed.unpack().as_strided(*place)
