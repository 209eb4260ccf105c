"""Which tensors of a call are let go, and that they come out again to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from mimose.actions.replay.looks import looks
from mimose.actions.replay.noise import scale_of
from mimose.actions.replay.recipe import (
    BarrierError,
    Program,
    Recipe,
    Source,
    Step,
    Unknown,
    UnknownError,
    are_positions,
    owners_in,
    placed,
)
from mimose.actions.replay.unit_graph import Ran, Saved, Slot, UnitGraph
from mimose.memory.out_of_memory import is_out_of_memory
from mimose.tensors import same_bits

Trial: TypeAlias = "Callable[[Recipe], Callable[[int], Any]]"
"""Returns what the steps of a recipe come to on the call that it is made of."""

Storages: TypeAlias = Mapping[int, Saved]
"""By key."""


class Choice:
    """Chooses what one call lets go.

    Args:
        ran: The call.
        graph: Its graph, all saved tensors there.
        trial: Runs a recipe on that very call.
    """

    def __init__(self, ran: Ran, graph: UnitGraph, trial: Trial) -> None:
        self._ran = ran
        self._graph = graph
        self._trial = trial
        self._owners = owners_in(ran.module)
        self._found: dict[Unknown, Step] = {}

    def recipe(self, before: Collection[Slot] = ()) -> Recipe | None:
        """Return how to rebuild what goes; None where nothing can.

        Args:
            before: What went in another call with such a graph. Nothing else goes
                here: what an action holds is learned over all sizes.
        """
        droppable = self._droppable()
        if before:
            droppable = {
                k: s
                for k, s in droppable.items()
                if any(slot in before for slot in s.slots)
            }
        droppable = self._come_out(droppable)
        if not droppable:
            return None
        made = self._program(droppable).recipe(droppable.values())
        found = looks(made.slots, self._ran)
        return None if found is None else replace(made, looks=found)

    def _program(self, dropped: Iterable[int]) -> Program:
        return Program(self._graph, self._owners, dropped, self._found)

    def _droppable(self) -> Storages:
        return {
            key: storage
            for key, storage in self._graph.storages.items()
            if not storage.is_fixed and self._is_droppable(key, storage)
        }

    def _is_droppable(self, key: int, storage: Saved) -> bool:
        value = storage.shown or storage.root
        if value is None:
            return all(_is_packed(self._graph, slot) for slot in storage.slots)
        try:
            self._program((key,)).value(value)
        except UnknownError as error:
            return self._resolve(error.unknown, key, storage)
        except BarrierError:
            return False
        return True

    def _resolve(self, unknown: Unknown, key: int, storage: Saved) -> bool:
        """Find what the operand of a sum was, such as a mask, by what it gives.

        Of the call's own tensors without gradient. Two that give the same are no
        answer.
        """
        fitting = []
        for candidate in self._candidates():
            self._found[unknown] = candidate
            try:
                recipe = self._program((key,)).recipe([storage])
            except BarrierError:
                continue
            if comes_out(self._graph, recipe, storage.slots, self._trial(recipe)):
                fitting.append(candidate)
        self._found.pop(unknown)
        if len(fitting) != 1:
            return False
        self._found[unknown] = fitting[0]
        return True

    def _candidates(self) -> list[Step]:
        return [
            Step(Source.INPUT, told=number)
            for number, tensor in enumerate(self._ran.inputs)
            if _tells(tensor)
        ]

    def _come_out(self, dropped: Storages) -> Storages:
        """Return those that come out where all of them are gone."""
        while dropped:
            recipe = self._program(dropped).recipe(dropped.values())
            value = self._trial(recipe)
            right = {
                key: storage
                for key, storage in dropped.items()
                if comes_out(self._graph, recipe, storage.slots, value)
            }
            if len(right) == len(dropped):
                break
            dropped = right
        return dropped


def _tells(tensor: torch.Tensor) -> bool:
    """Whether a sum shows that a tensor is in it."""
    if tensor.requires_grad or not tensor.is_floating_point():
        return False
    return bool(tensor.count_nonzero())


def _is_packed(graph: UnitGraph, slot: Slot) -> bool:
    """Whether what a node has saved can be held in fewer bytes."""
    tensor = graph.slots[slot]
    if are_positions(graph, slot):
        return tensor.dtype == torch.int64 and tensor.is_contiguous()
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
        was = graph.slots[recipe.shown.get(slot, slot)].detach()
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
