"""Describes a step from the model's arguments, before it runs.

Two calls with one structure differ only in their sizes.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from cachetools import LRUCache
from torch import nn

from mimose.exceptions import MimoseError
from mimose.inputs.call_shape import (
    argument_tensors,
    call_shape,
    fast_key,
    partial_masks,
)
from mimose.inputs.families import autocast_state, digest, module_key
from mimose.inputs.size_table import SizeTable
from mimose.model.compiled import unwrapped
from mimose.model.layers import raise_if_checkpointed
from mimose.model.sharding import groups_in, own_parameters
from mimose.tensors import local_bytes
from mimose.torch_private import (
    buffers_of,
    parameters_of,
    submodules_of,
    waits_unreduced,
)
from mimose.types import MOST_CONTEXTS, StepInput

_TRAINING = operator.attrgetter("training")
_LEARNS = operator.attrgetter("requires_grad")


class Mode(NamedTuple):
    """Which parameters are trained, and which modules are in training mode."""

    key: str
    """Its name, equal in every process."""
    layer_keys: tuple[str, ...]
    """`module_key` of each layer, read once: forwards may change settings, such as a
    count of their calls."""
    probes: tuple[nn.Parameter, ...] = ()
    """Parameters whose gradients show whether a window has begun. One parameter may
    never get a gradient, so they are a few from the whole model."""


class Describer:
    """Describes calls of the model, and remembers earlier ones.

    Args:
        model: The model.
        device: Its device.
        layers: The layers, whose settings change what a step costs.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, layers: Sequence[nn.Module] = ()
    ) -> None:
        self._model = model
        self._positional = positional_names(model)
        self._layers = tuple(layers)
        self._device = device
        self.tables: LRUCache[str, SizeTable] = LRUCache(MOST_CONTEXTS)
        """The names of sizes by structure."""
        self._seen: LRUCache[Hashable, tuple[StepInput, SizeTable]] = LRUCache(10_000)
        self.hides = False
        """Whether a mask of the last call may hide something."""
        self._waits_for_masks = False
        """Whether layers differed because of a mask on an accelerator."""
        self.renew()

    def renew(self) -> None:
        """Read the model's modules again, because they have changed."""
        self._all = list(self._model.modules())
        # Scripted modules have no such tables, and cannot change.
        self._inside = [t for t in map(submodules_of, self._all) if isinstance(t, dict)]
        self._buffers = [t for t in map(buffers_of, self._all) if isinstance(t, dict)]
        tables = [parameters_of(module) for module in self._all]
        self._own = tables if all(isinstance(t, dict) for t in tables) else None
        """Each module's parameters; None if a scripted module has them elsewhere."""
        # Most tables are empty, which is quicker to read.
        self._empty = [t for t in (*self._inside, *self._buffers) if not t]
        self._inside = [table for table in self._inside if table]
        self._buffers = [table for table in self._buffers if table]
        self._structure = self._read_structure()
        self._switches = [m for m in self._all if hasattr(m, "gradient_checkpointing")]
        """Modules with their own checkpointing. To search for them at each new shape
        took 4 ms in a model of 400 modules."""
        self._sharded_by = self._model, *self._layers
        self._kinds: tuple[type, ...] = ()
        """The classes of these modules. `fully_shard` replaces them, and parameters."""
        self._groups: list[Any] = []
        """FSDP2's groups, if the model is sharded."""
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._flags: tuple[bool, ...] = ()
        self._modes: LRUCache[tuple[bool, ...], Mode] = LRUCache(MOST_CONTEXTS)
        self.mode = Mode("", ())
        """The mode of the last call."""

    def is_outdated(self) -> bool:
        """Whether the model's modules or buffers have changed since they were read."""
        return any(self._empty) or self._read_structure() != self._structure

    def _read_structure(self) -> tuple[list[nn.Module | None], list[str]]:
        inside = itertools.chain.from_iterable(map(dict.values, self._inside))
        return list(inside), list(itertools.chain.from_iterable(self._buffers))

    def arrive(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[StepInput, SizeTable]:
        """Describe a call that is about to run, and record its sizes.

        Raises:
            MimoseError: The inputs are on another device than the model.
            CheckpointingConflictError: The model's own checkpointing was switched on.
        """
        self._read_parameters()
        flags = (*map(_TRAINING, self._all), *map(_LEARNS, self._parameters))
        if self._groups:
            flags += (bool(self._groups[0].reduce_grads),)
        if flags != self._flags:
            self._note_mode(flags)
        has_gradients = False
        for group in self._groups:
            has_gradients |= any(map(waits_unreduced, group.fsdp_params))
        for probe in self.mode.probes:
            has_gradients |= probe.grad is not None
        masks = partial_masks(args, kwargs, waits=self._waits_for_masks)
        self.hides = bool(masks)
        autocast = autocast_state(self._device)
        key = fast_key(args, kwargs), masks, has_gradients, autocast, self.mode.key
        found = self._seen.get(key)
        if found is None:
            self._check_device(args, kwargs)
            shape = call_shape(args, kwargs)
            switches = (getattr(m, "gradient_checkpointing", 0) for m in self._switches)
            if any(value is True for value in switches):
                raise_if_checkpointed(self._model)
            context = digest((shape.structure, masks, autocast, self.mode.key))
            structure = digest(shape.structure)
            new = SizeTable(shape.names, self._positional)
            table = self.tables.setdefault(structure, new)
            table.add(shape.sizes)
            found = StepInput(context, shape.sizes, has_gradients, structure), table
            self._seen[key] = found
        return found

    def wait_for_masks(self) -> None:
        """Read masks on an accelerator, too, because layers differed by one."""
        self._waits_for_masks = True

    def _read_parameters(self) -> None:
        """Read the parameters again, if the model was sharded since the last time."""
        kinds = tuple(map(type, self._sharded_by))
        if kinds != self._kinds:
            self._groups = [group for _, group in groups_in(self._model)]
            self._parameters = tuple(own_parameters(self._model))
            self._kinds = kinds

    def own_parameters(self, *, is_outdated: bool) -> Sequence[torch.Tensor]:
        """Return the parameters that an optimizer updates now, without a search.

        A search takes 8% of a step of many small layers.

        Args:
            is_outdated: What `is_outdated` returns now.
        """
        self._read_parameters()
        if self._groups or self._own is None or is_outdated:
            return own_parameters(self._model)
        now = itertools.chain.from_iterable(map(dict.values, self._own))
        return [p for p in {id(p): p for p in now}.values() if p is not None]

    def gradient_bytes(self) -> tuple[int, int]:
        """Return the bytes of the gradients now, and of those after a backward."""
        there = to_be = 0
        self._read_parameters()
        for parameter in self._parameters:
            if parameter.grad is not None:
                there += local_bytes(parameter.grad)
            if parameter.requires_grad:
                to_be += local_bytes(parameter)
        return there, to_be

    def _note_mode(self, flags: tuple[bool, ...]) -> None:
        """Record another mode: parameters were frozen, or modules changed theirs."""
        mode = self._modes.get(flags)
        if mode is None:
            layer_keys = tuple(map(module_key, self._layers))
            trainable = [p for p in self._parameters if p.requires_grad]
            probes = tuple(trainable[:: max(1, len(trainable) // 4)][:5])
            mode = Mode(digest((flags, layer_keys)), layer_keys, probes)
            self._modes[flags] = mode
        self.mode = mode
        self._flags = flags  # last: an interrupt may come before each line

    def _check_device(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise if all inputs are on other devices; scalars may be anywhere."""
        devices = {t.device for _, t in argument_tensors(args, kwargs) if t.dim() > 0}
        if not devices or self._device in devices:
            return
        msg = (
            f"the model is on {self._device}, but its inputs are on "
            f"{', '.join(sorted(map(str, devices)))}: move them to the model's device. "
            f"If you moved the model after attach(), detach and attach again"
        )
        raise MimoseError(msg)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the names of sizes.

        Args:
            state: What the ``state_dict`` of each table returned, by structure.
        """
        self.tables.clear()
        for key, table in state.items():
            self.tables[key] = SizeTable.from_state(table, self._positional)
        self._seen.clear()


def positional_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional parameters of the model's forward.

    Args:
        model: The model, with its own forward.
    """
    try:
        parameters = inspect.signature(unwrapped(model).forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in kinds)
