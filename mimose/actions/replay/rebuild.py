"""A call's dropped tensors, rebuilt in its backward.

Note: [What is held]
Hooks on the saved tensors hold what is here, and what is here holds tensors without a
graph: no node, so that nothing refers to itself, and a graph that goes takes all of it
along. Every tensor has its version beside it: what was edited since would be rebuilt
to something else, which is an error and not a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import torch

from mimose.actions.replay import noise, positions
from mimose.actions.replay.operators import (
    OPERATORS,
    settings_of,
)
from mimose.actions.replay.recipe import Recipe, Source, Step, placed
from mimose.actions.replay.seal import Seal, is_broken, seal
from mimose.actions.replay.unit_graph import Nodes, Ran, Slot, Value
from mimose.exactness.late_answers import LateAnswers
from mimose.exceptions import RecomputationError, first_line
from mimose.memory.out_of_memory import is_out_of_memory
from mimose.tensors import version
from mimose.torch_private import (
    NO_GRAPH_TASK,
    current_graph_task,
    output_of,
    saved_handle,
    saved_value,
)


class Watch(Protocol):
    """Who is told of what happens in a call's backward."""

    answers: LateAnswers
    """Tells what only an accelerator knows."""

    def refuse(self, why: str) -> NoReturn:
        """Raise the error that names the unit."""
        ...


class Lent(Protocol):
    """Stands for a tensor that is held otherwise."""

    def lend(self) -> torch.Tensor:
        """Return the tensor."""
        ...


class Place:
    """How a dropped tensor lay in its storage.

    It lives as long as the node that has saved the tensor has not let go of it.

    Args:
        step: Rebuilds the storage.
        tensor: What goes.
        sealed: Of the storage; None where another tensor in it has it.
        rebuild: Is told when the node lets go.
    """

    __slots__ = ("_rebuild", "n_bytes", "offset", "sealed", "shape", "step", "stride")

    def __init__(
        self, step: int, tensor: torch.Tensor, sealed: Seal | None, rebuild: Rebuild
    ) -> None:
        self.step = step
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())
        self.n_bytes = tensor.untyped_storage().nbytes()
        self.sealed = sealed
        self._rebuild = rebuild

    def __del__(self) -> None:
        """Say that nobody asks for it any more."""
        self._rebuild.let_go(self.step)


class Rebuild:
    """Rebuilds what one call let go, each tensor once as long as it is needed.

    Args:
        recipe: The call's.
        sources: By step, what it begins with: a tensor and its version, settings, ...
        watch: Is told what happens.
        inputs: The call's. They are held, needed or not: plans are made for that
            (see `mimose.cost.side_tensors`).
    """

    __slots__ = (
        "_inputs",
        "_left",
        "_made",
        "_readers",
        "_recipe",
        "_sources",
        "_task",
        "_users",
        "_watch",
    )

    def __init__(
        self,
        recipe: Recipe,
        sources: list[Any],
        watch: Watch,
        inputs: Sequence[torch.Tensor] = (),
    ) -> None:
        self._recipe = recipe
        self._sources = sources
        self._watch = watch
        # Detached, each of them: one may be edited later, and get a graph.
        self._inputs = tuple(tensor.detach() for tensor in inputs)
        self._made: dict[int, Any] = {}
        self._readers = list(recipe.readers)
        self._left = list(recipe.readers)
        self._users = list(recipe.users)
        self._task = NO_GRAPH_TASK

    def let_go(self, step: int) -> None:
        """Take note that one tensor less is asked for; free what it alone needed.

        Args:
            step: That rebuilds it.
        """
        for index in self._recipe.needs[step]:
            self._users[index] -= 1
            if not self._users[index]:
                self._sources[index] = None

    def leave_out(self, step: int) -> None:
        """Take note that one tensor is not asked for, in no backward.

        Args:
            step: That would rebuild it.
        """
        self.let_go(step)
        asked = [step]
        while asked:
            index = asked.pop()
            self._readers[index] -= 1
            if not self._readers[index]:  # it does not run, and asks for nothing
                asked.extend(self._recipe.steps[index].operands)

    def hold(self, step: int, tensor: torch.Tensor) -> int:
        """Take in a tensor that is held in fewer bytes; return how many."""
        self._sources[step] = _packed(self._recipe, step, tensor, self._sources[step])
        return _held_bytes(self._sources[step][0])

    def unpack(self, place: Place) -> torch.Tensor:
        """Return a dropped tensor, as a hook on it has to.

        Each backward counts its readers anew: one may be of a part of the graph.

        Raises:
            RecomputationError: What it is made of was changed meanwhile.
        """
        task = current_graph_task()
        if task != self._task or task == NO_GRAPH_TASK:
            self._task, self._left = task, list(self._readers)
            self._made.clear()
        with torch.no_grad():
            try:
                rebuilt = self._without_autocast(place.step)
            except RecomputationError:
                raise
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                self._watch.refuse(f"an operator refuses: {first_line(error)}")
            if rebuilt.untyped_storage().nbytes() != place.n_bytes:
                self._watch.refuse("what it saved was rebuilt with another layout")
            if place.sealed is not None:
                self._compare(place.sealed, rebuilt)
            return placed(rebuilt, place.shape, place.stride, place.offset)

    def _compare(self, sealed: Seal, rebuilt: torch.Tensor) -> None:
        flag = is_broken(sealed, rebuilt)
        if flag is True:
            self._watch.refuse(_OTHERWISE)
        elif flag is not False:
            refuse = self._watch.refuse

            def tell(answers: list[bool]) -> None:
                if any(answers):
                    refuse(_OTHERWISE)

            self._watch.answers.ask([flag], tell)

    def _without_autocast(self, step: int) -> Any:
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        with contextlib.ExitStack() as stack:
            for kind in filter(torch.is_autocast_enabled, kinds):
                stack.enter_context(torch.autocast(kind, enabled=False))
            return self.value(step)

    def value(self, index: int) -> Any:
        """Return what a step comes to; after its last reader it is let go."""
        self._left[index] -= 1
        is_last = self._left[index] <= 0
        if index in self._made:
            return self._made.pop(index) if is_last else self._made[index]
        step = self._recipe.steps[index]
        made = self._begin(index, step)
        if not is_last and step.source in _MADE:
            self._made[index] = made
        return made

    def _begin(self, index: int, step: Step) -> Any:
        source = self._sources[index]
        if step.source is Source.RUN:
            return self._run(step, source)
        if step.source is Source.PART:
            return self.value(step.operands[0])[step.told]
        if step.source not in _TENSORS:
            return source
        held, counted = source
        if counted == _LENT:
            lent: torch.Tensor = held.lend()
            return lent
        if isinstance(held, torch.Tensor) and version(held) != counted:
            why = "a tensor that others are rebuilt from was edited in place"
            self._watch.refuse(why)
        return held if step.source not in _PACKED else _unpacked(held)

    def _run(self, step: Step, told: Any) -> Any:
        operands = [self.value(operand) for operand in step.operands]
        operator = OPERATORS[step.name]
        run = operator.run
        if operator.edit is not None and self._is_mine(step.operands[0]):
            run = operator.edit
        return run(told, *operands)

    def _is_mine(self, index: int) -> bool:
        """Whether what a step comes to is new, and read once in a backward."""
        step = self._recipe.steps[index]
        if self._recipe.readers[index] > 1:
            return False
        if step.source is Source.PART:
            step = self._recipe.steps[step.operands[0]]
        return step.source is Source.RUN and OPERATORS[step.name].is_fresh


_LENT = -1
"""In the place of a version: the tensor is held otherwise."""
_OTHERWISE = "what it saved was rebuilt to something else"
_PACKED = frozenset((Source.NOISE, Source.POSITIONS))
_MADE = _PACKED | {Source.RUN, Source.PART}
_TENSORS = _PACKED | {Source.SAVED, Source.WHOLE, Source.INPUT, Source.WEIGHT}


def drop(
    recipe: Recipe,
    ran: Ran,
    watch: Watch,
    *,
    inputs: Sequence[torch.Tensor] | None = None,
    lent: Mapping[int, Lent] | None = None,
    inexact: Collection[int] = (),
    served: Collection[Slot] = (),
) -> float:
    """Let go what a recipe can rebuild, and have it rebuilt in backward.

    Args:
        recipe: Right for this call.
        ran: The call.
        watch: Is told what happens in backward.
        inputs: Of the call's those that are held, if not all are.
        lent: By step, what stands for the tensor that it begins with.
        inexact: Steps that begin with something near to what was saved: what rests on
            them is not compared.
        served: What need not be rebuilt.

    Returns:
        The bytes that went, less those that are held in their place.
    """
    held = ran.inputs if inputs is None else inputs
    rebuild = Rebuild(recipe, sources_of(recipe, ran, lent or {}), watch, held)
    freed: dict[int, int] = {}
    n_shown = 0

    def pack(step: int, tensor: torch.Tensor) -> Place:
        tensor, sealed = tensor.detach(), None
        if step not in freed:
            freed[step] = tensor.untyped_storage().nbytes()
            if recipe.steps[step].source in _PACKED:
                freed[step] -= rebuild.hold(step, tensor)
            elif not any(each in inexact for each in recipe.needs[step]):
                sealed = seal(tensor)
                freed[step] -= sealed.n_bytes
        return Place(step, tensor, sealed, rebuild)

    def pack_shown(step: int, tensor: torch.Tensor) -> Place:
        nonlocal n_shown  # who has saved what stands for it has its seal
        n_shown += tensor.untyped_storage().nbytes()
        return Place(step, tensor.detach(), None, rebuild)

    for slot, step in recipe.drops:
        if slot in served:
            rebuild.leave_out(step)
            continue
        handle = saved_handle(ran.nodes.nodes[slot.node], slot.name)
        own = pack_shown if slot in recipe.shown else pack
        handle.register_hooks(partial(own, step), rebuild.unpack)
    return float(sum(freed.values()) + n_shown)


def sources_of(recipe: Recipe, ran: Ran, lent: Mapping[int, Lent]) -> list[Any]:
    """Read what a recipe's steps begin with.

    Args:
        recipe: The recipe.
        ran: The call.
        lent: By step, what stands for a tensor.

    Raises:
        RuntimeError: A saved tensor was edited in place.
    """
    return [
        (lent[index], _LENT) if index in lent else _source(step, ran)
        for index, step in enumerate(recipe.steps)
    ]


def _source(step: Step, ran: Ran) -> Any:
    if step.source is Source.RUN:
        return settings_of(step.name, ran.nodes.nodes[step.node])
    if step.source is Source.EPSILON:
        return getattr(ran.module.get_submodule(step.told), step.name)
    if step.source is Source.NUMBER:
        return step.told.value
    if step.source is Source.POSITIONS:
        pooled: torch.Tensor = saved_value(ran.nodes.nodes[step.node], "self")
        return pooled.shape[-2:].numel()
    tensor = tensor_of(step, ran.nodes, ran.inputs)
    return None if tensor is None else _counted(tensor)


def _counted(held: Any) -> tuple[Any, int]:
    """Return what is held with its version; what is packed is nobody else's."""
    return held, version(held) if isinstance(held, torch.Tensor) else 0


def _packed(recipe: Recipe, step: int, tensor: torch.Tensor, told: Any) -> Any:
    """Return a tensor in fewer bytes, with its version.

    Args:
        recipe: The call's.
        step: That gives the tensor.
        tensor: What goes.
        told: What the step begins with.
    """
    if recipe.steps[step].source is Source.POSITIONS:
        return _counted(positions.pack(tensor, told))
    return _counted(noise.pack(tensor))


def _unpacked(held: Any) -> torch.Tensor:
    if isinstance(held, positions.Positions):
        return positions.unpack(held)
    return noise.unpack(held)


def _held_bytes(held: Any) -> int:
    if isinstance(held, positions.Positions):
        return held.values.nbytes
    return noise.held_bytes(held)


def tensor_of(
    step: Step, nodes: Nodes, inputs: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """Return the tensor that a step begins with; None where it begins with none.

    Args:
        step: Of a recipe.
        nodes: The call's.
        inputs: The call's.

    Raises:
        RuntimeError: It was edited in place since it was saved.
    """
    if step.source is Source.SAVED:
        saved: torch.Tensor = saved_value(nodes.nodes[step.node], step.name)
        return _detached(saved)
    if step.source is Source.WHOLE:
        part = saved_value(nodes.nodes[step.node], step.name)
        return _whole(_detached(part), step.told, nodes)
    if step.source is Source.INPUT:
        given: torch.Tensor = inputs[step.told]
        return given.detach()
    if step.source is Source.WEIGHT:
        weight: torch.Tensor = nodes.nodes[step.node].variable
        return weight.detach()
    return None


def _whole(saved: torch.Tensor, value: Value, nodes: Nodes) -> torch.Tensor:
    """Return a value by a view of its storage: contiguous, as recipes have tried."""
    shape = tuple(output_of(nodes.nodes[value.node], value.output).shape)
    stride = torch.empty(shape, device="meta").stride()
    return saved.as_strided(shape, stride, 0)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def evaluate(
    recipe: Recipe, ran: Ran, slots: Mapping[Slot, torch.Tensor], watch: Watch
) -> Callable[[int], Any]:
    """Return what a recipe's steps come to while nothing was dropped yet.

    Args:
        recipe: To be tried.
        ran: The call.
        slots: The saved tensors.
        watch: Is told what happens.
    """
    sources = sources_of(recipe, ran, {})
    for index, step in enumerate(recipe.steps):
        if step.source in _PACKED:
            whole = slots[Slot(step.node, step.name)].detach()
            sources[index] = _packed(recipe, index, whole, sources[index])

    def value(index: int) -> Any:
        # Each by itself: all at once would need as much memory as was to be freed.
        return Rebuild(recipe, list(sources), watch).value(index)

    return value
