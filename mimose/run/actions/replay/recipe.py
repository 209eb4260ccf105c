"""What of a call can be dropped and rebuilt: found once, while all of it is there.

A recipe is plain data, positions and names only. It is made of the graph of one call,
tried on that call's own tensors, and holds for every call whose graph has the same
signature (see `mimose.run.actions.replay.unit_graph`), if it comes out again. What does
not come out equal to the last bit is not part of it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from mimose.measure.out_of_memory import is_out_of_memory
from mimose.run.actions.replay.noise import scale_of
from mimose.run.actions.replay.operators import (
    OPERATORS,
    Given,
    Operand,
    Operator,
    settings_of,
)
from mimose.run.actions.replay.unit_graph import (
    ACCUMULATE,
    Saved,
    Signature,
    Slot,
    UnitGraph,
    Value,
)
from mimose.tensors import same_bits
from mimose.torch_private import parameters_of

_NUMBERS = (1.0, -1.0, 2.0, 0.5)
"""Tried in place of a number that no node has saved."""


class Source(enum.Enum):
    """What a step of a recipe is."""

    RUN = enum.auto()
    """A node's operator, run again."""
    PART = enum.auto()
    """One of several outputs of such a run."""
    SAVED = enum.auto()
    """What a node has saved, and keeps."""
    WHOLE = enum.auto()
    """The same, but all of its storage, as it was when it was made."""
    INPUT = enum.auto()
    WEIGHT = enum.auto()
    NOISE = enum.auto()
    """Zeros and one other number, held as bits."""
    NUMBER = enum.auto()
    EPSILON = enum.auto()
    NOTHING = enum.auto()


class Step(NamedTuple):
    """One step of a recipe."""

    source: Source
    node: int = -1
    name: str = ""
    """Of what is saved; of the attribute; of the kind that is run."""
    operands: tuple[int, ...] = ()
    """Steps before it."""
    told: Any = None
    """Which output, which input, which number, whose attribute."""


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How to rebuild what one kind of call lets go."""

    signature: Signature
    steps: tuple[Step, ...]
    readers: tuple[int, ...]
    """By step: how often it is asked for in one backward."""
    drops: tuple[tuple[Slot, int], ...]
    """What is let go, and the step that rebuilds it."""
    dropped_bytes: int
    """Of the call that it was made of."""


class BarrierError(RuntimeError):
    """A value cannot be rebuilt; the text says which kind of node is in the way."""


Evaluate: TypeAlias = "Callable[[Recipe], Callable[[int], Any]]"
"""Returns what the steps of a recipe come to on the graph that it is made of."""

_Owners: TypeAlias = dict[int, tuple[str, nn.Module]]


def make_recipe(
    graph: UnitGraph, module: nn.Module, evaluate: Evaluate
) -> Recipe | None:
    """Find what can be rebuilt without a dear operator; None where that is nothing.

    Args:
        graph: Of one call, all saved tensors there.
        module: The unit.
        evaluate: Runs a recipe on that very call.
    """
    owners = _owners(module)
    dropped = {
        key: storage
        for key, storage in graph.storages.items()
        if not storage.is_fixed and _is_droppable(graph, owners, key, storage)
    }
    while dropped:
        recipe = _Program(graph, owners, dropped.keys()).recipe(dropped.values())
        value = evaluate(recipe)
        wrong = {
            key
            for key, storage in dropped.items()
            if not comes_out(graph, recipe, storage.slots, value)
        }
        if not wrong:
            return recipe
        dropped = {key: s for key, s in dropped.items() if key not in wrong}
    return None


def _is_droppable(graph: UnitGraph, owners: _Owners, key: int, storage: Saved) -> bool:
    if storage.root is None:
        return all(_is_noise(graph, slot) for slot in storage.slots)
    try:
        _Program(graph, owners, (key,)).value(storage.root)
    except BarrierError:
        return False
    return True


def _is_noise(graph: UnitGraph, slot: Slot) -> bool:
    tensor = graph.slots[slot]
    return tensor.grad_fn is None and scale_of(tensor) is not None


def comes_out(
    graph: UnitGraph,
    recipe: Recipe,
    slots: Sequence[Slot],
    value: Callable[[int], Any],
) -> bool:
    """Whether a recipe rebuilds what some nodes have saved, to the bit.

    Args:
        graph: A call's, all saved tensors there.
        recipe: To be tried.
        slots: What is to be compared.
        value: What its steps come to on that call.
    """
    for slot, step in recipe.drops:
        if slot not in slots:
            continue
        was = graph.slots[slot].detach()
        try:
            made = value(step)
            now = placed(made, was.shape, was.stride(), was.storage_offset())
        except RuntimeError as error:  # laid out otherwise, or an operator refuses
            if is_out_of_memory(error):
                raise
            return False
        if made.untyped_storage().nbytes() != was.untyped_storage().nbytes():
            return False
        if not same_bits(now, was):
            return False
    return True


def placed(
    rebuilt: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: Any
) -> torch.Tensor:
    """Return a tensor's own view of the storage it lies in, which was rebuilt."""
    if (
        tuple(rebuilt.shape) == tuple(shape)
        and rebuilt.stride() == tuple(stride)
        and rebuilt.storage_offset() == offset
    ):
        return rebuilt
    return rebuilt.as_strided(shape, stride, offset)


def _owners(module: nn.Module) -> _Owners:
    """Return the path and the module that a parameter, by identity, is one of."""
    return {
        id(parameter): (path, owner)
        for path, owner in module.named_modules()
        for parameter in parameters_of(owner).values()
        if parameter is not None
    }


class _Program:
    """Puts together the steps that rebuild values, with some storages gone.

    Args:
        graph: The call's.
        owners: Whose parameter is whose.
        dropped: Keys of the storages that are gone.
    """

    def __init__(
        self,
        graph: UnitGraph,
        owners: _Owners,
        dropped: Iterable[int],
    ) -> None:
        self._graph = graph
        self._owners = owners
        self._dropped = set(dropped)
        self._roots = graph.roots()
        self._steps: list[Step] = []
        self._at: dict[object, int] = {}

    def recipe(self, storages: Iterable[Saved]) -> Recipe:
        """Return the recipe that rebuilds storages."""
        drops: list[tuple[Slot, int]] = []
        n_bytes = 0
        for storage in storages:
            n_bytes += storage.n_bytes
            for slot in storage.slots:
                if storage.root is None:
                    drops.append((slot, self._slot(slot)))
                else:
                    drops.append((slot, self.value(storage.root)))
        readers = [0] * len(self._steps)
        for step in self._steps:
            for operand in step.operands:
                readers[operand] += 1
        for _, index in drops:
            readers[index] += 1
        return Recipe(
            self._graph.nodes.signature(),
            tuple(self._steps),
            tuple(readers),
            tuple(drops),
            n_bytes,
        )

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
        if self._graph.storages[self._graph.storage_of(slot)].root is not None:
            raise BarrierError(self._graph.kinds[slot.node])
        return self._add(slot, Step(Source.NOISE, *slot))

    def value(self, value: Value) -> int:
        """Return the step that comes to a value.

        Raises:
            BarrierError: There is none.
        """
        if value in self._at:
            return self._at[value]
        slot = self._graph.slot_of.get(value)
        if slot is not None and self._is_kept(slot):
            return self._slot(slot)
        slot = self._roots.get(value)
        if slot is not None and self._is_kept(slot):
            return self._add(value, Step(Source.WHOLE, *slot, told=value))
        kind = self._graph.kinds[value.node]
        if kind == ACCUMULATE:
            return self._add(value, Step(Source.WEIGHT, value.node))
        run = self._run(value.node, kind)
        if OPERATORS[kind].has_many:
            part = Step(Source.PART, operands=(run,), told=value.output)
            return self._add(value, part)
        self._at[value] = run
        return run

    def _run(self, node: int, kind: str) -> int:
        key = "run", node
        if key in self._at:
            return self._at[key]
        operator = OPERATORS.get(kind)
        if operator is None or operator.is_dear:
            raise BarrierError(kind)
        operands = tuple(
            self._operand(node, place, operand)
            for place, operand in enumerate(self._operands(node, operator))
        )
        return self._add(key, Step(Source.RUN, node, kind, operands))

    def _operands(self, node: int, operator: Operator) -> tuple[Operand, ...]:
        if operator.operands is not None:
            return operator.operands
        return tuple(map(Operand, range(self._graph.nodes.n_edges(node))))

    def _operand(self, node: int, place: int, operand: Operand) -> int:
        edge = ("", 0, 0)
        if operand.edge is not None:
            edge = self._graph.nodes.edge(node, operand.edge)
        kind, number, output = edge
        if kind == "node":
            return self.value(Value(number, output))
        if kind == "input":
            if not self._graph.is_saved(number):
                raise BarrierError(kind)  # nobody minds if it is edited later
            return self._add(edge, Step(Source.INPUT, told=number))
        slot = Slot(node, operand.saved)
        if slot in self._graph.slots:
            return self._slot(slot)
        if kind == "outside":
            raise BarrierError(kind)
        if operand.given is Given.EPSILON:
            return self._epsilon(node)
        if operand.given is Given.NUMBER:
            return self._number(node, place)
        if operand.saved and operand.saved not in self._graph.hidden[node]:
            return self._add("nothing", Step(Source.NOTHING))
        raise BarrierError(self._graph.kinds[node])

    def _epsilon(self, node: int) -> int:
        """Find the epsilon of the module whose weight a norm is given."""
        kind, number, _ = self._graph.nodes.edge(node, 1)
        weight = None
        if kind == "node" and self._graph.kinds[number] == ACCUMULATE:
            weight = self._graph.nodes.nodes[number].variable
        elif Slot(node, "weight") in self._graph.slots:
            weight = self._graph.slots[Slot(node, "weight")]
        if id(weight) not in self._owners:
            raise BarrierError(self._graph.kinds[node])
        path, owner = self._owners[id(weight)]
        names = _epsilons(owner)
        if len(names) != 1:
            raise BarrierError(self._graph.kinds[node])
        step = Step(Source.EPSILON, name=names[0], told=path)
        return self._add(("epsilon", node), step)

    def _number(self, node: int, place: int) -> int:
        """Find a number that no node has saved, by what it gives where all is there."""
        graph, nodes = self._graph, self._graph.nodes
        result = graph.slot_of.get(Value(node, 0))
        other = nodes.edge(node, 1 - place)
        if result is None or other[0] != "node":
            raise BarrierError(graph.kinds[node])
        given = graph.slot_of.get(Value(*other[1:]))
        if given is None:
            raise BarrierError(graph.kinds[node])
        told = settings_of(graph.kinds[node], nodes.nodes[node])
        one, made = graph.slots[given].detach(), graph.slots[result].detach()
        for number in _NUMBERS:
            operands = (number, one) if place == 0 else (one, number)
            if same_bits(OPERATORS[graph.kinds[node]].run(told, *operands), made):
                return self._add(("number", node), Step(Source.NUMBER, told=number))
        raise BarrierError(graph.kinds[node])


def _epsilons(module: nn.Module) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, float) and "eps" in name
    ]
