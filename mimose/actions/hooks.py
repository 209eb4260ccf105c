"""Holds what a call saves for its backward in another form or place.

Note: [What stays]
A pair of hooks sees each tensor that autograd saves while a layer runs. Weights and
buffers stay unchanged. So do the call's inputs and outputs, which other layers share.
Only the end of the call shows which tensors are outputs, so these are packed at first
and the packed form is dropped then. The same holds for a storage that another node of
the call holds unpacked, because it would be held twice.

Note: [Edits]
Autograd does not check edits of tensors that hooks have packed. So each holder keeps
the tensor's version counter, in a tensor without elements, and an edit is an error as
without hooks. Edits through ``.data`` have no counter: if a storage is saved twice in a
layer's first call, its bits are compared.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NoReturn, Protocol, TypeAlias

import torch

from mimose.actions.base import Invocation, Probe
from mimose.actions.host import WITH_STREAMS, Packed
from mimose.actions.keep import KeepLess
from mimose.exactness.layer import Layer
from mimose.exceptions import RecomputationError
from mimose.planners import ActionSpec
from mimose.planners.actions import KEEP
from mimose.tensors import bytes_of, is_plain, storages_in, sum_of_words, tensors_in
from mimose.torch_private import (
    NO_GRAPH_TASK,
    SavedHooks,
    current_graph_task,
    drop_saved_hooks,
    keeps_graph,
    push_saved_hooks,
    queue_callback,
    storage_key,
    top_saved_hooks,
    version_of,
    without_dispatch_modes,
)

_LEAST_BYTES = 4096
"""Smaller storages stay, because to compress one takes microseconds to begin, and its
record takes almost a kilobyte."""
_SAME_VALUES = frozenset(
    ("TBackward0", "ToCopyBackward0", "TransposeBackward0", "ViewBackward0")
)
"""Nodes through which a tensor is still a weight."""
_ACCUMULATE = "torch::autograd::AccumulateGrad"

Fail: TypeAlias = Callable[[str], NoReturn]
"""Raises an error that names a layer and the reason."""


class Codec(contextlib.AbstractContextManager[Any], Protocol):
    """Packs the storages of one call; the call's forward runs in its context."""

    def role(self, tensor: torch.Tensor) -> Hashable | None:
        """Return the role in which a tensor is being saved; None if it must stay."""
        ...

    def pack(self, tensor: torch.Tensor, role: Any) -> Packed | None:
        """Pack the storage of a tensor; None if it must stay."""
        ...


def stream_now(device: torch.device) -> object:
    """Return this thread's stream; None on a device without streams."""
    if device.type not in WITH_STREAMS:
        return None
    return torch.accelerator.current_stream(device)


class Box:
    """A packed storage. One backward unpacks it once for all readers.

    Args:
        packed: The packed form of the storage.

    Attributes:
        packed: The same; None if the storage itself is held after all.
    """

    __slots__ = ("__weakref__", "_back", "_stream", "packed")

    def __init__(self, packed: Packed) -> None:
        self.packed: Packed | None = packed
        self._back: torch.UntypedStorage | None = None
        self._stream: object = None

    def storage(self, device: torch.device) -> torch.UntypedStorage:
        """Return the storage, for this thread's stream."""
        if self.packed is None:
            assert self._back is not None
            return self._back
        stream = stream_now(device)
        if self._back is not None and self._stream == stream:
            return self._back
        storage = self.packed.unpack()
        if current_graph_task() != NO_GRAPH_TASK:  # outside a backward nothing is kept
            self._back, self._stream = storage, stream
            if keeps_graph():
                queue_callback(self._forget)
        return storage

    def _forget(self) -> None:
        if self.packed is not None:
            self._back = None

    def undo(self, storage: torch.UntypedStorage) -> None:
        """Hold the storage itself from now on."""
        self._back, self.packed = storage, None


class _Saved:
    """Stands for a saved tensor: Note: [Edits].

    Args:
        tensor: The saved tensor.
        box: Holds its storage; None if the storage stays.
        fail: Raises the error that names the layer.
    """

    __slots__ = ("__weakref__", "_box", "_fail", "_looks", "_version", "tensor")

    def __init__(self, tensor: torch.Tensor, box: Box | None, fail: Fail) -> None:
        self.tensor = tensor.detach()
        self._version = version_of(self.tensor)
        self._fail = fail
        self._box = box
        if box is not None:
            offset, shape = self.tensor.storage_offset(), self.tensor.shape
            self._looks = offset, shape, self.tensor.stride()
            self.tensor.data = self.tensor.new_empty(0)  # keeps the version counter

    def give(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            RecomputationError: It was edited since it was saved.
        """
        if version_of(self.tensor) != self._version:
            self._fail("a tensor that its backward needs was edited in place")
        if self._box is None:
            return self.tensor
        storage = self._box.storage(self.tensor.device)
        empty = torch.empty(0, dtype=self.tensor.dtype, device=storage.device)
        return empty.set_(storage, *self._looks)


class _Seen:
    """A storage that was packed, at the time it was first saved.

    Args:
        tensor: A tensor in the storage.
        words: The sum of its bits, in a layer's first call.
    """

    def __init__(self, tensor: torch.Tensor, words: torch.Tensor | None) -> None:
        storage = tensor.untyped_storage()
        self.n_bytes = storage.nbytes()
        self.boxes: dict[Hashable, Box] = {}
        """The packed forms, by role."""
        self._version = version_of(tensor)
        self._words = words
        self._storage: weakref.ref[Any] = weakref.ref(storage)

    def now(self) -> torch.UntypedStorage | None:
        """Return the storage; None if it was freed."""
        found: torch.UntypedStorage | None = self._storage()
        return found

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the storage and has not been edited since."""
        is_same = self._version == version_of(tensor)
        return is_same and self.now() is tensor.untyped_storage()

    def differs(self, words: torch.Tensor | None) -> bool:
        """Whether its bits have changed."""
        return words is not None and bool(words != self._words)


class CallHooks:
    """Packs what one call saves: Note: [What stays].

    Args:
        codec: Packs it.
        stays: Tensors whose storages stay, in nested containers.
        fail: Raises the error that names the layer.
        is_first: Whether the call is the layer's first under the action.

    Autograd holds this while a node of the call holds saved tensors.

    Attributes:
        was_refused: Whether the codec could not pack a storage.
        edits_data: Whether the layer edits saved tensors through ``.data``.
    """

    def __init__(
        self, codec: Codec, stays: object, fail: Fail, *, is_first: bool
    ) -> None:
        self.was_refused = self.edits_data = False
        self._codec = codec
        self._stays = storages_in(stays).keys()
        self._fail = fail
        self._is_first = is_first
        self._seen: dict[int, _Seen] = {}
        self._made: list[_Seen] = []
        self._exact: list[weakref.ref[_Saved]] = []
        self._outer: SavedHooks | None = None

    def __enter__(self) -> CallHooks:
        self._outer = top_saved_hooks(False)
        push_saved_hooks(self._pack, _Saved.give)
        return self

    def __exit__(self, *_: object) -> None:
        drop_saved_hooks(self._outer)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        with without_dispatch_modes():  # no tracker counts this
            saved = _Saved(tensor, self._box(tensor), self._fail)
        if saved.tensor.numel():
            self._exact.append(weakref.ref(saved))
        return saved

    def _box(self, tensor: torch.Tensor) -> Box | None:
        """Return the box with a tensor's storage; None if the storage stays."""
        if type(tensor) is not torch.Tensor or not is_plain(tensor):
            return None
        if tensor.is_conj() or tensor.is_neg() or _is_weight(tensor):
            return None
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._stays or storage.nbytes() < _LEAST_BYTES:
            return None
        role = self._codec.role(tensor)
        if role is None:
            return None
        words = sum_of_words(bytes_of(storage)) if self._is_first else None
        seen = self._seen.get(key)
        if seen is not None and seen.is_of(tensor) and seen.differs(words):
            self.edits_data, seen = True, None
        if seen is None or not seen.is_of(tensor):
            seen = self._seen[key] = _Seen(tensor, words)
            self._made.append(seen)
        if role not in seen.boxes:
            packed = self._codec.pack(tensor.detach(), role)
            if packed is None:
                self.was_refused = True
                return None
            seen.boxes[role] = Box(packed)
        return seen.boxes[role]

    def finish(self, output: object) -> tuple[list[Box], int]:
        """Return the boxes at the end of the call, and the bytes of freed storages.

        Note: [What stays]
        """
        alone = (saved.tensor for ref in self._exact if (saved := ref()) is not None)
        stay = storages_in([output, *alone])
        boxes: list[Box] = []
        freed_bytes = 0
        for seen in self._made:
            storage = seen.now()
            if storage is not None and storage_key(storage) in stay:
                for box in seen.boxes.values():
                    box.undo(storage)
                continue
            refs = list(map(weakref.ref, seen.boxes.values()))
            seen.boxes.clear()
            held = [one for ref in refs if (one := ref()) is not None]  # by a node
            boxes += held
            if held and storage is None:
                freed_bytes += seen.n_bytes
        for each in (self._seen, self._made, self._exact):
            each.clear()
        return boxes, freed_bytes


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a weight, or a cast of one, which stays in memory anyway."""
    node = tensor.grad_fn
    if node is None:
        return tensor.requires_grad
    while node is not None and node.name() in _SAME_VALUES:
        node = node.next_functions[0][0]
    return node is not None and node.name() == _ACCUMULATE


class SavedTensorAction(KeepLess):
    """The action that holds what a call saves in another form or place.

    Args:
        spec: The action's spec.
        make_codec: Makes the codec of a call.
    """

    def __init__(self, spec: ActionSpec, make_codec: Callable[[], Codec]) -> None:
        self.spec = spec
        self._make_codec = make_codec
        self._known: weakref.WeakSet[Layer] = weakref.WeakSet()

    def run(self, call: Invocation, probe: Probe | None) -> Any:
        """Run the forward, and pack what it saves."""
        layer, codec = call.layer, self._make_codec()
        own = itertools.chain(layer.module.parameters(), layer.module.buffers())
        hooks = CallHooks(
            codec,
            [call.args, call.kwargs, *own],
            partial(_fail, layer.name),
            is_first=layer not in self._known,
        )
        with hooks, codec:
            output = super().run(call, probe)
        boxes, freed_bytes = hooks.finish(list(tensors_in(output)))
        self._known.add(layer)
        if hooks.edits_data:
            layer.exclude(self.spec.name, "it edits saved tensors through .data")
        if probe is not None:
            self._record(probe, hooks, boxes, freed_bytes)
        return output

    def _record(
        self, probe: Probe, hooks: CallHooks, boxes: list[Box], freed_bytes: int
    ) -> None:
        """Record what a measured call holds."""
        measured = probe.trace.calls[probe.index]
        live = measured.held_bytes.get(KEEP.name, 0.0)
        measured.held_bytes[KEEP.name] = live + freed_bytes
        packed = [box.packed for box in boxes if box.packed is not None]
        if hooks.was_refused:  # not to be learned as what the action frees
            for box, each in zip(boxes, packed, strict=True):
                box.undo(each.unpack())
            measured.action = KEEP.name
            return
        on_device = sum(each.device_bytes for each in packed)
        measured.held_bytes[self.spec.name] = live + on_device
        if self.spec.needs_host:
            on_host = sum(each.host_bytes for each in packed)
            measured.host_bytes[self.spec.name] = on_host


def _fail(name: str, why: str) -> NoReturn:
    msg = (
        f"{name}: {why} before the backward, which is an error without mimose too. "
        f"This step's gradients are incomplete: zero them, and edit a copy in that "
        f"layer"
    )
    raise RecomputationError(msg)
