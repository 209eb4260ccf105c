"""The part of autograd's graph that one call of a unit has made, and what it saved.

Note: [Positions]
Nodes are numbered in the order of one walk from the outputs, and everything else speaks
of numbers: a node would hold the graph, and the graph what was to be freed. Two calls
whose graphs have equal signatures number the same nodes alike.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from mimose.actions.replay.operators import OPERATORS
from mimose.torch_private import (
    saved_handle,
    saved_names,
    saved_value,
    sequence_number,
    storage_key,
)

_LEAST_SHARE = 16
"""Storages of less than this part of the largest input are not worth a hook."""

ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The kind of the node at which a parameter's gradient ends."""

Edge: TypeAlias = "tuple[str, int, int]"
"""What an operand is: ``("node", number, output)``, ``("input", which, 0)``,
``("outside", 0, 0)`` for what neither was given nor made by the unit, or ``("", 0,
0)`` where no gradient flows."""

Kinds: TypeAlias = tuple[tuple[str, tuple[Edge, ...]], ...]
"""Kind and edges of each node."""

Signature: TypeAlias = tuple[Kinds, tuple[int, ...], tuple[str, ...]]
"""What must be equal for a recipe to be looked at: the graph, inputs edited, and where
the inputs are among the arguments."""


class Value(NamedTuple):
    """An output of a node."""

    node: int
    output: int


class Slot(NamedTuple):
    """A tensor that a node has saved."""

    node: int
    name: str


class Nodes:
    """The nodes of one call, by position: Note: [Positions].

    Args:
        outputs: What the unit returned.
        inputs: The tensors that it was given.
        began: The sequence number when it was entered: older nodes are not its own.
        most: More nodes are not walked.

    Raises:
        LookupError: There are more.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        began: int,
        most: int,
    ) -> None:
        self.inputs: dict[tuple[Any, int], int] = {}
        for number, tensor in enumerate(inputs):
            if tensor.requires_grad and tensor.grad_fn is not None:
                self.inputs.setdefault((tensor.grad_fn, tensor.output_nr), number)
        self.nodes: list[Any] = []
        self.kinds: list[str] = []
        self._number: dict[Any, int] = {}
        self._edges: list[tuple[Edge, ...]] = []
        for tensor in outputs:
            if tensor.grad_fn is not None:
                self._enter(tensor.grad_fn, began)
        for node in self.nodes:  # which grows meanwhile
            self._edges.append(self._edges_of(node, began))
            if len(self.nodes) > most:
                msg = f"more than {most} nodes"
                raise LookupError(msg)

    def _edges_of(self, node: Any, began: int) -> tuple[Edge, ...]:
        edges: list[Edge] = []
        number, inputs = self._number, self.inputs
        for following in node.next_functions:
            behind, output = following
            if behind is None:
                edges.append(_NOWHERE)
            elif following in inputs:
                edges.append(("input", inputs[following], 0))
            elif behind in number or self._enter(behind, began):
                edges.append(("node", number[behind], output))
            else:
                edges.append(_OUTSIDE)
        return tuple(edges)

    def _enter(self, node: Any, began: int) -> bool:
        """Give a node its number; return whether it is the unit's own."""
        if node in self._number:
            return True
        kind = _KINDS.get(type(node)) or _kind_of(node)
        if kind != ACCUMULATE and sequence_number(node) < began:
            return False
        self._number[node] = len(self.nodes)
        self.nodes.append(node)
        self.kinds.append(kind)
        return True

    def edge(self, node: int, number: int) -> Edge:
        """Return where an edge of a node leads to."""
        return self._edges[node][number]

    def n_edges(self, node: int) -> int:
        """Return how many edges a node has."""
        return len(self._edges[node])

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """Return who made a tensor, if that is a node of the unit."""
        number = self._number.get(tensor.grad_fn)
        return None if number is None else Value(number, tensor.output_nr)

    def signature(self) -> Kinds:
        """Return what must be equal for positions to mean the same."""
        return tuple(zip(self.kinds, self._edges, strict=True))


def _kind_of(node: Any) -> str:
    name: str = node.name()
    if name == _BATCH_NORM and not saved_value(node, "training"):
        return f"{name} in evaluation mode"
    if name == ACCUMULATE or (name in OPERATORS and name != _BATCH_NORM):
        _KINDS[type(node)] = name
    return name


_KINDS: dict[type, str] = {}
"""Names of nodes by their Python type, where each name has its own."""
_BATCH_NORM = "NativeBatchNormBackward0"
_NOWHERE: Edge = ("", 0, 0)
_OUTSIDE: Edge = ("outside", 0, 0)


class Ran(NamedTuple):
    """A call of a unit that has just run, nothing dropped yet."""

    module: nn.Module
    inputs: Sequence[torch.Tensor]
    """The tensors that it was given."""
    outputs: Sequence[torch.Tensor]
    """Those returned that have a graph."""
    nodes: Nodes
    edited: tuple[int, ...] = ()
    """Those of the inputs, by number, that were changed in place meanwhile."""
    paths: tuple[str, ...] = ()
    """Where the inputs were among the call's arguments."""

    def signature(self) -> Signature:
        """Return what recipes are remembered by."""
        return self.nodes.signature(), self.edited, self.paths


@dataclass(slots=True)
class Saved:
    """A storage that nodes of the unit have saved."""

    n_bytes: int
    slots: list[Slot] = field(default_factory=list)
    root: Value | None = None
    """Who made the whole of it; None where no node of the unit did."""
    shown: Value | None = None
    """The value that does in its place, for the one node that has saved it."""
    is_fixed: bool = False
    """Whether dropping it frees nothing: somebody else holds it, or it is small."""


class UnitGraph:
    """What one call has saved, while all of it is there.

    It holds the graph: it lives as long as a recipe is made of it.

    Args:
        ran: The call.

    Raises:
        RuntimeError: A saved tensor was edited in place.
    """

    def __init__(self, ran: Ran) -> None:
        self.nodes = ran.nodes
        self.kinds = ran.nodes.kinds
        self.slots: dict[Slot, torch.Tensor] = {}
        self.storages: dict[int, Saved] = {}
        self.slot_of: dict[Value, Slot] = {}
        """Where a value itself was saved."""
        self.hidden: dict[int, set[str]] = collections.defaultdict(set)
        """By node, what it has saved in a way that cannot be looked at."""
        self._inputs = [_key(t) if is_strided(t) else -1 for t in ran.inputs]
        own = itertools.chain(ran.module.parameters(), ran.module.buffers())
        held = itertools.chain(own, ran.inputs, ran.outputs)
        self._held = {_key(tensor) for tensor in held if is_strided(tensor)}
        largest = max((tensor.nbytes for tensor in ran.inputs), default=0)
        self._least_bytes = largest // _LEAST_SHARE
        for slot, tensor in self._saved_tensors():
            self.slots[slot] = tensor
            if is_strided(tensor):
                self._take_in(slot, tensor)
        for storage in self.storages.values():
            storage.shown = self._shown(storage)

    def _saved_tensors(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        names: dict[type, tuple[str, ...]] = {}
        for number, node in enumerate(self.nodes.nodes):
            kind = type(node)
            if kind not in names:
                names[kind] = saved_names(node)
            for name in names[kind]:
                handle = saved_handle(node, name)
                if isinstance(handle, tuple) or handle.unpack_hook is not None:
                    self.hidden[number].add(name)
                    continue  # a list of tensors; or somebody has hooks inside
                tensor = saved_value(node, name)
                if isinstance(tensor, torch.Tensor):
                    yield Slot(number, name), tensor

    def _take_in(self, slot: Slot, tensor: torch.Tensor) -> None:
        key = _key(tensor)
        storage = self.storages.get(key)
        if storage is None:
            n_bytes = tensor.untyped_storage().nbytes()
            is_fixed = key in self._held or n_bytes < self._least_bytes
            storage = self.storages[key] = Saved(n_bytes, is_fixed=is_fixed)
        storage.slots.append(slot)
        value = self.nodes.value_of(tensor) or self._cloned(slot)
        if value is not None:
            self.slot_of.setdefault(value, slot)
            storage.root = self.root(value)

    def _shown(self, storage: Saved) -> Value | None:
        """Return an output, saved elsewhere, that shows all that is read of a storage.

        ReLU6's backward asks where its operand lay beyond its bounds, and there its
        output lies on them. In place it has saved a copy of its operand for that.
        """
        (number, name), *others = storage.slots
        operator = OPERATORS.get(self.kinds[number])
        if operator is None or operator.shown != name or others:
            return None
        value = Value(number, 0)
        output, operand = self.slot_of.get(value), self.slots[storage.slots[0]]
        return value if output and _lie_alike(self.slots[output], operand) else None

    def _cloned(self, slot: Slot) -> Value | None:
        """Return the value that a node which edits its operand has saved a copy of."""
        operator = OPERATORS.get(self.kinds[slot.node])
        for operand in (operator and operator.operands) or ():
            if operand.saved == slot.name and operand.edge is not None:
                kind, number, output = self.nodes.edge(slot.node, operand.edge)
                if kind == "node" and self.kinds[number] != ACCUMULATE:
                    return Value(number, output)
        return None

    def root(self, value: Value) -> Value:
        """Return the value whose storage this one lies in, behind all views."""
        operator = OPERATORS.get(self.kinds[value.node])
        while operator is not None and operator.is_view:
            kind, number, output = self.nodes.edge(value.node, 0)
            if kind != "node" or self.kinds[number] == ACCUMULATE:
                break
            value = Value(number, output)
            operator = OPERATORS.get(self.kinds[number])
        return value

    def saved_input(self, number: int) -> Slot | None:
        """Return where an input was saved: autograd minds if that is edited."""
        storage = self.storages.get(self._inputs[number])
        return None if storage is None else storage.slots[0]

    def storage_of(self, slot: Slot) -> int:
        """Return the key of the storage that a saved tensor lies in; -1 for none."""
        tensor = self.slots[slot]
        return _key(tensor) if is_strided(tensor) else -1

    def roots(self) -> Mapping[Value, Slot]:
        """Return, for each storage whose maker is known, a tensor that lies in it."""
        return {
            storage.root: storage.slots[0]
            for storage in self.storages.values()
            if storage.root is not None
        }


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie alike, each in a storage of one size."""
    return (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
        and one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
    )


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in one storage."""
    return tensor.layout == torch.strided


def _key(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())
