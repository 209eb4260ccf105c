"""One call whose saved tensors are packed: codecs alone, without a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from mimose.run.actions.packing.base import Codec, Packed, SavedStorage
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


class PackedStorage(NamedTuple):
    """What has become of one storage."""

    saved_bytes: int
    packed: Packed | None
    """None where no codec took it."""

    @property
    def device_bytes(self) -> int:
        """What is held of it."""
        return self.saved_bytes if self.packed is None else self.packed.device_bytes


class PackedCall(NamedTuple):
    """What a call returned, and what is held of what it saved."""

    output: torch.Tensor
    storages: list[PackedStorage]

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
    storages: dict[int, dict[Slot, torch.Tensor]] = {}
    for number, node in enumerate(nodes.nodes):
        for name in saved_names(node):
            tensor = saved_value(node, name)
            if isinstance(tensor, torch.Tensor):
                key = storage_key(tensor.untyped_storage())
                storages.setdefault(key, {})[Slot(number, name)] = tensor
    others = [slots for key, slots in storages.items() if key not in held]
    return PackedCall(output, [_packed(nodes, slots, codecs) for slots in others])


def _packed(
    nodes: Nodes, slots: dict[Slot, torch.Tensor], codecs: Sequence[Codec]
) -> PackedStorage:
    first = next(iter(slots.values())).detach()
    whole = first.new_empty(0).set_(first.untyped_storage())
    readers = [reader_of(nodes, slot, tensor) for slot, tensor in slots.items()]
    saved = SavedStorage(whole, readers, is_source=False)
    packed = next((codec.pack(saved) for codec in codecs if codec.takes(saved)), None)
    if packed is not None:
        for slot, tensor in slots.items():
            place = tensor.shape, tensor.stride(), tensor.storage_offset()
            handle = saved_handle(nodes.nodes[slot.node], slot.name)
            handle.register_hooks(lambda _: None, partial(_unpacked, packed, place))
    return PackedStorage(whole.nbytes, packed)


def _unpacked(packed: Packed, place: Any, nothing: None) -> torch.Tensor:
    del nothing
    return packed.unpack().as_strided(*place)
