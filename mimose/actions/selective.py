"""Selective recomputation: drops some of what a layer saved, and rebuilds it.

The idea to recompute only cheap operators is that of selective activation recomputation
in Megatron-LM (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022); to choose tensor by tensor what a convolutional net keeps,
that of Checkmate (Jain et al., MLSys 2020) and MONeT (Shah et al., ICLR 2021). There
operators are named by hand or found by a solver; here `mimose.actions.points` chooses
within the autograd graph of each kind of layer, by the prices of the device.

After a layer's forward mimose walks its part of the graph. With hooks on single nodes
it drops what is chosen. In the backward it rebuilds each tensor just before a node
needs it, by running only the operators that made it, on tensors that still exist.
Results of attention stay. No module of the layer is replaced, and no dispatch mode is
needed.

A recipe says how to rebuild: positions of nodes and names of what they saved, as plain
data. It is made once for each kind of layer and graph. Before anything is dropped,
everything that it rebuilds is compared bit by bit with the saved tensors, in the
recomputation of a measured step or in the call for which it is made. All other
arguments of an operator are read from its node, and an epsilon from the module that
owns the norm's weight.

Note: [What is checked]
In every call the graph, the layout and aliases of its tensors, their versions and the
flags that choose kernels must be those for which the recipe was made. The backward
compares sums over the rebuilt storages: of all their words, or of one stripe in
`_STRIPES`, in turns, if nothing is new in the call. New is a call if, with its recipe,
its sizes, strides, offsets and operators' arguments were never compared whole, or if
the layer was not since one of its attributes or arguments changed. If no node shows
what an operator was given (the fill of a padding, strides of what is not saved), what
depends on it is always compared whole. An epsilon, which no node saves either, shows in
the deviations that the norm has saved, if these are in float32: all of them are
compared in every call.

So what a stripe can miss is: another rounding of a kernel at equal sizes, and edits
that autograd does not see and neither attributes nor arguments announce. A hundred
changed places are missed in one call of 430.

Note: [Positions]
Nodes are numbered in the order of one walk from the outputs, and all other data has
these numbers: a node would keep the graph alive, and the graph the memory to be freed.
In two calls whose graphs have equal signatures the same nodes have the same numbers.

Note: [What is held]
Hooks hold tensors without a graph, and no node, so they are freed with the graph. Each
tensor is stored with its version: if it was edited, rebuilding would give other values,
so that is an error.
"""

from __future__ import annotations

import collections
import enum
import itertools
import math
import weakref
from collections.abc import (
    Callable,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
)
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

import cachetools
import numpy as np
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from mimose.actions.base import Invocation, Probe
from mimose.actions.flags import pack_flags, unpack_flags
from mimose.actions.keep import KeepLess
from mimose.actions.operators import OPERATORS, POOL, POOL_AGAIN, Operand
from mimose.actions.points import corners, few
from mimose.actions.recompute import unchanged
from mimose.cost.prices import Prices, prices_of
from mimose.exactness.guard import State
from mimose.exactness.layer import Layer
from mimose.exceptions import RecomputationError, first_line
from mimose.inputs.call_shape import argument_tensors, argument_values
from mimose.measure.storage import precision_of
from mimose.memory.out_of_memory import is_out_of_memory
from mimose.planners import ActionSpec
from mimose.planners.actions import KEEP, REBUILDING, RECOMPUTE
from mimose.tensors import (
    bits,
    different_bits,
    same_bits,
    tensors_in,
    version,
    words_of,
)
from mimose.torch_private import (
    KERNEL_FLAGS,
    NO_GRAPH_TASK,
    current_graph_task,
    matmul_precision,
    next_sequence_number,
    output_of,
    parameters_of,
    saved_handle,
    saved_names,
    saved_value,
    sequence_number,
    storage_key,
    without_autocast,
)
from mimose.types import Measured, OnRecompute

_MOST_NODES = 4096
"""A call with more nodes is kept."""
_MOST_KINDS = 256
"""The most kinds of layers and graphs that are remembered."""
_MOST_MADE = 64
"""The most recipes for one layer; a layer that needs more drops nothing."""
_MOST_SEEN = 4096
"""The most sizes that are remembered."""
_MOST_REFUSED = 3
"""How often a layer tries an action for which there is no memory."""
_STRIPES = 17
"""Of so many stripes a call compares one. The number is odd, so that one stripe has
parts of all rows and columns."""
_STRIPE_WORDS = 64
"""The words that lie together in a stripe: 512 bytes."""
_LEAST_STRIPED = 2**20
"""A storage of fewer bytes is compared whole: there kernels take longer to start than
to run."""
_FOLDS = 127
"""As many distant parts of a storage, or more, are added before they are weighed."""
_SMALL_FACTORS = 2 * 3 * 5 * 7 * 11 * 13
_NOISE_SAMPLE = 256
"""The number of elements that distinguishes dropout's noise from other tensors."""

ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The kind of the node at which a parameter's gradient ends."""
_BATCH_NORM = "NativeBatchNormBackward0"
_CAST = "ToCopyBackward0"
_CONVOLUTION = "ConvolutionBackward0"

Edge: TypeAlias = "tuple[str, int, int]"
"""The origin of an operand: ``("node", number, output)``, ``("input", number, 0)``,
``("outside", 0, 0)`` if the layer neither got nor made it, or ``("", 0, 0)`` if no
gradient flows."""
_NOWHERE: Edge = ("", 0, 0)
_OUTSIDE: Edge = ("outside", 0, 0)
_NO_SHAPE = torch.Size(())


class Value(NamedTuple):
    """An output of a node."""

    node: int
    output: int


class Slot(NamedTuple):
    """A tensor that a node has saved."""

    node: int
    name: str


class Price(NamedTuple):
    """What it takes to run an operator again."""

    flops: float
    """Of a product."""
    moved_bytes: float
    """What it reads and writes, beyond what takes as long as its FLOPs."""
    like_bytes: float = 0.0
    """Bytes that are moved in the time of its FLOPs."""


# ------------------------------------------------------------------ the graph


class Ran:
    """A layer call that has just run, with nothing dropped yet.

    Args:
        module: The layer.
        given: Its input tensors, each with its path among the arguments.
        outputs: Its outputs that have a graph.
        edited: By input, whether it was edited in place.
        began: The sequence number at its entry; older nodes do not belong to it.

    Raises:
        LookupError: It has too many nodes.

    Attributes:
        module: The layer.
        inputs: Its input tensors.
        outputs: Its outputs that have a graph.
        nodes: Its nodes: Note: [Positions].
        kinds: The kinds of its nodes.
        edges: For each node the origins of its operator's operands.
    """

    def __init__(
        self,
        module: nn.Module,
        given: Several[tuple[str, torch.Tensor]],
        outputs: Several[torch.Tensor],
        edited: tuple[bool, ...],
        began: int,
    ) -> None:
        self.module, self.outputs, self._edited = module, outputs, edited
        self.inputs = [tensor for _, tensor in given]
        self._paths = tuple(path for path, _ in given)
        self._input_of: dict[tuple[Any, int], int] = {}
        for number, tensor in enumerate(self.inputs):
            if tensor.requires_grad:  # in a recomputation it is a leaf
                edge = get_gradient_edge(tensor)
                self._input_of.setdefault((edge.node, edge.output_nr), number)
        self.nodes: list[Any] = []
        self.kinds: list[str] = []
        self._number: dict[Any, int] = {}
        self.edges: list[tuple[Edge, ...]] = []
        for tensor in outputs:
            self._enter(tensor.grad_fn, began)
        for node in self.nodes:  # which grows in the loop
            self.edges.append(self._edges_of(node, began))
            if len(self.nodes) > _MOST_NODES:
                msg = f"more than {_MOST_NODES} nodes"
                raise LookupError(msg)

    def _edges_of(self, node: Any, began: int) -> tuple[Edge, ...]:
        edges: list[Edge] = []
        number, inputs = self._number, self._input_of
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
        """Number a node; return whether it belongs to the layer."""
        if node in self._number:
            return True
        kind = _kind_of(node)
        if kind != ACCUMULATE and sequence_number(node) < began:
            return False
        self._number[node] = len(self.nodes)
        self.nodes.append(node)
        self.kinds.append(kind)
        return True

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """Return the output of a layer's node that a tensor is; None if it is none."""
        number = self._number.get(tensor.grad_fn)
        return None if number is None else Value(number, tensor.output_nr)

    def weight_of(self, node: int) -> torch.Tensor | None:
        """Return the weight of a norm, as its module owns it; None without a weight."""
        kind, number, _ = self.edges[node][1]
        if kind == "node" and self.kinds[number] == ACCUMULATE:
            weight: torch.Tensor = self.nodes[number].variable
            return weight
        if "weight" in saved_names(self.nodes[node]):
            frozen: torch.Tensor | None = saved_value(self.nodes[node], "weight")
            return frozen
        return None

    def signature(self) -> tuple[object, ...]:
        """Return what must be equal so that positions have the same meaning."""
        pairs = tuple(zip(self.kinds, self.edges, strict=True))
        return type(self.module), pairs, self._edited, self._paths


def _kind_of(node: Any) -> str:
    name: str = node.name()
    if name == _BATCH_NORM and not saved_value(node, "training"):
        return f"{name} in evaluation mode"
    if name == POOL and output_of(node, 0).device.type != "cpu":
        return POOL_AGAIN
    return name


@dataclass(slots=True)
class Saved:
    """A storage that nodes of the layer have saved."""

    slots: list[Slot] = field(default_factory=list)
    root: Value | None = None
    """The output that fills it; None if no node of the layer made it."""
    shown: Value | None = None
    """The output that can replace it for the one node that has saved it."""
    is_fixed: bool = False
    """Whether other code holds it, so that dropping it frees nothing."""


class Graph:
    """What one call has saved, before anything is dropped.

    It holds the graph, so it lives only while a recipe is made or compared.

    Args:
        ran: The call.
        prices: What moving a byte costs.

    Raises:
        RuntimeError: A saved tensor was edited in place.
    """

    def __init__(self, ran: Ran, prices: Prices) -> None:
        self.ran, self._prices = ran, prices
        self.kinds = ran.kinds
        self.slots: dict[Slot, torch.Tensor] = {}
        self.storages: dict[int, Saved] = {}
        self.slot_of: dict[Value, Slot] = {}
        """Where a value was saved."""
        self.hidden: dict[int, set[str]] = collections.defaultdict(set)
        """By node, the names of what it has saved and cannot be read."""
        # With cudnn.benchmark a later run may choose another algorithm.
        self.keeps_products = torch.backends.cudnn.benchmark and any(
            not tensor.is_cpu for tensor in ran.outputs
        )
        self._inputs = [_key(tensor) for tensor in ran.inputs]
        own = itertools.chain(ran.module.parameters(), ran.module.buffers())
        held = set(map(_key, itertools.chain(own, ran.inputs, ran.outputs)))
        for slot, tensor in self._saved_tensors():
            self.slots[slot] = tensor
            if _key(tensor) != -1:
                self._take_in(slot, tensor, held)
        for storage in self.storages.values():
            storage.shown = self._shown(storage)

    def _saved_tensors(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        for number, node in enumerate(self.ran.nodes):
            for name in saved_names(node):
                if _is_hidden(saved_handle(node, name)):
                    self.hidden[number].add(name)
                    continue  # a list of tensors, or other code's hook is on it
                tensor = saved_value(node, name)
                if isinstance(tensor, torch.Tensor):
                    yield Slot(number, name), tensor

    def _take_in(self, slot: Slot, tensor: torch.Tensor, held: set[int]) -> None:
        key = _key(tensor)
        storage = self.storages.setdefault(key, Saved(is_fixed=key in held))
        storage.slots.append(slot)
        value = self.ran.value_of(tensor) or self._cloned(slot)
        if self.kinds[slot.node] == POOL_AGAIN and self.are_positions(slot):
            value = Value(slot.node, 1)
        if value is not None:
            self.slot_of.setdefault(value, slot)
            storage.root = self._root(value)

    def _shown(self, storage: Saved) -> Value | None:
        """Return an output, saved elsewhere, that can replace a saved operand.

        ReLU6's backward only needs to know where its operand was beyond the bounds.
        There its output is at a bound. In place, ReLU6 saves a copy of its operand. A
        bound that a short dtype rounds lies beside the output's, and an output that was
        edited shows nothing.
        """
        (number, name), *others = storage.slots
        operator = OPERATORS.get(self.kinds[number])
        if operator is None or operator.shown != name or others:
            return None
        value = Value(number, 0)
        output, operand = self.slot_of.get(value), self.slots[storage.slots[0]]
        if output is None or _lies(self.slots[output]) != _lies(operand):
            return None
        bounds = operator.settings(self.ran.nodes[number])
        is_short = operand.element_size() < 4
        if is_short and bounds != torch.tensor(bounds, dtype=operand.dtype).tolist():
            return None
        is_in_place = self.ran.value_of(operand) is None
        return value if version(self.slots[output]) <= is_in_place else None

    def _cloned(self, slot: Slot) -> Value | None:
        """Return the operand of which a node that edits it in place saved a copy."""
        operator = OPERATORS.get(self.kinds[slot.node])
        for operand in (operator and operator.operands) or ():
            if operand.saved == slot.name and operand.edge is not None:
                kind, number, output = self.ran.edges[slot.node][operand.edge]
                if kind == "node" and self.kinds[number] != ACCUMULATE:
                    return Value(number, output)
        return None

    def _root(self, value: Value) -> Value:
        """Return the value of which this one is a view, through all views."""
        operator = OPERATORS.get(self.kinds[value.node])
        while operator is not None and operator.is_view:
            kind, number, output = self.ran.edges[value.node][0]
            if kind != "node" or self.kinds[number] == ACCUMULATE:
                break
            value = Value(number, output)
            operator = OPERATORS.get(self.kinds[number])
        return value

    def saved_input(self, number: int) -> Slot | None:
        """Return a place where an input was saved, so that autograd detects edits."""
        storage = self.storages.get(self._inputs[number])
        return None if storage is None else storage.slots[0]

    def storage_of(self, slot: Slot) -> int:
        """Return the key of a saved tensor's storage; -1 for none."""
        return _key(self.slots[slot])

    # ---------------------------------------------------------------- bytes and FLOPs

    def made_bytes(self, node: int) -> int:
        """Return the bytes of the storage that a node's operator makes."""
        operator = OPERATORS.get(self.kinds[node])
        return 0 if operator is None or operator.is_view else self._bytes(node, 0)

    def _bytes(self, node: int, output: int) -> int:
        made = output_of(self.ran.nodes[node], output)
        return int(math.prod(made.shape) * made.dtype.itemsize)

    def price(self, node: int) -> Price:
        """Return what it takes to run a node's operator again.

        A product takes its FLOPs, or what it reads and writes if that takes longer.
        """
        operator, edges = OPERATORS[self.kinds[node]], self.ran.edges[node]
        if operator.is_view:
            return Price(0.0, 0.0)
        moved = float(self._bytes(node, 0))
        if self.kinds[node] == POOL_AGAIN:  # it makes positions, too
            moved += 8.0 * moved / output_of(self.ran.nodes[node], 0).dtype.itemsize
        for at, (kind, number, output) in enumerate(edges):
            if kind == "input":
                moved += self.ran.inputs[number].nbytes
            elif kind == "node" and self.kinds[number] == ACCUMULATE:
                moved += self.ran.nodes[number].variable.nbytes
            elif kind == "node":
                moved += self._bytes(number, output)
            else:
                for operand in operator.operands or ():
                    if operand.edge == at and (node, operand.saved) in self.slots:
                        moved += self.slots[Slot(node, operand.saved)].nbytes
        if operator.flops is None:
            return Price(0.0, moved)
        flops = float(operator.flops(self.ran.nodes[node]))
        is_convolution = self.kinds[node] == _CONVOLUTION
        dtype = output_of(self.ran.nodes[node], 0).dtype
        like = flops / self._prices.of(precision_of(dtype, is_convolution))
        return Price(flops, max(0.0, moved - like), like)

    def moved_bytes(self) -> float:
        """Return what all known operators read and write, beyond their FLOPs."""
        return sum(
            self.price(number).moved_bytes
            for number, kind in enumerate(self.kinds)
            if kind in OPERATORS
        )

    def price_to_pack(self, slot: Slot) -> Price:
        """Return what it takes to pack and unpack a tensor: three kernels each."""
        return Price(0.0, 6.0 * self.slots[slot].nbytes)

    def freed_bytes(self, key: int) -> int:
        """Return the bytes that dropping a storage frees."""
        storage = self.storages[key]
        tensor = self.slots[storage.slots[0]]
        n_bytes = int(tensor.untyped_storage().nbytes())
        if storage.shown or storage.root is not None:
            return n_bytes
        if self.are_positions(storage.slots[0]):
            pool = self.ran.nodes[storage.slots[0].node]
            return n_bytes - tensor.numel() * _narrow(pool).itemsize
        return n_bytes - math.ceil(tensor.numel() / 8)

    def is_copy(self, key: int) -> bool:
        """Whether a storage is a copy of a weight in another precision."""
        root = self.storages[key].root
        if root is None or self.kinds[root.node] != _CAST:
            return False
        kind, number, _ = self.ran.edges[root.node][0]
        return kind == "node" and self.kinds[number] == ACCUMULATE

    def work(self, recipe: Recipe | None) -> Work:
        """Return what a recipe frees and takes in this call."""
        if recipe is None:
            return _NO_WORK
        again = draft(self, {slot for slot, _ in recipe.drops})
        return _NO_WORK if again is None else again.work

    def are_positions(self, slot: Slot) -> bool:
        """Whether a pool has saved positions under a name."""
        operator = OPERATORS.get(self.kinds[slot.node])
        return operator is not None and operator.positions == slot.name


def _is_hidden(handle: Any) -> bool:
    """Whether other code's hook is on a saved tensor; a recomputation has its own."""
    if isinstance(handle, tuple):
        return True
    hook = handle.unpack_hook
    return hook is not None and hook is not unchanged


def _lies(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int, int]:
    """Return shape, strides and offset of a tensor, and the bytes of its storage."""
    if tensor.layout != torch.strided:
        return tensor.shape, (), 0, -1
    offset, storage = int(tensor.storage_offset()), tensor.untyped_storage()
    return tensor.shape, tensor.stride(), offset, storage.nbytes()


def _key(tensor: torch.Tensor) -> int:
    """Return the key of a tensor's storage; -1 if it has none."""
    is_strided = tensor.layout == torch.strided
    return storage_key(tensor.untyped_storage()) if is_strided else -1


def looks(
    slots: Iterable[Slot], own: Container[Slot], ran: Ran
) -> tuple[tuple[object, ...], tuple[object, ...]] | None:
    """Return the layouts of some saved tensors of a call.

    The kinds and edges of a graph do not contain them. A layout is the dtype, the order
    of strides, whether the tensor fills its storage, which sizes are 1, with which
    others it shares its storage, and how often it was edited.

    Args:
        slots: Where the tensors were saved.
        own: Those that the layer has made. Other code edits weights and inputs.
        ran: The call.

    Returns:
        Equal for calls with equal layouts; and equal if the sizes are equal, too. None
        if a tensor cannot be read.

    Raises:
        RuntimeError: A tensor was edited in place since it was saved.
    """
    sharing: dict[int, int] = {}
    for tensor in (*ran.inputs, *ran.outputs):
        sharing.setdefault(_key(tensor), len(sharing))
    found, sizes = list[object](), list[object]()
    for slot in slots:
        node, name = slot
        behind = ran.nodes[node]
        if _is_hidden(saved_handle(behind, name)):
            return None
        tensor = saved_value(behind, name)
        if not isinstance(tensor, torch.Tensor):
            return None
        shared = sharing.setdefault(_key(tensor), len(sharing))
        edits = version(tensor) if slot in own else -1
        found.append((shared, edits, *_look(tensor)))
        sizes.append((tensor.device, *_lies(tensor)))
    return tuple(found), tuple(sizes)


def _look(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.layout != torch.strided:
        return (tensor.dtype, tensor.layout)
    shape = tensor.shape
    ones = tuple(size == 1 for size in shape) if 1 in shape else len(shape)
    offset = tensor.storage_offset()
    fills = not offset and tensor.nbytes == tensor.untyped_storage().nbytes()
    order: object = None
    if not tensor.is_contiguous():
        strides = tensor.stride()
        dims = sorted(
            (d for d, size in enumerate(shape) if size != 1), key=lambda d: -strides[d]
        )
        order = tuple((d, strides[d] == 0) for d in dims)
    return (tensor.dtype, ones, fills, bool(offset), order)


# ------------------------------------------------------------------ the recipe


class Source(enum.Enum):
    """The kind of a recipe's step."""

    RUN = enum.auto()
    """A node's operator, run again."""
    PART = enum.auto()
    """One of several outputs of such a run."""
    SAVED = enum.auto()
    """A tensor that a node has saved and keeps."""
    WHOLE = enum.auto()
    """The output of which such a tensor is a view: its whole storage."""
    INPUT = enum.auto()
    WEIGHT = enum.auto()
    NOISE = enum.auto()
    """Zeros and one other number, held as bits."""
    POSITIONS = enum.auto()
    """A max-pool's positions, held in fewer bytes."""
    EPSILON = enum.auto()
    NOTHING = enum.auto()


class Step(NamedTuple):
    """One step of a recipe."""

    source: Source
    node: int = -1
    name: str = ""
    """The name of what is saved or of the attribute, or the kind that is run."""
    operands: tuple[int, ...] = ()
    """Indices of earlier steps."""
    argument: Any = None
    """Which output, which input, or whose attribute."""


_PACKED = (Source.NOISE, Source.POSITIONS)
_MADE = (*_PACKED, Source.RUN, Source.PART)
_READ = (*_PACKED, Source.SAVED, Source.WHOLE)


@dataclass(frozen=True, slots=True)
class Work:
    """What a recipe frees and takes in one call."""

    freed_bytes: float
    flops: float
    """Of products that run again."""
    moved_bytes: float
    """Bytes that all other operators read and write."""
    room_bytes: float
    """About the most that it holds to rebuild one tensor."""
    copied_bytes: float
    """Of copies of weights among what is freed: Note: [Copies]."""


_NO_WORK = Work(0.0, 0.0, 0.0, 0.0, 0.0)


class Asked(NamedTuple):
    """What is known of a call but its graph: Note: [What is checked]."""

    sizes: object
    """Of its tensors, and the arguments of operators."""
    arguments: object
    """The layer's, tensors aside; None if they cannot be compared."""
    state: State
    """What the layer contains."""


class _Compared(NamedTuple):
    arguments: object
    state: weakref.ref[State]
    turns: Iterator[int]


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How to rebuild what one kind of call drops."""

    steps: tuple[Step, ...]
    readers: tuple[int, ...]
    """By step: how often one backward reads it."""
    drops: tuple[tuple[Slot, int], ...]
    """What is dropped, each with the step that rebuilds it."""
    needs: Mapping[int, tuple[int, ...]]
    """For each step that rebuilds a dropped tensor: all steps that it needs, with
    itself."""
    slots: tuple[Slot, ...]
    """Everything that it reads or drops."""
    shown: Mapping[Slot, Slot]
    """Dropped operands that an output replaces, each with where that is saved."""
    own: frozenset[Slot]
    """Those of `slots` that the layer has made."""
    work: Work
    unseen: frozenset[int]
    """Steps whose results depend on what no node shows: Note: [What is checked]."""
    looks: tuple[object, ...] = ()
    """The layouts of those tensors in the call for which it was made."""
    sizes: cachetools.LRUCache[object, bool] = field(
        default_factory=lambda: cachetools.LRUCache(_MOST_SEEN)
    )
    """Those that were compared whole."""
    layers: dict[int, _Compared] = field(default_factory=dict)
    """What the layers contained as they were compared whole, by their index."""

    def stripe(self, layer: Layer, asked: Asked) -> int | None:
        """Return which stripe a call compares; None if it compares everything."""
        found = self.layers.get(layer.index)
        if found is None or asked.arguments is None or asked.sizes not in self.sizes:
            return None
        if found.arguments != asked.arguments or found.state() is not asked.state:
            return None
        return next(found.turns) % _STRIPES

    def compared(self, layer: Layer, asked: Asked) -> None:
        """Record that a call was compared whole."""
        self.sizes[asked.sizes] = True
        state = weakref.ref(asked.state)
        self.layers[layer.index] = _Compared(asked.arguments, state, itertools.count())

    def doubt(self) -> None:
        """Forget what was compared, because it came out otherwise."""
        self.sizes.clear()
        self.layers.clear()


class BarrierError(RuntimeError):
    """A value cannot be rebuilt; the text is the kind of node that prevents it."""


class _Program:
    """Collects the steps that rebuild values without some storages.

    Args:
        graph: The call's graph.
        dropped: Keys of the storages that are dropped.
    """

    def __init__(self, graph: Graph, dropped: Iterable[int]) -> None:
        self._graph = graph
        self._witnesses: set[Slot] = set()
        self._dropped = set(dropped)
        self._roots = {
            storage.root: storage.slots[0]
            for storage in graph.storages.values()
            if storage.root is not None
        }
        self._steps: list[Step] = []
        self._at: dict[object, int] = {}

    def recipe(self, storages: Iterable[Saved]) -> Recipe:
        """Return the recipe that rebuilds storages.

        Raises:
            BarrierError: One cannot be rebuilt.
        """
        drops: list[tuple[Slot, int]] = []
        shown: dict[Slot, Slot] = {}
        for storage in storages:
            for slot in storage.slots:
                value = storage.shown or storage.root
                if storage.shown is not None:
                    shown[slot] = self._graph.slot_of[storage.shown]
                step = self._slot(slot) if value is None else self.value(value)
                drops.append((slot, step))
        steps = self._steps
        readers = [0] * len(steps)
        for index in itertools.chain(
            *(step.operands for step in steps), (step for _, step in drops)
        ):
            readers[index] += 1
        slots = {Slot(s.node, s.name) for s in steps if s.source in _READ}
        slots |= self._witnesses | {slot for slot, _ in drops} | set(shown.values())
        needs = {index: self._behind(index) for _, index in drops}
        storages_of = self._graph.storages
        own = {
            slot
            for slot in slots
            if self._graph.storage_of(slot) in storages_of
            and not storages_of[self._graph.storage_of(slot)].is_fixed
        }
        return Recipe(
            tuple(steps),
            tuple(readers),
            tuple(drops),
            needs,
            tuple(sorted(slots)),
            shown,
            frozenset(own),
            self._work(needs),
            frozenset(map(steps.index, filter(self._is_unseen, steps))),
        )

    def _is_unseen(self, step: Step) -> bool:
        """Whether no node shows all arguments of the operator that a step runs."""
        if step.source is not Source.RUN:
            return False
        operator, made = OPERATORS[step.name], Value(step.node, 0)
        is_saved = made in self._graph.slot_of or made in self._roots
        is_rounded = False
        if operator.has_witness:
            witness = self._graph.slots[Slot(step.node, "result2")]
            is_rounded = witness.element_size() < 4
        # A copy of a bias has one layout. Under autocast each product reads one.
        is_flat = len(output_of(self._graph.ran.nodes[step.node], 0).shape) < 2
        may_lie = operator.may_lie_otherwise and not (is_saved or is_flat)
        return operator.is_unseen or is_rounded or may_lie

    def _work(self, needs: Mapping[int, tuple[int, ...]]) -> Work:
        graph, price, made = self._graph, dict[int, Price](), dict[int, int]()
        for index, step in enumerate(self._steps):
            if step.source is Source.RUN:
                price[index] = graph.price(step.node)
                made[index] = graph.made_bytes(step.node)
            elif step.source in _PACKED:
                price[index] = graph.price_to_pack(Slot(step.node, step.name))
        freed = {key: float(graph.freed_bytes(key)) for key in self._dropped}
        copies = [n_bytes for key, n_bytes in freed.items() if graph.is_copy(key)]
        rooms = [self._most_made(each, made) for each in needs.values()]
        return Work(
            sum(freed.values()),
            sum(each.flops for each in price.values()),
            sum(each.moved_bytes for each in price.values()),
            max(rooms, default=0) + max(freed.values(), default=0.0),
            sum(copies),
        )

    def _most_made(self, needed: Iterable[int], made: Mapping[int, int]) -> int:
        """Return the most bytes that some steps hold, if each is freed after use."""
        left = collections.Counter(
            operand for at in needed for operand in self._steps[at].operands
        )
        held, most = dict[int, int](), 0
        for at in needed:  # operands come first
            step, held[at] = self._steps[at], made.get(at, 0)
            most = max(most, sum(held.values()))
            is_same = step.source is Source.PART or (
                step.source is Source.RUN and OPERATORS[step.name].is_view
            )
            for operand in step.operands:
                left[operand] -= 1
                if is_same:
                    held[at] += held.pop(operand, 0)
                elif not left[operand]:
                    held.pop(operand, None)
        return most

    def nodes(self) -> list[int]:
        """Return the nodes whose operators run again."""
        return [step.node for step in self._steps if step.source is Source.RUN]

    def _behind(self, index: int) -> tuple[int, ...]:
        """Return all steps that one needs, with itself."""
        found, stack = set(), [index]
        while stack:
            one = stack.pop()
            if one not in found:
                found.add(one)
                stack.extend(self._steps[one].operands)
        return tuple(sorted(found))

    def _add(self, key: object, step: Step) -> int:
        if key not in self._at:
            self._at[key] = len(self._steps)
            self._steps.append(step)
        return self._at[key]

    def _is_kept(self, slot: Slot) -> bool:
        return self._graph.storage_of(slot) not in self._dropped

    def _slot(self, slot: Slot) -> int:
        if self._is_kept(slot):
            return self._add(slot, Step(Source.SAVED, *slot))
        key = self._graph.storage_of(slot)
        if self._graph.storages[key].root is not None:
            raise BarrierError(self._graph.kinds[slot.node])
        is_pool = self._graph.are_positions(slot)
        source = Source.POSITIONS if is_pool else Source.NOISE
        return self._add((source, key), Step(source, *slot))

    def value(self, value: Value) -> int:
        """Return the step that rebuilds a value.

        Raises:
            BarrierError: It cannot be rebuilt.
        """
        if value in self._at:
            return self._at[value]
        slot = self._graph.slot_of.get(value)
        if slot is not None and self._is_kept(slot):
            return self._slot(slot)
        slot = self._roots.get(value)
        if slot is not None and self._is_kept(slot):
            return self._add(value, Step(Source.WHOLE, *slot, argument=value))
        kind = self._graph.kinds[value.node]
        if kind == ACCUMULATE:
            return self._add(value, Step(Source.WEIGHT, value.node))
        run = self._run(value.node, kind)
        if OPERATORS[kind].has_many:
            part = Step(Source.PART, operands=(run,), argument=value.output)
            return self._add(value, part)
        self._at[value] = run
        return run

    def _run(self, node: int, kind: str) -> int:
        key = "run", node
        if key in self._at:
            return self._at[key]
        operator = OPERATORS.get(kind)
        if operator is None or (operator.flops and self._graph.keeps_products):
            raise BarrierError(kind)
        n_edges = len(self._graph.ran.edges[node])
        wanted = operator.operands or tuple(map(Operand, range(n_edges)))
        operands = tuple([self._operand(node, operand) for operand in wanted])
        return self._add(key, Step(Source.RUN, node, kind, operands))

    def _operand(self, node: int, operand: Operand) -> int:
        edge = _NOWHERE
        if operand.edge is not None:
            edge = self._graph.ran.edges[node][operand.edge]
        kind, number, output = edge
        if kind == "node":
            return self.value(Value(number, output))
        if kind == "input":
            witness = self._graph.saved_input(number)
            if witness is None:
                raise BarrierError(kind)  # it may be edited later
            self._witnesses.add(witness)
            return self._add(edge, Step(Source.INPUT, argument=number))
        slot = Slot(node, operand.saved)
        if slot in self._graph.slots:
            return self._slot(slot)
        if operand.is_epsilon:
            return self._epsilon(node)
        is_absent = operand.saved and operand.saved not in self._graph.hidden[node]
        sized = operand.sized and saved_value(
            self._graph.ran.nodes[node], operand.sized
        )
        if kind == "outside" or not is_absent or (sized and math.prod(sized)):
            raise BarrierError(self._graph.kinds[node])
        return self._add("nothing", Step(Source.NOTHING))

    def _epsilon(self, node: int) -> int:
        """Find the epsilon in the module that owns a norm's weight."""
        weight = self._graph.ran.weight_of(node)
        for path, owner in self._graph.ran.module.named_modules():
            if any(weight is own for own in parameters_of(owner).values()):
                names = [
                    name
                    for name, value in vars(owner).items()
                    if isinstance(value, float) and "eps" in name
                ]
                if weight is not None and len(names) == 1:
                    step = Step(Source.EPSILON, node, names[0], argument=path)
                    return self._add(("epsilon", node), step)
        raise BarrierError(self._graph.kinds[node])


def draft(graph: Graph, chosen: Container[Slot]) -> Recipe | None:
    """Return a recipe that was not tried; None if nothing is chosen.

    Args:
        graph: A call's graph, with nothing dropped yet.
        chosen: Where the storages to drop were first saved.
    """
    dropped = _among(graph, chosen)
    return _Program(graph, dropped).recipe(dropped.values()) if dropped else None


def _among(graph: Graph, chosen: Container[Slot]) -> dict[int, Saved]:
    return {
        key: storage
        for key, storage in graph.storages.items()
        if storage.slots[0] in chosen and not storage.is_fixed
    }


def make_recipe(graph: Graph, chosen: Container[Slot]) -> Recipe | None:
    """Return a recipe that drops what is chosen and comes out; None if nothing does.

    Args:
        graph: A call's graph, with nothing dropped yet.
        chosen: Where the storages to drop were first saved.
    """
    dropped = _among(graph, chosen)
    while dropped:
        recipe = _Program(graph, dropped).recipe(dropped.values())
        right = {
            key: storage
            for key, storage in dropped.items()
            if comes_out(recipe, graph, storage.slots)
        }
        if len(right) == len(dropped):
            found = looks(recipe.slots, recipe.own, graph.ran)
            return None if found is None else replace(recipe, looks=found[0])
        dropped = right
    return None


def choices(graph: Graph, n: int) -> tuple[frozenset[Slot], ...]:
    """Return what to drop at some points between keeping all and recomputing all.

    Args:
        graph: A call's graph, with nothing dropped yet.
        n: How many points before the last, which drops everything.

    Returns:
        For each point where the storages to drop were first saved.
    """
    goods: dict[Hashable, tuple[float, frozenset[Hashable]]] = {}
    costs: dict[Hashable, float] = {}
    # What an output shows is not there for operators that read the operand itself.
    shown = {key for key, storage in graph.storages.items() if storage.shown}
    for key, storage in graph.storages.items():
        if storage.is_fixed:
            continue
        price = _prices_to_drop(graph, key, storage, shown)
        if price is not None:
            for at, each in price.items():
                costs[at] = each.like_bytes + each.moved_bytes
            goods[storage.slots[0]] = float(graph.freed_bytes(key)), frozenset(price)
    found: Any = corners(goods, costs)
    return tuple([*(point.dropped for point in few(found, n)), found[-1].dropped])


def _prices_to_drop(
    graph: Graph, key: int, storage: Saved, shown: set[int]
) -> dict[Hashable, Price] | None:
    """Return the prices of what must run if a storage is dropped; None if it cannot."""
    if storage.shown is not None:
        return {}
    value = storage.root
    if value is None:
        if not all(_can_be_packed(graph, slot) for slot in storage.slots):
            return None
        return {("pack", key): graph.price_to_pack(storage.slots[0])}
    operator = OPERATORS.get(graph.kinds[value.node])
    if value.output and not (operator and (operator.is_view or operator.positions)):
        return None  # a norm's mean and deviation: small, and slow to compute again
    program = _Program(graph, (key, *shown))
    try:
        program.value(value)
    except BarrierError:
        return None
    return {node: graph.price(node) for node in program.nodes()}


def _can_be_packed(graph: Graph, slot: Slot) -> bool:
    """Whether a saved tensor can be held in fewer bytes."""
    tensor = graph.slots[slot]
    if graph.are_positions(slot):
        return tensor.dtype == torch.int64 and tensor.is_contiguous()
    return tensor.grad_fn is None and noise_scale(tensor) is not None


def comes_out(recipe: Recipe, graph: Graph, slots: Iterable[Slot]) -> bool:
    """Whether a recipe rebuilds some saved tensors bit by bit.

    Args:
        recipe: The recipe to try.
        graph: The call's graph, with nothing dropped yet.
        slots: The tensors to compare.
    """
    sources = _sources(recipe, graph.ran)
    for index, step in enumerate(recipe.steps):
        if step.source in _PACKED:
            tensor = graph.slots[Slot(step.node, step.name)].detach()
            sources[index] = _packed(step, tensor, graph.ran)
    wanted = set(slots)
    for slot, target in recipe.drops:
        if slot not in wanted:
            continue
        was = graph.slots[recipe.shown.get(slot, slot)].detach()
        try:
            # One at a time: together they would need as much memory as is to be freed.
            made = Rebuild(_of_one(recipe, target)).value(target, sources)
            now = _placed(made, *_lies(was)[:3])
        except RuntimeError as error:  # another layout, or an operator fails
            if is_out_of_memory(error):
                raise
            return False
        if made.untyped_storage().nbytes() != was.untyped_storage().nbytes():
            return False
        if not same_bits(now, was):
            return False
    return True


def _of_one(recipe: Recipe, target: int) -> Recipe:
    """Return a recipe of which one step's result alone is read."""
    readers = [0] * len(recipe.steps)
    readers[target] = 1
    for at in recipe.needs[target]:
        for operand in recipe.steps[at].operands:
            readers[operand] += 1
    return replace(recipe, readers=tuple(readers))


def _placed(
    rebuilt: torch.Tensor, shape: torch.Size, stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return a tensor as its view of a storage that was rebuilt."""
    is_whole = rebuilt.shape == shape and rebuilt.stride() == stride
    if is_whole and rebuilt.storage_offset() == offset:
        return rebuilt
    return rebuilt.as_strided(shape, stride, offset)


# ------------------------------------------------------------------ the backward


class Place(NamedTuple):
    """The layout of a dropped tensor, and its sources.

    It lives until the node that has saved the tensor frees it. So do sources that only
    this tensor needs.
    """

    step: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    n_bytes: int
    total: torch.Tensor | None
    """The sum of the storage's words; None if another tensor of the storage has it."""
    stripe: int | None
    """The stripe of which it is the sum; None for all."""
    sources: Mapping[int, Any]


@dataclass(eq=False)
class Rebuild:
    """Rebuilds what one call dropped, each tensor once while it is needed."""

    recipe: Recipe
    layer: Layer | None = None
    """The layer, not its call; None for a trial."""
    action: str = ""
    """Its action."""
    asked: Asked | None = None
    """What is known to come out if all that is left was compared."""

    def __post_init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._left = list(self.recipe.readers)
        self._task = NO_GRAPH_TASK
        self.uncompared: set[int] = set()
        """Steps whose results are still to be compared whole."""

    def unpack(self, place: Place) -> torch.Tensor:
        """Return a dropped tensor: the hook that unpacks it.

        Each backward counts its readers again, because one may need only a part of the
        graph.

        Raises:
            RecomputationError: One of its sources was edited.
        """
        task = current_graph_task()
        if task != self._task or task == NO_GRAPH_TASK:
            self._task, self._left = task, list(self.recipe.readers)
            self._made.clear()
        with torch.no_grad(), without_autocast():
            try:
                rebuilt = self.value(place.step, place.sources)
            except RecomputationError:
                raise
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                self._fail(f"an operator refuses: {first_line(error)}")
            if rebuilt.untyped_storage().nbytes() != place.n_bytes:
                self._fail("what it saved was rebuilt with another layout")
            if place.total is not None:
                self._compare(place.total, _sum_of(rebuilt, place.stripe))
                self.uncompared.discard(place.step)
                if self.asked and self.layer and not self.uncompared:
                    self.recipe.compared(self.layer, self.asked)
                    self.asked = None
            return _placed(rebuilt, place.shape, place.stride, place.offset)

    def _compare(self, was: torch.Tensor, now: torch.Tensor) -> None:
        """Compare two sums; on an accelerator by a deferred device check."""

        def tell(differ: Several[bool]) -> None:
            if any(differ):
                self._fail("what it saved was rebuilt to something else")

        flag = different_bits(was, now)
        if isinstance(flag, bool):
            tell([flag])
        elif self.layer is not None:
            self.layer.findings.defer([flag], tell)

    def _fail(self, why: str) -> NoReturn:
        """Exclude the action for the layer, and raise an error that names it.

        Raises:
            RecomputationError: Always, except in a trial.
        """
        if self.layer is None:
            raise RuntimeError(why)
        self.recipe.doubt()
        self.layer.exclude(self.action, why)
        msg = (
            f"{self.layer.name} cannot be rebuilt: {why}. From now on mimose does not "
            f"use {self.action!r} for it. This step's gradients are incomplete: zero "
            f"them and go on, or run steps with session.step(closure), which repeats "
            f"such a step"
        )
        raise RecomputationError(msg)

    def value(self, index: int, sources: Mapping[int, Any]) -> Any:
        """Return the result of a step, and free it after its last reader."""
        self._left[index] -= 1
        is_last = self._left[index] <= 0
        if index in self._made:
            return self._made.pop(index) if is_last else self._made[index]
        step = self.recipe.steps[index]
        source = sources[index]
        if step.source is Source.RUN:
            operands = [self.value(operand, sources) for operand in step.operands]
            operator = OPERATORS[step.name]
            is_mine = operator.edit is not None and self._is_mine(step.operands[0])
            run = operator.edit if is_mine and operator.edit else operator.run
            if operator.has_witness:  # the deviations that a norm has saved
                *operands, witness = operands
            made = run(source, *operands)
            if operator.has_witness:
                self._compare(witness, made[2])
        elif step.source is Source.PART:
            made = self.value(step.operands[0], sources)[step.argument]
        elif step.source in _PACKED:
            made = _unpacked(source)
        elif isinstance(source, tuple):
            made, counted = source
            if version(made) != counted:
                self._fail("a tensor it is rebuilt from was edited in place")
        else:
            made = source
        if not is_last and step.source in _MADE:
            self._made[index] = made
        return made

    def _is_mine(self, index: int) -> bool:
        """Whether a step's result is a new tensor that one backward reads once."""
        step = self.recipe.steps[index]
        if self.recipe.readers[index] > 1:
            return False
        if step.source is Source.PART:
            step = self.recipe.steps[step.operands[0]]
        return step.source is Source.RUN and OPERATORS[step.name].is_fresh


def drop(
    recipe: Recipe, ran: Ran, layer: Layer, action: str, asked: Asked | None
) -> int:
    """Drop what a recipe can rebuild, with hooks that rebuild it in the backward.

    Args:
        recipe: A recipe that fits this call.
        ran: The call.
        layer: The layer.
        action: Its action.
        asked: What is known of the call; None to compare all of it.

    Returns:
        The freed bytes, minus those held in their place.
    """
    sources = _sources(recipe, ran)
    stripe = None
    if asked is not None:
        told = [_told(step, sources[at]) for at, step in enumerate(recipe.steps)]
        asked = asked._replace(sizes=(asked.sizes, tuple(told)))
        stripe = recipe.stripe(layer, asked)
    rebuild = Rebuild(recipe, layer, action, asked if stripe is None else None)
    freed: dict[object, int] = {}
    # Packed tensors come first, because others may be rebuilt from them.
    drops = sorted(recipe.drops, key=lambda d: recipe.steps[d[1]].source not in _PACKED)
    for slot, step in drops:
        node, own = ran.nodes[slot.node], recipe.steps[step]
        tensor = saved_value(node, slot.name).detach()
        lies, total, part = _lies(tensor), None, stripe
        n_bytes = lies[-1]
        key = slot if slot in recipe.shown else step
        if key not in freed:
            freed[key] = n_bytes
            if own.source in _PACKED:
                sources[step] = _packed(own, tensor, ran)
                freed[key] -= sources[step][0].untyped_storage().nbytes()
            elif slot not in recipe.shown:
                # The substitute of a shown one has another sum.
                if not recipe.unseen.isdisjoint(recipe.needs[step]):
                    part = None
                total = _sum_of(tensor, part)
                rebuild.uncompared.add(step)
        taken = {index: sources[index] for index in recipe.needs[step]}
        place = Place(step, *lies, total, part, taken)
        del tensor
        handle = saved_handle(node, slot.name)
        handle.register_hooks(partial(_instead, place), rebuild.unpack)
    return sum(freed.values())


def _told(step: Step, source: Any) -> object:
    """Return what else decides how a step runs."""
    if step.source is Source.RUN:
        return repr(source)
    if step.source in (Source.INPUT, Source.WEIGHT):
        tensor, _ = source
        return tensor.device, tensor.dtype, *_lies(tensor)
    return None


def _instead(place: Place, tensor: torch.Tensor) -> Place:
    del tensor
    return place


def _sum_of(tensor: torch.Tensor, stripe: int | None) -> torch.Tensor:
    """Return () a sum over the words of a tensor's storage, or of a stripe of it.

    It depends on their places: plain sums are the same after a permutation.

    Args:
        tensor: A plain tensor.
        stripe: Which one; None for all. Small storages are one stripe.
    """
    n_bytes = tensor.untyped_storage().nbytes()
    whole = tensor.as_strided((n_bytes // tensor.element_size(),), (1,), 0)
    words, rest = words_of(whole)
    n_parts = len(words) // _STRIPE_WORDS
    parts = words[: n_parts * _STRIPE_WORDS].view(n_parts, _STRIPE_WORDS)
    if stripe is not None and n_bytes >= _LEAST_STRIPED:
        parts = parts[stripe::_STRIPES]
        if stripe:
            return _weighed(_folded(parts))
    total = _weighed(_folded(parts))  # and what is left over behind the last
    for seed, over in enumerate((words[n_parts * _STRIPE_WORDS :], rest), 1):
        if len(over):
            total += _weighed(over, seed)
    return total


def _folded(parts: torch.Tensor) -> torch.Tensor:
    """Return (n,) words: distant parts are added up, so that little is left to weigh.

    Their distance has no small factor: blocks that change places, a whole number of
    rows apart, do not meet.

    Args:
        parts: (n_parts, n_words) The words.
    """
    n = max(1, len(parts) // _FOLDS)
    while math.gcd(n, _SMALL_FACTORS) > 1:
        n -= 1
    if n == 1:
        return parts.flatten()
    n_whole = len(parts) // n * n
    folded = parts[:n_whole].view(-1, n, _STRIPE_WORDS).sum(0)
    folded[: len(parts) - n_whole] += parts[n_whole:]
    return folded.flatten()


def _weighed(words: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return () the sum of integers, each half of a word times a random number.

    With random numbers of 64 bits another sum is the same with a probability of 2^-32
    (multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast",
    2014). They are the same in each call.
    """
    halves = words.view(torch.int32) if words.element_size() == 8 else words
    own = torch.Generator(words.device)
    own.manual_seed(seed)
    drawn = torch.empty(len(halves), dtype=torch.int64, device=words.device)
    return drawn.random_(generator=own).mul_(halves).sum()


def _sources(recipe: Recipe, ran: Ran) -> dict[int, Any]:
    """Read the sources of a recipe's steps: tensors with versions, and settings.

    Raises:
        RuntimeError: A saved tensor was edited in place.
    """
    return {index: _source(step, ran) for index, step in enumerate(recipe.steps)}


def _source(step: Step, ran: Ran) -> Any:
    nodes = ran.nodes
    if step.source is Source.RUN:
        return OPERATORS[step.name].settings(nodes[step.node])
    if step.source is Source.EPSILON:
        return getattr(ran.module.get_submodule(step.argument), step.name)
    if step.source in (Source.SAVED, Source.WHOLE):
        tensor: torch.Tensor = saved_value(nodes[step.node], step.name)
        # A number as a tensor must not be detached under a dispatch mode.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if step.source is Source.WHOLE:  # contiguous; `comes_out` has compared it
            number, output = step.argument
            shape = tuple(output_of(nodes[number], output).shape)
            stride = torch.empty(shape, device="meta").stride()
            tensor = tensor.as_strided(shape, stride, 0)
    elif step.source is Source.INPUT:
        tensor = ran.inputs[step.argument].detach()
    elif step.source is Source.WEIGHT:
        tensor = nodes[step.node].variable.detach()
    else:
        return None
    return tensor, version(tensor)


# ------------------------------------------------------------------ in fewer bytes


class _Packed(NamedTuple):
    """A tensor in fewer bytes (noise as bits, narrower positions), or unchanged."""

    values: torch.Tensor
    scale: float | None = None
    """The number besides zero in noise, which is held as a bit for each element."""
    shape: torch.Size = _NO_SHAPE
    dtype: torch.dtype | None = None
    """The original dtype; None if the tensor is unchanged."""


def _packed(step: Step, tensor: torch.Tensor, ran: Ran) -> _Packed:
    if step.source is Source.NOISE:
        return _pack_noise(tensor)
    return _Packed(tensor.to(_narrow(ran.nodes[step.node])), dtype=torch.int64)


def _narrow(pool: Any) -> torch.dtype:
    """Return the dtype that is enough for positions in the planes of a pool's node."""
    plane = saved_value(pool, "self").shape[-2:].numel()
    small = (t for t in (torch.int16, torch.int32) if plane <= torch.iinfo(t).max)
    return next(small, torch.int64)


def _unpacked(packed: _Packed) -> torch.Tensor:
    values, scale, shape, dtype = packed
    if dtype is None:
        return values
    if scale is None:
        return values.to(dtype)
    is_there = unpack_flags(values, math.prod(shape))
    if dtype == torch.bool:
        # A new storage, because this one may have more flags than elements.
        return is_there.clone().view(shape)
    return is_there.to(dtype).mul_(scale).view(shape)


def noise_scale(tensor: torch.Tensor) -> float | None:
    """Return the number besides zero in what looks like noise; None for other tensors.

    On a CPU dropout multiplies by a tensor of zeros and ``1 / (1 - p)``; on
    accelerators it saves a mask of bytes.
    """
    is_mask = tensor.dtype == torch.bool
    if not ((is_mask or tensor.is_floating_point()) and tensor.is_contiguous()):
        return None
    if tensor.storage_offset() or tensor.numel() < _NOISE_SAMPLE:
        return None
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return None
    if is_mask:
        return 1.0
    found = sorted(set(tensor.detach().reshape(-1)[:_NOISE_SAMPLE].tolist()))
    if len(found) != 2 or found[0] != 0.0 or not math.isfinite(found[1]):
        return None
    return float(found[1])


def _pack_noise(tensor: torch.Tensor) -> _Packed:
    """Return noise as bits; the tensor itself if it is no noise this time."""
    scale = noise_scale(tensor)
    if scale is None:
        return _Packed(tensor)
    if tensor.dtype == torch.bool:
        flags = tensor.reshape(-1)
        return _Packed(pack_flags(flags), scale, tensor.shape, tensor.dtype)
    flat = bits(tensor).reshape(-1)
    number = bits(torch.tensor(scale, dtype=tensor.dtype)).item()
    # A third number, or minus zero, is not zero and not that number.
    if flat.is_cpu:  # NumPy compares ten times as fast there
        is_number = flat.numpy() == number
        if np.count_nonzero(is_number) != np.count_nonzero(flat.numpy()):
            return _Packed(tensor)
        flags = torch.from_numpy(is_number)
    else:
        flags = flat == number
        if bool((flags != (flat != 0)).any()):
            return _Packed(tensor)
    return _Packed(pack_flags(flags), scale, tensor.shape, tensor.dtype)


# ------------------------------------------------------------------ the actions


class Points:
    """What the selective actions of a session share: recipes, and choices.

    Attributes:
        prices: What moving a byte costs.
        checks_all: Whether each call is compared whole.
    """

    def __init__(self) -> None:
        self.prices, self.checks_all = prices_of("cpu", ""), False
        self._recipes: cachetools.LRUCache[object, list[Recipe]]
        self._recipes = cachetools.LRUCache(len(REBUILDING) * _MOST_KINDS)
        self._choices: cachetools.LRUCache[object, tuple[frozenset[Slot], ...]]
        self._choices = cachetools.LRUCache(_MOST_KINDS)
        self._described: cachetools.LRUCache[object, bool]
        self._described = cachetools.LRUCache(_MOST_SEEN)
        self._n_made: MutableMapping[nn.Module, int] = weakref.WeakKeyDictionary()
        self.n_refused: collections.Counter[tuple[int, str]]
        self.n_refused = collections.Counter()
        """How often a layer had no memory to try an action."""
        self._weights: MutableMapping[nn.Module, int] = weakref.WeakKeyDictionary()
        """By layer, a hash of the shapes of its weights."""

    def around(
        self, on_recompute: OnRecompute, call: Invocation, probe: Probe
    ) -> OnRecompute:
        """Return an `on_recompute` that also describes what it has made.

        So bytes and costs are known before an action has run, and where no plan has
        room to try it. The graph of a recomputation is there with all that it saves.

        Args:
            on_recompute: Runs the recomputation.
            call: The call, which is not held.
            probe: Measures it.
        """
        layer, trace, index = call.layer, probe.trace, probe.index
        paths = [path for path, _ in _given(call)]

        def run(forward: Callable[[], Any], given: Several[torch.Tensor]) -> Any:
            began, versions = next_sequence_number(), list(map(version, given))
            output = on_recompute(forward, given)
            measured = trace.calls[index]
            key = measured.family, measured.sizes
            names = [
                each.name for each in REBUILDING if each.name not in layer.excluded
            ]
            is_plain = not layer.is_compiled and len(given) == len(paths)
            if names and is_plain and key not in self._described:
                pairs = [*zip(paths, given, strict=True)]
                try:
                    with torch.no_grad(), without_autocast():
                        ran = _ran(layer, pairs, versions, output, began)
                        moved = Graph(ran, self.prices).moved_bytes()
                        measured.moved_bytes[RECOMPUTE.name] = moved
                        room = trace.room_bytes
                        are_all = [
                            self._describe(name, ran, measured, room) for name in names
                        ]
                    if all(are_all):
                        self._described[key] = True
                except _REFUSALS as error:
                    _exclude(layer, names, error)
                trace.mark("described", index)
            return output

        return run

    def _describe(
        self, name: str, ran: Ran, measured: Measured, room_bytes: float
    ) -> bool:
        """Describe an action; return whether there was room to compare what it does."""
        graph, found = Graph(ran, self.prices), self.known(name, ran)
        if found is None:
            if self.room(name, graph) > room_bytes:
                return False  # no plan may count on it
            found = self.make(name, graph), None
        tell(graph.work(found[0]), name, measured)
        return True

    def known(self, name: str, ran: Ran) -> tuple[Recipe | None, object] | None:
        """Return the recipe that fits a call, and the call's sizes.

        Args:
            name: The action.
            ran: The call, with nothing dropped yet.

        Returns:
            None if one must be made; None as the recipe if there can be none.
        """
        known = self._recipes.get((name, self._kind(ran)))
        for recipe in known or ():
            found = looks(recipe.slots, recipe.own, ran)
            if found is not None and found[0] == recipe.looks:
                return recipe, found[1]
        if known == [] or self._n_made.get(ran.module, 0) >= _MOST_MADE:
            return None, None
        return None

    def room(self, name: str, graph: Graph) -> float:
        """Return the bytes that it takes to make a recipe."""
        made = draft(graph, self._chosen(name, graph))
        return 0.0 if made is None else made.work.room_bytes

    def make(self, name: str, graph: Graph) -> Recipe | None:
        """Make a recipe, and compare all that it rebuilds, bit by bit.

        Args:
            name: The action.
            graph: The call's, with nothing dropped yet.

        Returns:
            The recipe; None if nothing can be dropped.
        """
        ran = graph.ran
        self._n_made[ran.module] = self._n_made.get(ran.module, 0) + 1
        key = name, self._kind(ran)
        made = make_recipe(graph, self._chosen(name, graph))
        self._recipes[key] = known = self._recipes.get(key) or []
        if made is not None:
            known.append(made)
        return made

    def _kind(self, ran: Ran) -> tuple[object, ...]:
        """Return what calls have in common that drop the same."""
        module = ran.module
        if module not in self._weights:
            shapes = tuple(weight.shape for weight in module.parameters())
            self._weights[module] = hash(shapes)
        return ran.signature(), self._weights[module], _flags()

    def _chosen(self, name: str, graph: Graph) -> frozenset[Slot]:
        """Return what an action drops in calls with such graphs."""
        key = self._kind(graph.ran)
        if key not in self._choices:
            self._choices[key] = choices(graph, len(REBUILDING) - 1)
        at = [each.name for each in REBUILDING].index(name)
        return self._choices[key][at]


_REFUSALS = LookupError, TypeError, ValueError, RuntimeError


def _exclude(layer: Layer, names: Iterable[str], error: Exception) -> None:
    """Exclude actions, because an operator failed before anything was dropped.

    Raises:
        Exception: The error, if memory ran out.
    """
    if is_out_of_memory(error):
        raise error
    for name in names:
        layer.exclude(name, f"{type(error).__name__}: {error}")


def _flags() -> tuple[object, ...]:
    """Return all flags that choose kernels."""
    read = [get() for get, _ in KERNEL_FLAGS]
    flags = [tuple(flag) if isinstance(flag, list) else flag for flag in read]
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return (*flags, matmul_precision(), is_deterministic, torch.get_num_threads())


def _given(call: Invocation) -> list[tuple[str, torch.Tensor]]:
    """Return the input tensors of a call, each once, with its first path."""
    found = {id(t): (path, t) for path, t in [*argument_tensors(*call[1:3])][::-1]}
    return [*found.values()][::-1]


def _ran(
    layer: Layer,
    given: Several[tuple[str, torch.Tensor]],
    versions: Several[int],
    output: Any,
    began: int,
) -> Ran:
    pairs = zip(given, versions, strict=True)
    edited = tuple(version(tensor) != before for (_, tensor), before in pairs)
    outputs = [t for t in tensors_in(output) if t.grad_fn is not None]
    return Ran(layer.module, given, outputs, edited, began)


def tell(work: Work, name: str, measured: Measured) -> None:
    """Record what an action holds and takes in a measured call."""
    kept = measured.held_bytes.get(KEEP.name, 0.0)
    measured.held_bytes[name] = max(0.0, kept - work.freed_bytes)
    measured.costs[name], measured.moved_bytes[name] = work.flops, work.moved_bytes
    copied = min(work.copied_bytes, measured.copied_bytes)
    measured.dropped_copies[name] = copied


class Selective(KeepLess):
    """Drops some of what a layer saves, and rebuilds it just before it is needed.

    Args:
        spec: Which of `REBUILDING`.
        points: What these share.
    """

    def __init__(self, spec: ActionSpec, points: Points) -> None:
        self.spec, self.points = spec, points

    def run(self, call: Invocation, probe: Probe | None) -> Any:
        """Run the forward, and drop what can be rebuilt."""
        began, given = next_sequence_number(), _given(call)
        versions = [version(tensor) for _, tensor in given]
        output = super().run(call, probe)
        if probe is not None:
            probe.trace.mark("ran", probe.index)
        try:
            with torch.no_grad():
                ran = _ran(call.layer, given, versions, output, began)
                self._let_go(ran, call, probe)
        except _REFUSALS as error:
            _exclude(call.layer, [self.spec.name], error)
            if probe is not None:
                tell(_NO_WORK, self.spec.name, probe.trace.calls[probe.index])
        return output

    def _let_go(self, ran: Ran, call: Invocation, probe: Probe | None) -> None:
        """Drop what a recipe rebuilds.

        Args:
            ran: The call, with nothing dropped yet.
            call: The call.
            probe: Measures it; None if the step is not measured.
        """
        name, points, layer = self.spec.name, self.points, call.layer
        measured = None if probe is None else probe.trace.calls[probe.index]
        found = points.known(name, ran)
        if found is None:
            graph = Graph(ran, points.prices)
            if (
                probe is not None
                and measured is not None
                and points.room(name, graph) > probe.trace.room_bytes
            ):
                measured.action = KEEP.name  # no plan has counted what a trial takes
                points.n_refused[layer.index, name] += 1
                if points.n_refused[layer.index, name] >= _MOST_REFUSED:
                    layer.exclude(
                        name, "there was no memory to compare what it rebuilds"
                    )
                return
            made = points.make(name, graph)
            del graph
            found = (None, None) if made is None else points.known(name, ran)
        recipe, sizes = found or (None, None)
        if measured is not None:
            work = Graph(ran, points.prices).work(recipe)
            tell(work, name, measured)
            measured.flops = round(work.flops)
        if recipe is not None:
            asked = None
            if not points.checks_all:
                asked = Asked(sizes, argument_values(*call[1:3]), layer.state_now())
            drop(recipe, ran, layer, name, asked)
