"""How what a call lets go is rebuilt, as plain data: positions and names only.

A recipe is put together from the graph of one call, and holds for every call of such a
unit whose graph has the same signature (see `mimose.actions.replay.unit_graph`) and
whose tensors lie alike (`mimose.actions.replay.looks`). Which tensors are let go,
and that they come out, is found in `mimose.actions.replay.choice`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from mimose.actions.replay.looks import Looks
from mimose.actions.replay.operators import (
    OPERATORS,
    Given,
    Operand,
    Operator,
    settings_of,
)
from mimose.actions.replay.unit_graph import (
    ACCUMULATE,
    Nodes,
    Saved,
    Slot,
    UnitGraph,
    Value,
)
from mimose.tensors import same_bits
from mimose.torch_private import parameters_of, saved_names, saved_value

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
    POSITIONS = enum.auto()
    """Where a pool found what it took, held in few bytes."""
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
    """Which output, which input, whose attribute; a `Number`."""


class Number(NamedTuple):
    """A number that no node has saved, and where it shows."""

    value: float
    place: int
    """Which operand it is."""
    other: Slot
    result: Slot


Unknown: TypeAlias = tuple[int, int]
"""A node, and the place of an operand that no node has saved."""


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How to rebuild what one kind of call lets go."""

    steps: tuple[Step, ...]
    readers: tuple[int, ...]
    """By step: how often it is asked for in one backward."""
    drops: tuple[tuple[Slot, int], ...]
    """What is let go, and the step that rebuilds it."""
    needs: Mapping[int, tuple[int, ...]]
    """By step that rebuilds what is let go: all steps that it takes, itself as well."""
    users: tuple[int, ...]
    """By step: how many of the tensors that are let go take it."""
    slots: tuple[Slot, ...]
    """All that it reads or lets go."""
    shown: Mapping[Slot, Slot]
    """Of what is let go, what another tensor stands for, and where that is saved."""
    given: tuple[Step, ...] = ()
    """The steps that rest on what no node has saved."""
    looks: Looks = ()
    """How those tensors lay in the call that it was made of."""


class BarrierError(RuntimeError):
    """A value cannot be rebuilt; the text says which kind of node is in the way."""


class UnknownError(BarrierError):
    """An operand is neither on the graph nor among what was saved.

    Attributes:
        unknown: Which.
    """

    def __init__(self, kind: str, unknown: Unknown) -> None:
        self.unknown = unknown
        super().__init__(kind)


Owners: TypeAlias = dict[int, tuple[str, nn.Module]]
"""The path and the module that a parameter, by identity, is one of."""


def owner_at(module: nn.Module, path: str) -> nn.Module | None:
    """Return a submodule; None where there is none of that path."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def weight_of(nodes: Nodes, node: int) -> torch.Tensor | None:
    """Return the weight that a norm is given, as a module owns it; None without."""
    kind, number, _ = nodes.edge(node, 1)
    if kind == "node" and nodes.kinds[number] == ACCUMULATE:
        weight: torch.Tensor = nodes.nodes[number].variable
        return weight
    if "weight" in saved_names(nodes.nodes[node]):
        frozen: torch.Tensor | None = saved_value(nodes.nodes[node], "weight")
        return frozen
    return None


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


def owners_in(module: nn.Module) -> Owners:
    """Return whose parameter is whose."""
    return {
        id(parameter): (path, owner)
        for path, owner in module.named_modules()
        for parameter in parameters_of(owner).values()
        if parameter is not None
    }


class Program:
    """Puts together the steps that rebuild values, with some storages gone.

    Args:
        graph: The call's.
        owners: Whose parameter is whose.
        dropped: Keys of the storages that are gone.
        found: What stands for operands that are not on the graph.
    """

    def __init__(
        self,
        graph: UnitGraph,
        owners: Owners,
        dropped: Iterable[int],
        found: Mapping[Unknown, Step],
    ) -> None:
        self._graph = graph
        self._owners = owners
        self._found = found
        self._witnesses: set[Slot] = set()
        self._dropped = set(dropped)
        self._roots = graph.roots()
        self._steps: list[Step] = []
        self._at: dict[object, int] = {}

    def recipe(self, storages: Iterable[Saved]) -> Recipe:
        """Return the recipe that rebuilds storages.

        Raises:
            BarrierError: One cannot be.
        """
        drops: list[tuple[Slot, int]] = []
        shown: dict[Slot, Slot] = {}
        for storage in storages:
            for slot in storage.slots:
                if storage.shown is not None:
                    shown[slot] = self._graph.slot_of[storage.shown]
                    drops.append((slot, self.value(storage.shown)))
                elif storage.root is None:
                    drops.append((slot, self._slot(slot)))
                else:
                    drops.append((slot, self.value(storage.root)))
        readers = [0] * len(self._steps)
        for step in self._steps:
            for operand in step.operands:
                readers[operand] += 1
        for _, index in drops:
            readers[index] += 1
        read = {Slot(s.node, s.name) for s in self._steps if s.source in _SLOTS}
        slots = read | self._witnesses | {slot for slot, _ in drops}
        slots.update(shown.values())
        given = (step for step in self._steps if step.source in _GIVEN)
        needs = {index: self._behind(index) for _, index in drops}
        users = [0] * len(self._steps)
        for _, target in drops:
            for index in needs[target]:
                users[index] += 1
        return Recipe(
            tuple(self._steps),
            tuple(readers),
            tuple(drops),
            needs,
            tuple(users),
            tuple(sorted(slots)),
            shown,
            tuple(given),
        )

    def _behind(self, index: int) -> tuple[int, ...]:
        """Return all steps that one takes."""
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
        if self._graph.storages[self._graph.storage_of(slot)].root is not None:
            raise BarrierError(self._graph.kinds[slot.node])
        storage = self._graph.storage_of(slot)
        source = Source.POSITIONS if are_positions(self._graph, slot) else Source.NOISE
        return self._add((source, storage), Step(source, *slot))

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
        if operator is None:
            raise BarrierError(kind)
        operands: list[int] = []
        for place, operand in enumerate(self._operands(node, operator)):
            operands.append(self._operand(node, place, operand))
        return self._add(key, Step(Source.RUN, node, kind, tuple(operands)))

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
            witness = self._graph.saved_input(number)
            if witness is None:
                raise BarrierError(kind)  # nobody minds if it is edited later
            self._witnesses.add(witness)
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
        if self._is_absent(node, operand):
            return self._add("nothing", Step(Source.NOTHING))
        raise BarrierError(self._graph.kinds[node])

    def _is_absent(self, node: int, operand: Operand) -> bool:
        """Whether the operator had no such operand."""
        is_hidden = operand.saved in self._graph.hidden[node]
        return bool(operand.saved) and not is_hidden

    def _epsilon(self, node: int) -> int:
        """Find the epsilon of the module whose weight a norm is given."""
        weight = weight_of(self._graph.nodes, node)
        if id(weight) not in self._owners:
            raise BarrierError(self._graph.kinds[node])
        path, owner = self._owners[id(weight)]
        names = _epsilons(owner)
        if len(names) != 1:
            raise BarrierError(self._graph.kinds[node])
        step = Step(Source.EPSILON, node, names[0], told=path)
        return self._add(("epsilon", node), step)

    def _number(self, node: int, place: int) -> int:
        """Find a number that no node has saved, by what it gives where all is there."""
        graph, nodes = self._graph, self._graph.nodes
        kind = graph.kinds[node]
        result = graph.slot_of.get(Value(node, 0))
        other = nodes.edge(node, 1 - place)
        given = graph.slot_of.get(Value(*other[1:])) if other[0] == "node" else None
        if result is not None and given is not None:
            told = settings_of(kind, nodes.nodes[node])
            one, made = graph.slots[given].detach(), graph.slots[result].detach()
            for value in _NUMBERS:
                if same_bits(run_with(kind, told, value, place, one), made):
                    self._witnesses.update((given, result))
                    number = Number(value, place, given, result)
                    step = Step(Source.NUMBER, node, kind, told=number)
                    return self._add(("given", node), step)
        step = self._found.get((node, place), _NO_STEP)
        if step is _NO_STEP:
            raise UnknownError(kind, (node, place))
        return self._add(("input", step.told, 0), step)


_NO_STEP = Step(Source.NOTHING)
_GIVEN = frozenset((Source.NUMBER, Source.EPSILON))
_SLOTS = frozenset((Source.SAVED, Source.WHOLE, Source.NOISE, Source.POSITIONS))


def are_positions(graph: UnitGraph, slot: Slot) -> bool:
    """Whether a node has saved positions under a name."""
    operator = OPERATORS.get(graph.kinds[slot.node])
    return operator is not None and operator.positions == slot.name


def run_with(
    kind: str, told: Any, number: float, place: int, other: torch.Tensor
) -> Any:
    """Run a sum of a number and a tensor.

    Args:
        kind: Of the node.
        told: Its settings.
        number: The operand that it has not saved.
        place: Which operand that is.
        other: The other operand.
    """
    operands = (number, other) if place == 0 else (other, number)
    return OPERATORS[kind].run(told, *operands)


def _epsilons(module: nn.Module) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, float) and "eps" in name
    ]
