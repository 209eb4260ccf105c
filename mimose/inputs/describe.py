"""From the root's arguments to what is known of a step before it runs."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from mimose.exceptions import MimoseError
from mimose.inputs.compiled import unwrapped
from mimose.inputs.families import autocast_state, digest, module_key
from mimose.inputs.layers import refuse_other_checkpointing
from mimose.inputs.shapes import (
    argument_tensors,
    call_shape,
    fast_key,
    partial_masks,
)
from mimose.inputs.sharding import OwnParameters
from mimose.inputs.sizes import SizeTable
from mimose.types import BY_ROWS, MOST_CONTEXTS, StepInput

_MOST_REMEMBERED = 10_000
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_TRAINING = operator.itemgetter("training")
"""Of a module's own dictionary: half as long as to ask the module."""
_LEARNS = operator.attrgetter("requires_grad")


class Mode(NamedTuple):
    """What is trained and what is in training mode."""

    key: str
    """Names it, in every process alike."""
    unit_keys: tuple[str, ...]
    """`module_key` of each unit, read once: forwards may change settings, such as a
    count of their calls."""
    probes: tuple[nn.Parameter, ...] = ()
    """Their gradients tell whether a window has begun: one parameter may never get
    any, a few from all over the model tell."""


class Describer:
    """Describes calls of the root, and remembers those seen before.

    Args:
        model: The model; inputs have to be on its device.
        device: Where that is.
        units: The layers, whose settings change what a step costs.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, units: Sequence[nn.Module] = ()
    ) -> None:
        self._model = model
        self._positional = positional_names(model)
        self._units = tuple(units)
        self._device = device
        self._tables: dict[str, SizeTable] = {}
        self._seen: dict[Hashable, tuple[StepInput, SizeTable]] = {}
        self.renew()
        self.last: tuple[StepInput, SizeTable] | None = None

    def renew(self) -> None:
        """Read the model's modules anew: they are others."""
        modules = list(self._model.modules())
        self._attributes = tuple(vars(m) for m in modules if "training" in vars(m))
        self._odd = tuple(m for m in modules if "training" not in vars(m))
        """Modules that keep their mode elsewhere, such as scripted ones."""
        self._switches = [m for m in modules if hasattr(m, "gradient_checkpointing")]
        """Modules that can checkpoint by themselves: to look for them at each new shape
        took 4 ms of a model of 400 modules."""
        self._own = OwnParameters(self._model, self._units)
        self._flags: tuple[bool, ...] = ()
        self._modes: dict[tuple[bool, ...], Mode] = {}
        self.mode = Mode("", ())
        """As last seen."""

    def arrive(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[StepInput, SizeTable]:
        """Describe a call that is about to run, and learn its sizes' names from it.

        Raises:
            MimoseError: The inputs are on another device than the model.
            CheckpointingConflictError: The model's own checkpointing was switched on.
        """
        flags = (*map(_TRAINING, self._attributes), *map(_LEARNS, self._own.read()))
        if self._own.groups:
            flags += (self._own.reduces(),)
        if self._odd:
            flags += tuple([module.training for module in self._odd])
        if flags != self._flags:
            self._note_mode(flags)
        has_gradients = bool(self._own.groups) and self._own.wait_unreduced()
        for probe in self.mode.probes:
            if probe.grad is not None:
                has_gradients = True
        masks = partial_masks(args, kwargs)
        autocast = autocast_state(self._device)
        key = (fast_key(args, kwargs), masks, has_gradients, autocast, self.mode.key)
        found = self._seen.get(key)
        if found is None:
            shape = call_shape(args, kwargs)
            context = digest((shape.structure, masks, autocast, self.mode.key))
            structure = digest(shape.structure)
            facts = StepInput(context, shape.sizes, has_gradients, structure)
            found = facts, self._learn(args, kwargs, shape.names, facts)
            if len(self._seen) >= _MOST_REMEMBERED:
                self._seen.clear()
            self._seen[key] = found
        self.last = found
        return found

    def table(self, structure: str) -> SizeTable | None:
        """Return the table that names the sizes of a structure; None if it is new.

        Args:
            structure: Of a call that has arrived.
        """
        return self._tables.get(structure)

    def by_rows(self, facts: StepInput) -> StepInput:
        """Return what is known of the same step with its loss by rows.

        Args:
            facts: What was read, or what this has returned.
        """
        return facts._replace(context=facts.context.removesuffix(BY_ROWS) + BY_ROWS)

    def _learn(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        names: tuple[str, ...],
        facts: StepInput,
    ) -> SizeTable:
        """Take in a call unlike those seen before; return its structure's table."""
        self._check_device(args, kwargs)
        if any(
            getattr(each, "gradient_checkpointing", False) is True
            for each in self._switches
        ):
            refuse_other_checkpointing(self._model)
        table = self._tables.pop(facts.structure, None)
        table = table or SizeTable(names, self._positional)
        _use(self._tables, facts.structure, table)
        table.add(facts.sizes)
        return table

    def _note_mode(self, flags: tuple[bool, ...]) -> None:
        """Take note that layers were frozen, unfrozen or put into another mode."""
        self._flags = flags
        mode = self._modes.pop(flags, None)
        if mode is None:
            unit_keys = tuple(map(module_key, self._units))
            trainable = [p for p in self._own.read() if p.requires_grad]
            probes = tuple(trainable[:: max(1, len(trainable) // 4)][:5])
            mode = Mode(digest((flags, unit_keys)), unit_keys, probes)
        self.mode = mode
        _use(self._modes, flags, mode)

    def _check_device(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse inputs none of which is with the model; lengths may be elsewhere."""
        devices = {t.device for _, t in argument_tensors(args, kwargs) if t.dim() > 0}
        if not devices or self._device in devices:
            return
        msg = (
            f"the model is on {self._device}, but its inputs are on "
            f"{', '.join(sorted(map(str, devices)))}: move them to the model's device; "
            f"if the model was moved after attach(), detach and attach again"
        )
        raise MimoseError(msg)

    def state_dict(self) -> dict[str, Any]:
        """Return how sizes are named, by structure, ready for JSON."""
        return {key: table.state_dict() for key, table in self._tables.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the names of sizes; what was read before is read anew.

        Args:
            state: What ``state_dict`` returned.
        """
        self._tables = {
            key: SizeTable.from_state(said, self._positional)
            for key, said in state.items()
        }
        self._seen.clear()


def _use(known: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Put a value last; of too many the first, least recently used, is forgotten."""
    known[key] = value
    if len(known) > MOST_CONTEXTS:
        del known[next(iter(known))]


def positional_names(model: nn.Module) -> tuple[str, ...]:
    """Return what the model's forward calls its positional arguments.

    Args:
        model: The model, its forward not taken over yet.
    """
    try:
        parameters = inspect.signature(unwrapped(model).forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)
