"""Storages that wait for their backward in the host's memory.

Note: [Once there, once back]
What an event hands on may be saved by it and by those that read it: one storage, and
several that pack it. Who comes later finds it on the host already, unless somebody has
edited it in between, and all hold the same. What was brought back serves all who ask
for it while one of them has it. Nobody holds it for the others' sake: plans know
nothing of that.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from mimose.actions.offload.copies import Arrival, Copies, make_copies
from mimose.actions.offload.host import HostBuffer, HostMemory
from mimose.actions.offload.window import Window
from mimose.actions.packing.base import SavedStorage
from mimose.tensors import is_plain, sum_of_words, version
from mimose.torch_private import storage_key
from mimose.types import NO_HEADROOM, Headroom

LEAST_BYTES = 4096
"""Smaller storages stay: a copy takes microseconds to begin, in which a device moves
megabytes, and the record of where one went takes most of a kilobyte itself."""


class OffloadCodec:
    """Copies storages to the host, and back when they are needed.

    Args:
        memory: Lends memory of the host.
        device: Whose storages are taken.
        copies: Another way to copy than the device's own.

    Attributes:
        memory: What it was given.
    """

    is_exact = True

    def __init__(
        self, memory: HostMemory, device: torch.device, copies: Copies | None = None
    ) -> None:
        self.memory = memory
        self._device = device
        self._copies = copies or make_copies(device, is_pinned=memory.is_pinned)
        self._packed: weakref.WeakValueDictionary[int, Offloaded] = (
            weakref.WeakValueDictionary()
        )
        """By storage; what was packed at another version is replaced."""
        self._last: weakref.ref[Offloaded] | None = None
        self._window = Window()
        self._call = 0
        self._headroom = NO_HEADROOM

    def begin_call(self, headroom: Headroom) -> None:
        """Begin to pack what a call has saved.

        Args:
            headroom: What the plan leaves free around it.
        """
        self._call += 1
        self._headroom = headroom
        self._copies.settle()

    def takes(self, saved: SavedStorage) -> bool:
        """Whether a storage is of the device and not tiny."""
        whole = saved.whole
        if whole.device.type != self._device.type or not is_plain(whole):
            return False
        is_large = whole.untyped_storage().nbytes() >= LEAST_BYTES
        return is_large and not (whole.is_conj() or whole.is_neg())

    def pack(self, saved: SavedStorage) -> Offloaded | None:
        """Copy a storage to the host: see Note: [Once there, once back].

        Returns:
            None where that would pass the budget of host memory: it has to stay.
        """
        found = self._found(saved)
        if found is not None:
            return found
        storage = saved.whole.untyped_storage()
        buffer = self.memory.take(storage.nbytes())
        if buffer is None:
            return None
        made = Offloaded(
            saved.whole,
            _version(saved),
            buffer,
            self._copies,
            self._window,
            self._last,
            self._call,
            self._headroom,
        )
        self._packed[storage_key(storage)] = made
        self._last = weakref.ref(made)
        return made

    def _found(self, saved: SavedStorage) -> Offloaded | None:
        """Return what the storage, as it is now, was packed to already."""
        storage = saved.whole.untyped_storage()
        found = self._packed.get(storage_key(storage))
        if found is None or not found.is_of(storage, _version(saved)):
            return None
        if not found.has_layout_of(saved.whole):
            return None
        # An edit through `.data` counts nowhere.
        return found if found.has_words_of(saved.whole) else None


class Offloaded:
    """A storage on the host. Its memory there goes with it."""

    __slots__ = (
        "__weakref__",
        "_back",
        "_before",
        "_buffer",
        "_coming",
        "_copies",
        "_layout",
        "_of",
        "_sent",
        "_version",
        "_window",
        "call",
        "headroom_bytes",
        "n_bytes",
    )

    def __init__(
        self,
        whole: torch.Tensor,
        counted: int,
        buffer: HostBuffer,
        copies: Copies,
        window: Window,
        before: weakref.ref[Offloaded] | None,
        call: int,
        headroom: Headroom,
    ) -> None:
        storage = whole.untyped_storage()
        self.n_bytes = storage.nbytes()
        self.call = call
        self.headroom_bytes = headroom.backward_bytes
        self._of: weakref.ref[Any] = weakref.ref(storage)
        self._version = counted
        self._layout = whole.dtype, whole.shape, whole.stride()
        self._buffer = buffer
        self._copies = copies
        self._window = window
        self._before = before
        self._back: tuple[weakref.ref[Any], object] | None = None
        """The storage that was brought back, and for whom."""
        self._coming: Arrival | None = None
        """The one that nobody has asked for yet."""
        flat = _bytes_of(storage)
        self._sent = copies.to_host(flat, buffer.pieces, headroom.forward_bytes)

    @property
    def device_bytes(self) -> int:
        """Nothing."""
        return 0

    @property
    def host_bytes(self) -> int:
        """What it takes of the budget at most, also where another call holds the same.

        Told so that it follows from the storage's bytes without steps.
        """
        return self._buffer.most_bytes

    def is_of(self, storage: torch.UntypedStorage, counted: int) -> bool:
        """Whether it was packed of a storage, which nobody has edited since."""
        return self._of() is storage and self._version == counted

    def has_layout_of(self, whole: torch.Tensor) -> bool:
        """Whether a tensor lies in the storage as the one that was packed."""
        return self._layout == (whole.dtype, whole.shape, whole.stride())

    def has_words_of(self, whole: torch.Tensor) -> bool:
        """Whether the same is on the host as in the storage now; that is waited for."""
        self._copies.finish(self._sent)
        there = torch.cat([*self._buffer.pieces])[: self.n_bytes]
        here = _bytes_of(whole.untyped_storage())
        return bool(sum_of_words(here).cpu() == sum_of_words(there))

    def unpack(self) -> torch.Tensor:
        """Return the storage's tensor, on its device."""
        back = self._storage()
        self._window.asked_for(self)
        dtype, shape, stride = self._layout
        return torch.empty(0, dtype=dtype, device=back.device).set_(
            back, 0, shape, stride
        )

    def _storage(self) -> torch.UntypedStorage:
        back = self._there()
        if back is not None:
            return back
        coming, self._coming = self._coming, None
        tensor = None if coming is None else coming.wait()
        while tensor is None:  # of another stream
            tensor = self._fetch().wait()
        storage = tensor.untyped_storage()
        self._back = weakref.ref(storage), self._copies.here()
        return storage

    def _there(self) -> torch.UntypedStorage | None:
        """Return what was brought back, if somebody has it, for whom asks now."""
        if self._back is None or self._back[1] != self._copies.here():
            return None
        found: torch.UntypedStorage | None = self._back[0]()
        return found

    def _fetch(self) -> Arrival:
        return self._copies.to_device(self._buffer.pieces, self.n_bytes, self._sent)

    @property
    def before(self) -> Offloaded | None:
        """The storage packed before it, if it lives."""
        return None if self._before is None else self._before()

    @property
    def is_coming(self) -> bool:
        """Whether it is on its way, and nobody has asked for it yet."""
        return self._coming is not None

    def send_for(self) -> None:
        """Begin to bring it back, if it is not there."""
        if self._coming is None and self._there() is None:
            self._coming = self._fetch()

    def forget(self) -> None:
        """Let go of what is on its way."""
        self._coming = None


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage's bytes as they lie in memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _version(saved: SavedStorage) -> int:
    """Return how often a storage was edited, as far as those who read it know."""
    return max(map(version, (saved.whole, *(r.tensor for r in saved.readers))))
