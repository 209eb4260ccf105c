"""From the root's arguments to what is known of a step before it runs."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn

from mimose.exceptions import MimoseError
from mimose.inputs.compiled import unwrapped
from mimose.inputs.families import autocast_state, digest, module_key
from mimose.inputs.lists import Lists
from mimose.inputs.shapes import (
    Texts,
    argument_tensors,
    call_shape,
    fast_key,
    note_lists,
    note_texts,
    partial_masks,
)
from mimose.inputs.sharding import OwnParameters
from mimose.inputs.size_table import SizeTable
from mimose.inputs.units import refuse_other_checkpointing
from mimose.inputs.variants import Variants
from mimose.types import BY_ROWS, MOST_CONTEXTS, StepInput

_MOST_REMEMBERED = 10_000
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_CallKey: TypeAlias = "tuple[tuple[object, ...], tuple[str, ...], bool, Hashable, str]"
"""What calls that are described alike have in common: what they are called with, the
masks that hide something or may, whether there are gradients, autocast, the mode."""
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

    `describe` changes nothing: it may be asked of calls that are yet to come. What a
    call teaches of the calls after it, `arrive` takes in.

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
        self._texts = Texts()
        self._lists = Lists()
        self._seen: dict[Hashable, tuple[StepInput, SizeTable]] = {}
        self._variants = Variants()
        self.renew()
        self.last: tuple[StepInput, SizeTable] | None = None

    def renew(self) -> None:
        """Read the model's modules anew: they are others."""
        modules = list(self._model.modules())
        self._attributes = tuple(vars(m) for m in modules if "training" in vars(m))
        self._odd = tuple(m for m in modules if "training" not in vars(m))
        """Modules that keep their mode elsewhere, such as scripted ones."""
        self._switches = [m for m in modules if hasattr(m, "gradient_checkpointing")]
        """Modules that can checkpoint by themselves. To look for them at each new shape
        took 4 ms of a model of 400 modules."""
        self._own = OwnParameters(self._model, self._units)
        self._flags: tuple[bool, ...] = ()
        self._modes: dict[tuple[bool, ...], Mode] = {}
        self.mode = Mode("", ())
        """As last seen."""

    def describe(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[StepInput, SizeTable]:
        """Return a call's facts, and the table that names its sizes.

        Facts with a `base` are those of the variant that came last: see `settle`.

        Raises:
            MimoseError: The inputs are on another device than the model.
            CheckpointingConflictError: The model's own checkpointing was switched on.
        """
        mode = self._mode(self._read_flags())
        key = self._key(args, kwargs, mode)
        found = self._seen.get(key) or self._read_new(args, kwargs, key, mode)
        return self._expected(found)

    def arrive(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[StepInput, SizeTable]:
        """Describe a call that is about to run, and learn from it.

        Raises:
            MimoseError: The inputs are on another device than the model.
            CheckpointingConflictError: The model's own checkpointing was switched on.
        """
        flags = self._read_flags()
        if flags != self._flags:
            self._note_mode(flags)
        found = self._seen.get(self._key(args, kwargs, self.mode))
        if found is None:
            found = self._learn_new(args, kwargs)
        self.last = self._expected(found) if found[0].base else found
        return self.last

    def table(self, structure: str) -> SizeTable | None:
        """Return the table that names the sizes of a structure; None if it is new.

        Args:
            structure: Of a call that has arrived.
        """
        return self._tables.get(structure)

    def _read_flags(self) -> tuple[bool, ...]:
        parameters = self._own.read()
        flags = (*map(_TRAINING, self._attributes), *map(_LEARNS, parameters))
        flags += self._own.reduces()
        if self._odd:
            flags += tuple([module.training for module in self._odd])
        return flags

    def _key(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], mode: Mode
    ) -> _CallKey:
        has_gradients = self._own.wait_unreduced()
        for probe in mode.probes:
            if probe.grad is not None:
                has_gradients = True
        return (
            fast_key(args, kwargs, self._texts, self._lists),
            partial_masks(args, kwargs),
            has_gradients,
            autocast_state(self._device),
            mode.key,
        )

    def _expected(
        self, found: tuple[StepInput, SizeTable]
    ) -> tuple[StepInput, SizeTable]:
        facts, table = found
        if not facts.base:
            return found
        return facts._replace(context=self._variants.expected(facts.base)), table

    def _learn_new(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[StepInput, SizeTable]:
        """Take in a call unlike those seen before.

        New texts may prove to be data, and lists to be of any number.
        """
        note_texts(args, kwargs, self._texts)
        note_lists(args, kwargs, self._lists)
        key = self._key(args, kwargs, self.mode)
        found = self._seen.get(key)
        if found is None:
            facts, table = found = self._read_new(args, kwargs, key, self.mode)
            self._tables.pop(facts.structure, None)
            _use(self._tables, facts.structure, table)
            table.add(facts.sizes)
            if len(self._seen) >= _MOST_REMEMBERED:
                self._seen.clear()
            self._seen[key] = found
        return found

    def by_rows(self, facts: StepInput) -> StepInput:
        """Return what is known of the same step with its loss by rows.

        Args:
            facts: What was read, or what this has returned.
        """
        context, base = (
            known and known.removesuffix(BY_ROWS) + BY_ROWS
            for known in (facts.context, facts.base)
        )
        return facts._replace(context=context, base=base)

    def settle(
        self,
        facts: StepInput,
        table: SizeTable,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> StepInput:
        """Return the facts of the variant that runs, as its first layer is called.

        Args:
            facts: What was read, with a `base`.
            table: What was read with it.
            args: What the layer is called with.
            kwargs: What it is called with by name.
        """
        base = facts.base.removesuffix(BY_ROWS)
        context = self._variants.seen(base, args, kwargs)
        facts = facts._replace(context=context + facts.base[len(base) :])
        self.last = facts, table
        return facts

    def _mode(self, flags: tuple[bool, ...]) -> Mode:
        """Return what is trained and what is in training mode."""
        mode = self._modes.get(flags)
        if mode is None:
            unit_keys = tuple(map(module_key, self._units))
            trainable = [p for p in self._own.read() if p.requires_grad]
            probes = tuple(trainable[:: max(1, len(trainable) // 4)][:5])
            mode = Mode(digest((flags, unit_keys)), unit_keys, probes)
        return mode

    def _note_mode(self, flags: tuple[bool, ...]) -> None:
        """Take note that layers were frozen, unfrozen or put into another mode."""
        self._flags = flags
        self.mode = self._mode(flags)
        self._modes.pop(flags, None)
        _use(self._modes, flags, self.mode)

    def _read_new(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        key: _CallKey,
        mode: Mode,
    ) -> tuple[StepInput, SizeTable]:
        _, masks, has_gradients, autocast, _ = key
        self._check_device(args, kwargs)
        if any(
            getattr(each, "gradient_checkpointing", False) is True
            for each in self._switches
        ):
            refuse_other_checkpointing(self._model)
        shape = call_shape(args, kwargs, self._texts, self._lists)
        structure = digest(shape.structure)
        table = self._tables.get(structure) or SizeTable(shape.names, self._positional)
        context = digest((shape.structure, masks, autocast, mode.key))
        is_open = bool(masks) and self._device.type != "cpu"
        base = context if is_open else ""
        facts = StepInput(context, shape.sizes, has_gradients, structure, base)
        return facts, table

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
        """Return how inputs are told apart and their sizes named, ready for JSON."""
        tables = {key: table.state_dict() for key, table in self._tables.items()}
        return {
            "tables": tables,
            "texts": self._texts.state_dict(),
            "lists": self._lists.state_dict(),
            "variants": self._variants.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the names of sizes; what was read before is read anew.

        Args:
            state: What ``state_dict`` returned.
        """
        self._tables = {
            key: SizeTable.from_state(said, self._positional)
            for key, said in state["tables"].items()
        }
        self._texts = Texts.from_state(state["texts"])
        self._lists = Lists.from_state(state["lists"])
        self._variants.load_state_dict(state.get("variants", {}))
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
