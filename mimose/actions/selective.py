"""Selective recomputation: drops what a layer's cheap operators saved, and rebuilds it.

The idea to recompute only cheap operators is that of selective activation recomputation
in Megatron-LM (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022). There the operators are named by hand; here they are found
in the autograd graph.

After a layer's forward mimose walks its part of the graph. With hooks on single nodes
it drops what activations, norms, dropout, pools and products of tensors have saved. In
the backward it rebuilds these tensors by running only these operators again on tensors
that still exist. The results of matrix products, convolutions and attention stay. No
module of the layer is replaced, and no dispatch mode is needed.

A recipe says how to rebuild: positions of nodes and names of what they saved, as plain
data. It is made once for each kind of layer and graph. In the call for which it is
made, before anything is dropped, everything that it rebuilds is compared bit by bit
with the saved tensors. After that the graph and the layout of its tensors must be the
same, and in each backward a sum over each rebuilt storage. All other arguments of an
operator are read from its node, and an epsilon from the module that owns the norm's
weight.

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
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

import cachetools
import numpy as np
import torch
from torch import nn

from mimose.actions.base import Invocation, Probe
from mimose.actions.flags import pack_flags, unpack_flags
from mimose.actions.keep import KeepLess
from mimose.actions.operators import OPERATORS, Operand
from mimose.exactness.layer import Layer
from mimose.exceptions import RecomputationError, first_line
from mimose.inputs.describe import argument_tensors
from mimose.memory.out_of_memory import is_out_of_memory
from mimose.planners.actions import KEEP, SELECTIVE
from mimose.tensors import (
    bits,
    different_bits,
    same_bits,
    sum_of_words,
    tensors_in,
    version,
)
from mimose.torch_private import (
    NO_GRAPH_TASK,
    base_of,
    current_graph_task,
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
from mimose.types import Measured

_MOST_NODES = 4096
"""A call with more nodes is kept."""
_MOST_KINDS = 256
"""The most kinds of layers and graphs that are remembered."""
_MOST_MADE = 64
"""The most recipes for one layer; a layer that needs more drops nothing."""
_NOISE_SAMPLE = 256
"""The number of elements that distinguishes dropout's noise from other tensors."""

ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The kind of the node at which a parameter's gradient ends."""
_BATCH_NORM = "NativeBatchNormBackward0"
_CAST = "ToCopyBackward0"

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
            if tensor.requires_grad and tensor.grad_fn is not None:
                self._input_of.setdefault((tensor.grad_fn, tensor.output_nr), number)
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

    Raises:
        RuntimeError: A saved tensor was edited in place.
    """

    def __init__(self, ran: Ran) -> None:
        self.ran = ran
        self.kinds = ran.kinds
        self.slots: dict[Slot, torch.Tensor] = {}
        self.storages: dict[int, Saved] = {}
        self.slot_of: dict[Value, Slot] = {}
        """Where a value was saved."""
        self.hidden: dict[int, set[str]] = collections.defaultdict(set)
        """By node, the names of what it has saved and cannot be read."""
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
                handle = saved_handle(node, name)
                if isinstance(handle, tuple) or handle.unpack_hook is not None:
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
        if value is not None:
            self.slot_of.setdefault(value, slot)
            storage.root = self._root(value)

    def _shown(self, storage: Saved) -> Value | None:
        """Return an output, saved elsewhere, that can replace a saved operand.

        ReLU6's backward only needs to know where its operand was beyond the bounds.
        There its output is at a bound. In place, ReLU6 saves a copy of its operand.
        """
        (number, name), *others = storage.slots
        operator = OPERATORS.get(self.kinds[number])
        if operator is None or operator.shown != name or others:
            return None
        value = Value(number, 0)
        output, operand = self.slot_of.get(value), self.slots[storage.slots[0]]
        are_alike = output and _lies(self.slots[output]) == _lies(operand)
        return value if are_alike else None

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

    def are_positions(self, slot: Slot) -> bool:
        """Whether a pool has saved positions under a name."""
        operator = OPERATORS.get(self.kinds[slot.node])
        return operator is not None and operator.positions == slot.name


def _lies(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int, int]:
    """Return shape, strides and offset of a tensor, and the bytes of its storage."""
    offset, storage = int(tensor.storage_offset()), tensor.untyped_storage()
    return tensor.shape, tensor.stride(), offset, storage.nbytes()


def _key(tensor: torch.Tensor) -> int:
    """Return the key of a tensor's storage; -1 if it has none."""
    is_strided = tensor.layout == torch.strided
    return storage_key(tensor.untyped_storage()) if is_strided else -1


def looks(slots: Iterable[Slot], ran: Ran) -> tuple[object, ...] | None:
    """Return the layouts of some saved tensors of a call.

    The kinds and edges of a graph do not contain them. A layout is the dtype, the order
    of strides, whether the tensor fills its storage, which sizes are 1, with which
    others it shares its storage, and how often it was edited.

    Args:
        slots: Where the tensors were saved.
        ran: The call.

    Returns:
        Equal for calls with equal layouts; None if a tensor cannot be read.

    Raises:
        RuntimeError: A tensor was edited in place since it was saved.
    """
    sharing: dict[int, int] = {}
    for tensor in (*ran.inputs, *ran.outputs):
        sharing.setdefault(_key(tensor), len(sharing))
    found: list[object] = []
    for node, name in slots:
        behind = ran.nodes[node]
        if saved_handle(behind, name).unpack_hook is not None:
            return None
        tensor = saved_value(behind, name)
        if not isinstance(tensor, torch.Tensor):
            return None
        shared = sharing.setdefault(_key(tensor), len(sharing))
        found.append((shared, *_look(tensor, ran)))
    return tuple(found)


def _look(tensor: torch.Tensor, ran: Ran) -> tuple[object, ...]:
    if tensor.layout != torch.strided:
        return (tensor.dtype, tensor.layout)
    # Other code edits weights and inputs; a view has the version of its base.
    made = base_of(tensor)
    made = tensor if made is None else made
    is_own = made.grad_fn is not None and ran.value_of(made) is not None
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
    edits = version(tensor) if is_own else -1
    return (tensor.dtype, edits, ones, fills, bool(offset), order)


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
    looks: tuple[object, ...] = ()
    """The layouts of those tensors in the call for which it was made."""


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
        return Recipe(
            tuple(steps),
            tuple(readers),
            tuple(drops),
            needs,
            tuple(sorted(slots)),
            shown,
        )

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
        if operator is None:
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
        if kind == "outside" or not is_absent:
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


def make_recipe(ran: Ran) -> Recipe | None:
    """Return the recipe for everything that one call can drop; None if nothing.

    Args:
        ran: The call, with nothing dropped yet.
    """
    graph = Graph(ran)
    dropped = {
        key: storage
        for key, storage in graph.storages.items()
        if not storage.is_fixed and _is_droppable(graph, key, storage)
    }
    while dropped:
        recipe = _Program(graph, dropped).recipe(dropped.values())
        right = {
            key: storage
            for key, storage in dropped.items()
            if comes_out(recipe, graph, storage.slots)
        }
        if len(right) == len(dropped):
            found = looks(recipe.slots, ran)
            if found is None:
                return None
            return replace(recipe, looks=found)
        dropped = right
    return None


def _is_droppable(graph: Graph, key: int, storage: Saved) -> bool:
    value = storage.shown or storage.root
    if value is None:
        return all(_can_be_packed(graph, slot) for slot in storage.slots)
    operator = OPERATORS.get(graph.kinds[value.node])
    if value.output and operator is not None and not operator.is_view:
        return False  # a norm's mean and deviation: small, and slow to compute again
    try:
        _Program(graph, (key,)).value(value)
    except BarrierError:
        return False
    return True


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
            made = Rebuild(recipe).value(target, sources)
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
    sources: Mapping[int, Any]


@dataclass(eq=False)
class Rebuild:
    """Rebuilds what one call dropped, each tensor once while it is needed."""

    recipe: Recipe
    layer: Layer | None = None
    """The layer, not its call; None for a trial."""
    measured: Measured | None = None
    """Where the bytes are counted that operators read and write."""

    def __post_init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._left = list(self.recipe.readers)
        self._task = NO_GRAPH_TASK

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
                self._compare(place.total, _sum_of(rebuilt))
                self._count(rebuilt, times=2)  # added up as it was dropped, and now
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
        self.layer.exclude(SELECTIVE.name, why)
        msg = (
            f"{self.layer.name} cannot be rebuilt: {why}. From now on mimose does not "
            f"use 'selective' for it. This step's gradients are incomplete: zero "
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
            made = run(source, *operands)
            self._count(made, *operands)
        elif step.source is Source.PART:
            made = self.value(step.operands[0], sources)[step.argument]
        elif step.source in _PACKED:
            made = _unpacked(source)
            self._count(made, times=6)  # three kernels pack it, three unpack it
        elif isinstance(source, tuple):
            made, counted = source
            if version(made) != counted:
                self._fail("a tensor it is rebuilt from was edited in place")
        else:
            made = source
        if not is_last and step.source in _MADE:
            self._made[index] = made
        return made

    def _count(self, *tensors: Any, times: int = 1) -> None:
        """Count the bytes of what kernels read and write, in measured steps."""
        if self.measured is not None:
            moved = sum(t.nbytes for t in tensors_in(tensors))
            self.measured.moved_bytes += times * moved

    def _is_mine(self, index: int) -> bool:
        """Whether a step's result is a new tensor that one backward reads once."""
        step = self.recipe.steps[index]
        if self.recipe.readers[index] > 1:
            return False
        if step.source is Source.PART:
            step = self.recipe.steps[step.operands[0]]
        return step.source is Source.RUN and OPERATORS[step.name].is_fresh


def drop(
    recipe: Recipe, ran: Ran, layer: Layer, measured: Measured | None = None
) -> int:
    """Drop what a recipe can rebuild, with hooks that rebuild it in the backward.

    Args:
        recipe: A recipe that fits this call.
        ran: The call.
        layer: The layer.
        measured: The call's measurements, in a measured step. They get the bytes of
            the copies of weights that are dropped: Note: [Copies] of
            `mimose.cost.measured`.

    Returns:
        The freed bytes, minus those held in their place.
    """
    rebuild = Rebuild(recipe, layer, measured)
    sources = _sources(recipe, ran)
    freed: dict[object, int] = {}
    copied = 0
    # Packed tensors come first, because others may be rebuilt from them.
    drops = sorted(recipe.drops, key=lambda d: recipe.steps[d[1]].source not in _PACKED)
    for slot, step in drops:
        node, own = ran.nodes[slot.node], recipe.steps[step]
        tensor = saved_value(node, slot.name).detach()
        lies, total = _lies(tensor), None
        n_bytes = lies[-1]
        key = slot if slot in recipe.shown else step
        if key not in freed:
            freed[key] = n_bytes
            if (
                own.name == _CAST
                and recipe.steps[own.operands[0]].source is Source.WEIGHT
            ):
                copied += n_bytes
            if own.source in _PACKED:
                sources[step] = _packed(own, tensor, ran)
                freed[key] -= sources[step][0].untyped_storage().nbytes()
            elif slot not in recipe.shown:  # its substitute has another sum
                total = _sum_of(tensor)
        taken = {index: sources[index] for index in recipe.needs[step]}
        place = Place(step, *lies, total, taken)
        del tensor
        handle = saved_handle(node, slot.name)
        handle.register_hooks(partial(_instead, place), rebuild.unpack)
    if measured is not None:
        measured.dropped_copies = min(float(copied), measured.copied_bytes)
    return sum(freed.values())


def _instead(place: Place, tensor: torch.Tensor) -> Place:
    del tensor
    return place


def _sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return () the sum of all words of a tensor's storage.

    It finds changes that no graph shows, such as an edit in place under `no_grad` of a
    tensor that no node has saved. A change of any single element changes the sum.
    """
    n_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return sum_of_words(bits(tensor.as_strided((n_elements,), (1,), 0)).flatten())


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
    plane = saved_value(ran.nodes[step.node], "self").shape[-2:].numel()
    small = (t for t in (torch.int16, torch.int32) if plane <= torch.iinfo(t).max)
    return _Packed(tensor.to(next(small, torch.int64)), dtype=torch.int64)


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


# ------------------------------------------------------------------ the action


class Selective(KeepLess):
    """Holds the results of matrix products and the like, and rebuilds the rest."""

    spec = SELECTIVE

    def __init__(self) -> None:
        self._known: cachetools.LRUCache[object, list[Recipe]]
        self._known = cachetools.LRUCache(_MOST_KINDS)
        self._n_made: MutableMapping[nn.Module, int] = weakref.WeakKeyDictionary()

    def run(self, call: Invocation, probe: Probe | None) -> Any:
        """Run the forward, and drop what can be rebuilt."""
        began = next_sequence_number()
        given = list(argument_tensors(call.args, call.kwargs))
        inputs = [tensor for _, tensor in given]
        versions = list(map(version, inputs))
        output = super().run(call, probe)
        kept, may_make = 0.0, True
        measured: Measured | None = None
        if probe is not None:
            trace, measured = probe.trace, probe.trace.calls[probe.index]
            trace.mark("ran", probe.index)
            kept = measured.held_bytes.get(KEEP.name, 0.0)
            # A trial may need as much memory as the call holds.
            may_make = kept <= trace.room_bytes
        outputs = [t for t in tensors_in(output) if t.grad_fn is not None]
        pairs = zip(inputs, versions, strict=True)
        edited = tuple(version(tensor) != before for tensor, before in pairs)
        freed: int | None = 0
        try:
            ran = Ran(call.layer.module, given, outputs, edited, began)
            freed = self._let_go(ran, call.layer, measured, may_make=may_make)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            # An operator failed in a trial; nothing was dropped yet.
            if is_out_of_memory(error):
                raise
            call.layer.exclude(self.spec.name, f"{type(error).__name__}: {error}")
        if measured is not None:
            if freed is None:
                measured.action = KEEP.name
            else:
                measured.held_bytes[self.spec.name] = max(0.0, kept - freed)
        return output

    def _let_go(
        self, ran: Ran, layer: Layer, measured: Measured | None, *, may_make: bool
    ) -> int | None:
        """Drop what a recipe rebuilds; return the freed bytes.

        Args:
            ran: The call, with nothing dropped yet.
            layer: The layer.
            measured: The call's measurements, in a measured step.
            may_make: Whether a recipe may be made, which takes memory that no plan has
                counted.

        Returns:
            None if a recipe is missing and must not be made now.
        """
        with torch.no_grad():
            key = ran.signature()
            known = self._known.get(key)
            for recipe in known or ():
                if looks(recipe.slots, ran) == recipe.looks:
                    return drop(recipe, ran, layer, measured)
            n_made = self._n_made.get(ran.module, 0)
            if known == [] or n_made >= _MOST_MADE:
                return 0
            if not may_make:
                return None
            self._n_made[ran.module] = n_made + 1
            made = make_recipe(ran)
            self._known[key] = known = known or []
            if made is None:
                return 0
            known.append(made)
            return drop(made, ran, layer, measured)
