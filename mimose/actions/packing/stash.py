"""A call's storages, packed one by one after it has run.

Note: [What is packed]
Of a call's saved storages a recipe lets some go, which are rebuilt. Of those left the
call's own weights and buffers stay, and so do its inputs, but for the one that the
layer before has handed it: the first of its arguments that has a graph. Side tensors,
which several layers read, would be packed by each of them and freed by none. What the
call returns is held by whoever reads it next; where only signs or sizes of it are
needed here, bits take its place, so that the next layer alone decides whether it goes.

Note: [Signs]
A ReLU's result that is rebuilt from something near to what was there has other signs
where it is near zero, and those gradients are wrong altogether. So its signs are held
as bits, and what else reads it is rebuilt. What a small change spoils is not rebuilt
from such at all, and stays. (ResNet-50, untrained, batch 8 at 96 px, 8
bits a value: the gradient was off by 33% of its norm without.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from mimose.actions.packing.base import Codec, Packed, Role, SavedStorage
from mimose.actions.packing.held import HeldStorage, Part
from mimose.actions.packing.memory import is_dense
from mimose.actions.packing.roles import reader_of
from mimose.actions.replay.rebuild import tensor_of
from mimose.actions.replay.recipe import Recipe, Source
from mimose.actions.replay.unit_graph import Ran, Slot, UnitGraph, is_strided
from mimose.torch_private import saved_handle, storage_key

_SOURCES = frozenset((Source.SAVED, Source.WHOLE, Source.INPUT))

Slots: TypeAlias = Sequence[Slot]


class Stash(NamedTuple):
    """What became of a call's storages."""

    lent: Mapping[int, Part]
    """By step of the recipe: what stands for the tensor that it begins with."""
    inexact: frozenset[int]
    """Those of these steps that begin with something near to what was saved."""
    served: frozenset[Slot]
    """Of what the recipe lets go, that need not be rebuilt: Note: [Signs]."""
    inputs: Sequence[torch.Tensor]
    """Of the call's inputs those that are still held."""
    freed_bytes: float
    """Of what the call itself made, less what is held on the device in its place."""
    host_bytes: float
    released: Mapping[int, int]
    """Bytes by key of the storages of inputs that are not held any more."""
    output_bytes: float
    """Of what it returns, that its own nodes have saved."""
    saved_output_bytes: float
    """Of these, that they still hold."""


def pack(recipe: Recipe | None, ran: Ran, bits: Codec, codec: Codec) -> Stash:
    """Pack what a recipe does not rebuild: Note: [What is packed].

    Args:
        recipe: Lets some storages go; it is applied afterwards.
        ran: The call, nothing dropped yet.
        bits: Packs what is read for its signs or sizes alone.
        codec: Packs the others.

    Raises:
        RuntimeError: A codec failed. What was packed before it stays so.
    """
    return _Packer(recipe, ran, bits, codec).run()


class _Packer:
    """Packs one call: its arguments are those of `pack`."""

    def __init__(
        self, recipe: Recipe | None, ran: Ran, bits: Codec, codec: Codec
    ) -> None:
        self._ran, self._bits, self._codec = ran, bits, codec
        self._graph = UnitGraph(ran)
        self._recipe = recipe
        self._dropped = {slot for slot, _ in recipe.drops} if recipe else set[Slot]()
        self._steps = _source_steps(recipe, ran) if recipe else {}
        self._n_asked = recipe.readers if recipe else ()
        self._outputs = {_key(tensor) for tensor in ran.outputs}
        self._handed = _handed_key(ran.inputs)
        inputs = {_key(tensor) for tensor in ran.inputs}
        own = {_key(t) for t in (*ran.module.parameters(), *ran.module.buffers())}
        self._stays = (inputs | own) - {self._handed}
        self._lent: dict[int, Part] = {}
        self._inexact: set[int] = set()
        self._served: set[Slot] = set()
        self._released: dict[int, int] = {}
        self._freed = self._host = self._output = self._saved_output = 0.0

    def run(self) -> Stash:
        """Take one storage after the other, so that each goes as the next is packed."""
        for key in list(self._graph.storages):
            storage = self._graph.storages.pop(key)
            slots = [slot for slot in storage.slots if slot not in self._dropped]
            saved = [self._graph.slots.pop(slot) for slot in slots]
            others = [tensor for _, tensor in self._steps.get(key, ())]
            if not saved or key in self._stays or any(map(_is_weight, saved)):
                continue
            if _are_plain([*saved, *others]):
                tensors = [tensor.detach() for tensor in saved]
                del saved, others
                self._take(key, storage.n_bytes, slots, tensors)
        if self._recipe is not None and self._inexact:
            self._serve_signs(self._recipe)
        return Stash(
            self._lent,
            frozenset(self._inexact),
            frozenset(self._served),
            [t for t in self._ran.inputs if _key(t) not in self._released],
            self._freed,
            self._host,
            self._released,
            self._output,
            self._saved_output,
        )

    def _take(
        self, key: int, n_bytes: int, slots: Slots, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Pack a storage, if a codec takes it, and put hooks on who has saved it."""
        steps = self._steps.pop(key, ())
        self._output += n_bytes if key in self._outputs else 0
        codec, packed = self._packed(key, self._saved(slots, tensors, bool(steps)))
        if packed is None:
            self._saved_output += n_bytes if key in self._outputs else 0
            return
        held = HeldStorage(packed)
        for step, tensor in steps:
            self._lent[step] = held.part(tensor, self._n_asked[step])
            if not codec.is_exact:
                self._inexact.add(step)
        for slot, tensor in zip(slots, tensors, strict=True):
            self._hook(slot, held.part(tensor))
        if key == self._handed:
            self._released[key] = n_bytes
        elif key not in self._outputs:
            self._freed += n_bytes
        self._freed -= packed.device_bytes
        self._host += packed.host_bytes

    def _serve_signs(self, recipe: Recipe) -> None:
        """Hold signs of what is rebuilt from something near: Note: [Signs]."""
        for slot, step in recipe.drops:
            if self._inexact.isdisjoint(recipe.needs[step]):
                continue
            tensor = self._graph.slots.pop(slot).detach()
            saved = self._saved([slot], [tensor], False)
            if saved.readers[0].role is Role.FRAGILE:
                self._served.add(slot)  # it stays as it is
                self._freed -= tensor.untyped_storage().nbytes()
            if saved.readers[0].role is not Role.SIGN:
                continue
            packed = self._bits.pack(saved)
            if packed is not None:
                self._hook(slot, HeldStorage(packed).part(tensor))
                self._served.add(slot)
                self._freed -= packed.device_bytes

    def _hook(self, slot: Slot, part: Part) -> None:
        node = self._ran.nodes.nodes[slot.node]
        saved_handle(node, slot.name).register_hooks(_Instead(part), Part.lend)

    def _packed(self, key: int, saved: SavedStorage) -> tuple[Codec, Packed | None]:
        if self._bits.takes(saved):
            return self._bits, self._bits.pack(saved)
        # What the next layer reads it may pack itself.
        if key in self._outputs or not self._codec.takes(saved):
            return self._codec, None
        return self._codec, self._codec.pack(saved)

    def _saved(
        self, slots: Slots, tensors: Sequence[torch.Tensor], is_source: bool
    ) -> SavedStorage:
        nodes = self._ran.nodes
        readers = [
            reader_of(nodes, slot, tensor)
            for slot, tensor in zip(slots, tensors, strict=True)
        ]
        return SavedStorage(_whole(tensors), readers, is_source)


class _Instead:
    """Puts a part in the place of the tensor that was saved."""

    __slots__ = ("_part",)

    def __init__(self, part: Part) -> None:
        self._part = part

    def __call__(self, _: torch.Tensor) -> Part:
        return self._part


def _source_steps(
    recipe: Recipe, ran: Ran
) -> dict[int, list[tuple[int, torch.Tensor]]]:
    """Return, by storage, the steps that begin with it, and its tensor there."""
    found: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for index, step in enumerate(recipe.steps):
        if step.source in _SOURCES:
            tensor = tensor_of(step, ran.nodes, ran.inputs)
            if tensor is not None and is_strided(tensor):
                found.setdefault(_key(tensor), []).append((index, tensor))
    return found


def _handed_key(inputs: Sequence[torch.Tensor]) -> int:
    """Return the storage of what the layer before has handed over; -1 for none."""
    made = (tensor for tensor in inputs if tensor.grad_fn is not None)
    first = next(filter(is_strided, made), None)
    return -1 if first is None else _key(first)


def _whole(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a tensor that fills the storage in which some lie."""
    for tensor in tensors:
        n_bytes = tensor.untyped_storage().nbytes()
        if tensor.nbytes == n_bytes and is_dense(tensor):
            return tensor
    first = tensors[0]
    n_elements = first.untyped_storage().nbytes() // first.element_size()
    return first.as_strided((n_elements,), (1,), 0)


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether views of one storage are told apart by where they lie in it.

    Not where one reads complex numbers and another their parts, or one of them the
    conjugate; nor are numbers tensors everywhere, which some nodes have saved.
    """
    return (
        all(
            tensor.dim() and not (tensor.is_conj() or tensor.is_neg())
            for tensor in tensors
        )
        and len({tensor.dtype for tensor in tensors}) == 1
    )


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor is somebody's weight, of this layer or not: it is there anyway.

    Args:
        tensor: As it was saved.
    """
    return tensor.is_leaf and tensor.requires_grad


def _key(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage()) if is_strided(tensor) else -1
