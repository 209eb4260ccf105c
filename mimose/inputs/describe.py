"""From the root's arguments to what is known of a step before it runs.

Two calls with one structure differ in their sizes alone. Sizes that were equal in every
call count as one, and one name stands for all: that of what the model is about, if it
is among them (a text is named ``input_ids`` rather than by its mask). A tensor passed
by position is called as the model's forward calls it.
"""

from __future__ import annotations

import collections
import hashlib
import inspect
import itertools
import math
import operator
import types
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn

from mimose.exceptions import MimoseError
from mimose.inputs.compiled import unwrapped
from mimose.inputs.layers import raise_if_checkpointed
from mimose.inputs.sharding import groups_in, own_parameters, waits_for_reduction
from mimose.tensors import local_bytes
from mimose.torch_private import buffers_of, submodules_of
from mimose.types import BY_ROWS, MOST_CONTEXTS, StepInput

# ------------------------------------------------------------------- a call's shape

Structure: TypeAlias = tuple[object, ...]

_MANY = ".*"
"""Ends the path of a list's texts and numbers: they are data, and count as one."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """What a call's arguments look like."""

    structure: Structure
    """Each argument's path, with what it is: dtype, rank, None, a flag …"""
    names: tuple[str, ...]
    """`path.dimension` of every dimension of every tensor."""
    sizes: tuple[int, ...]
    """The dimensions, in the order of `names`."""


def call_shape(args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallShape:
    """Describe a call's arguments, nested containers included.

    A jagged tensor has the sizes of its batch and of its values, all rows together.
    Texts that are arguments themselves are settings and count by value; texts and
    numbers in a container count by their type.

    Args:
        args: What it is called with.
        kwargs: What it is called with by name.
    """
    structure: list[object] = []
    names: list[str] = []
    sizes: list[int] = []
    for path, leaf in _leaves(args, kwargs):
        if isinstance(leaf, torch.Tensor):
            structure.append((path, leaf.dtype, leaf.dim(), leaf.requires_grad))
            dimensions = _dimensions(leaf)
            names.extend(f"{path}.{axis}" for axis in range(len(dimensions)))
            sizes.extend(dimensions)
            continue
        entry = path, _token(path, leaf)
        if not path.endswith(_MANY) or structure[-1:] != [entry]:
            structure.append(entry)
    return CallShape(tuple(structure), tuple(names), tuple(sizes))


def argument_tensors(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the paths and tensors among a call's arguments."""
    for path, leaf in _leaves(args, kwargs):
        if isinstance(leaf, torch.Tensor):
            yield path, leaf


def fast_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[object, ...]:
    """Return a hashable key that is equal for calls of the same shape.

    It tells no less apart than `call_shape`, costs a microsecond, and serves to find
    the `CallShape` of a call seen before.
    """
    key: list[object] = []
    for path, value in (*enumerate(args), *kwargs.items()):
        key.append(path)
        if type(value) is torch.Tensor and not value.is_nested:
            key += value.shape, value.dtype, value.requires_grad, value.device
        elif value is None or value is True or value is False:
            key.append(value)
        else:
            shape = call_shape((value,), {})
            key += shape.structure, shape.sizes
    return tuple(key)


def partial_masks(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, waits: bool = False
) -> tuple[str, ...]:
    """Return the names of the masks that hide something, or may do so.

    Attention runs differently under a mask of all ones. On an accelerator the host has
    to wait to be named; unless it does every mask there is one that may.

    Args:
        args: What the model is called with.
        kwargs: What it is called with by name.
        waits: Whether the host waits.
    """
    hiding = []
    named: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
    while named:
        name, value = named.pop()
        if isinstance(value, dict):
            named += value.items()
        elif isinstance(value, torch.Tensor) and (
            ("mask" in name and not value.dtype.is_floating_point and value.dim() <= 2)
            if isinstance(name, str)
            else value.dtype == torch.bool
        ):
            is_readable = waits or value.device.type == "cpu"
            is_readable = is_readable and not value.is_nested
            if not is_readable or not bool(value.all()):
                hiding.append(str(name))
    return tuple(sorted(hiding))


def _dimensions(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes as numbers; of a nested tensor the batch and its values'."""
    if tensor.is_nested:
        return tensor.size(0), *tensor.detach().values().shape
    return tensor.shape


def _leaves(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, object]]:
    for index, value in enumerate(args):
        yield from _visit(str(index), value)
    for name in sorted(kwargs):
        yield from _visit(name, kwargs[name])


def _visit(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, torch.Tensor) or value is None:
        yield path, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _visit(f"{path}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            is_data = type(item) in (str, int, float)
            yield from _visit(f"{path}{_MANY if is_data else f'.{index}'}", item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _visit(f"{path}.{field.name}", getattr(value, field.name))
    else:
        yield path, value


def _token(path: str, leaf: object) -> object:
    """Say what a non-tensor argument is: settings by value, the rest by type."""
    is_setting = isinstance(leaf, str) and "." not in path
    return (
        leaf
        if leaf is None or isinstance(leaf, bool) or is_setting
        else (type(leaf).__qualname__)
    )


# --------------------------------------------------------------- the names of sizes

_ABOUT = (
    "input_ids",
    "inputs_embeds",
    "pixel_values",
    "input_values",
    "input_features",
)
"""What models of transformers are about, in this order."""
_ASIDE = ("label", "token_type", "position", "mask")
"""What belongs to something else; masks say least."""


class SizeTable:
    """Merges the dimensions of one structure that are always equal, and names them.

    Dimensions stay together as long as they were equal in every call seen; the batch
    (dimension 0) is never merged with another dimension.

    Args:
        names: `CallShape.names` of the structure.
        positional: What the positional arguments are called.
    """

    def __init__(self, names: tuple[str, ...], positional: Sequence[str] = ()) -> None:
        self.names = names
        self._spoken = tuple(_spoken(name, positional) for name in names)
        self._index = {name: i for i, name in enumerate(names)}
        self._index.update({name: i for i, name in enumerate(self._spoken)})
        self._group: list[int] = []
        self._constant: tuple[int, ...] = ()
        self._varies: list[bool] = []
        self._shown: list[tuple[str, int]] = []
        self._named: dict[tuple[int, ...], Mapping[str, int]] = {}
        """By sizes, what `named` has returned."""

    def add(self, sizes: tuple[int, ...]) -> None:
        """Record a call's sizes: they may split a class."""
        if not self._constant:
            self._constant, self._varies = sizes, [False] * len(sizes)
        together: dict[tuple[int, bool, int], int] = {}
        old = self._group or [0] * len(sizes)
        self._group = [
            together.setdefault((old[i], self.names[i].endswith(".0"), size), i)
            for i, size in enumerate(sizes)
        ]
        self._varies = [
            varies or size != first
            for varies, size, first in zip(
                self._varies, sizes, self._constant, strict=True
            )
        ]
        self._show()

    def _show(self) -> None:
        """Settle which sizes are named: those that vary."""
        columns = sorted(set(self._group))
        varying = [c for c in columns if self._varies[c]] or columns
        self._shown = [(self._name(c), c) for c in varying]
        self._named = {}

    def _name(self, column: int) -> str:
        """Return what a group's size is called."""
        named = zip(self._spoken, self._group, strict=True)
        return min((name for name, c in named if c == column), key=_rank)

    def spoken_names(self) -> list[str]:
        """Return what all sizes are called, those that are always equal once."""
        return [self._name(column) for column in sorted(set(self._group))]

    def rows(self, sizes: tuple[int, ...]) -> tuple[str, int]:
        """Return what the batch's size is called, and how large it is."""
        columns = sorted(set(self._group))
        first = next((c for c in columns if self.names[c].endswith(".0")), columns[0])
        return self._name(first), sizes[first]

    def column(self, name: str) -> int | None:
        """Return the place of a size and of all equal ones; None of no such name."""
        at = self._index.get(name)
        return at if at is None or not self._group else self._group[at]

    def named(self, sizes: tuple[int, ...]) -> Mapping[str, int]:
        """Return the sizes that vary, by name; all of them while none has varied."""
        named, shown = self._named, self._shown  # another thread may add a call's sizes
        found = named.get(sizes)
        if found is None:
            found = {name: sizes[column] for name, column in shown}
            if len(named) >= _MOST_REMEMBERED:
                named.clear()
            named[sizes] = found
        return found

    def n_elements(self, sizes: tuple[int, ...], argument: str) -> int:
        """Return how many elements an argument's tensor has; 0 where there is none."""
        own = [
            n
            for name, n in zip(self.names, sizes, strict=True)
            if name.rpartition(".")[0] == argument
        ]
        return math.prod(own) if own else 0

    def fill(
        self, shape: Mapping[str, int], others: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return all sizes of a shape given by name, the others as they are given.

        Raises:
            MimoseError: A name is not one of this structure's, or a size is no
                positive integer.
        """
        group = self._group or list(range(len(self.names)))
        sizes = list(others)
        for name, size in shape.items():
            if name not in self._index:
                known = ", ".join(self.spoken_names())
                msg = f"shape: there is no size {name!r}; the model's sizes are {known}"
                raise MimoseError(msg)
            if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
                msg = f"shape: {name} must be an integer of at least 1, got {size!r}"
                raise MimoseError(msg)
            chosen = group[self._index[name]]
            sizes = [
                int(size) if column == chosen else other
                for column, other in zip(group, sizes, strict=True)
            ]
        return tuple(sizes)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as lists, ready for JSON."""
        return {
            "names": list(self.names),
            "group": self._group,
            "constant": list(self._constant),
            "varies": self._varies,
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], positional: Sequence[str] = ()
    ) -> SizeTable:
        """Make the table from what ``state_dict`` returned.

        Args:
            state: What it returned.
            positional: What the positional arguments are called.
        """
        table = cls(tuple(map(str, state["names"])), positional)
        table._group = list(map(int, state["group"]))
        table._constant = tuple(map(int, state["constant"]))
        table._varies = list(map(bool, state["varies"]))
        table._show()
        return table


def _spoken(name: str, positional: Sequence[str]) -> str:
    """Return a size's name, with the argument's in place of its position."""
    first, dot, rest = name.partition(".")
    is_known = first.isdecimal() and int(first) < len(positional)
    return positional[int(first)] + dot + rest if is_known else name


def _rank(name: str) -> int:
    """Return which of several names is to stand for all: that of the lowest rank."""
    *path, _ = name.split(".")
    if path and path[-1] in _ABOUT:
        return _ABOUT.index(path[-1])
    found = [i for i, word in enumerate(_ASIDE, start=1) if word in name]
    return len(_ABOUT) + max(found, default=0)


# -------------------------------------------------------- which calls cost the same

_POSITION = ("layer_idx", "layer_id", "layer_number", "training")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_SETTINGS = (bool, int, float, str, tuple, *_FUNCTIONS)


def digest(key: Hashable) -> str:
    """Return a short text that is equal for equal keys, in every process.

    Args:
        key: Nested tuples of numbers, texts, types of torch and names of classes.
    """
    return hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()


def module_key(module: nn.Module) -> str:
    """Return a key that is equal for layers that cost the same, called the same way.

    It holds the classes and settings of the module and everything in it, the training
    flags, and the shapes, types and `requires_grad` of its parameters. Settings that a
    forward changes, such as a counter of its calls, make it another each time: read it
    once.

    Args:
        module: The layer.
    """
    return digest(
        (
            tuple(_describe(inner) for inner in module.modules()),
            tuple(
                (tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters()
            ),
        )
    )


def family_key(layer: str, shape: CallShape, device: torch.device) -> Hashable:
    """Return a key that is equal for calls that cost the same at the same sizes.

    Args:
        layer: What `module_key` said of the layer.
        shape: What it is called with; its structure counts, and the autocast state.
        device: Where it runs.
    """
    return layer, autocast_state(device), shape.structure


def autocast_state(device: torch.device) -> Hashable:
    """Return what autocast is set to for the device and for the CPU; None if off."""
    is_on = torch.is_autocast_enabled
    if not (is_on("cpu") or (device.type != "cpu" and is_on(device.type))):
        return None
    kinds = device.type, "cpu"
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in kinds
    )


def _describe(module: nn.Module) -> Hashable:
    settings = tuple(
        (name, _setting(value))
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name not in _POSITION
        and isinstance(value, _SETTINGS)
    )
    config = getattr(module, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    return _class_name(type(module)), module.training, attention, settings


_class_names: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_n_namesakes: collections.Counter[str] = collections.Counter()


def _class_name(cls: type) -> str:
    """Return a class's full name; classes made by one function are numbered."""
    found = _class_names.get(cls)
    if found is None:
        name = f"{cls.__module__}.{cls.__qualname__}"
        found = _class_names[cls] = f"{name}:{_n_namesakes[name]}"
        _n_namesakes[name] += 1
    return found


def _setting(value: object) -> Hashable:
    """Rates differ from layer to layer; what matters is whether they are zero."""
    if isinstance(value, float):
        return value == 0.0
    if isinstance(value, tuple):
        return tuple(_setting(item) for item in value)
    if isinstance(value, _FUNCTIONS):
        return value.__module__, value.__qualname__
    return value if isinstance(value, (bool, int, str)) else type(value).__qualname__


def autocast_keeps_copies() -> bool:
    """Whether autocast is on, and keeps its copies of weights."""
    if not torch.is_autocast_cache_enabled():
        return False
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu", "cpu" if accelerator is None else accelerator.type}
    return any(map(torch.is_autocast_enabled, kinds))


# ------------------------------------------------------- from a call to a StepInput

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
    layer_keys: tuple[str, ...]
    """`module_key` of each layer, read once: forwards may change settings, such as a
    count of their calls."""
    probes: tuple[nn.Parameter, ...] = ()
    """Their gradients tell whether a window has begun: one parameter may never get
    any, a few from all over the model tell."""


class Describer:
    """Describes calls of the root, and remembers those seen before.

    Args:
        model: The model; inputs have to be on its device.
        device: Where that is.
        layers: The layers, whose settings change what a step costs.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, layers: Sequence[nn.Module] = ()
    ) -> None:
        self._model = model
        self._positional = positional_names(model)
        self._layers = tuple(layers)
        self._device = device
        self.tables: dict[str, SizeTable] = {}
        """By structure, the names of sizes; the last used last."""
        self._seen: dict[Hashable, tuple[StepInput, SizeTable]] = {}
        self.hides = False
        """Whether a mask of the last call may hide something."""
        self.waits_for_masks = False
        """Whether layers were seen to differ by what a mask on an accelerator hides."""
        self.renew()
        self.last: tuple[StepInput, SizeTable] | None = None

    def renew(self) -> None:
        """Read the model's modules anew: they are others."""
        modules = list(self._model.modules())
        # Scripted modules have no such tables, and cannot change.
        self._inside = [t for t in map(submodules_of, modules) if isinstance(t, dict)]
        self._buffers = [t for t in map(buffers_of, modules) if isinstance(t, dict)]
        self._structure = self._read_structure()
        self._attributes = tuple(vars(m) for m in modules if "training" in vars(m))
        self._odd = tuple(m for m in modules if "training" not in vars(m))
        """Modules that keep their mode elsewhere, such as scripted ones."""
        self._switches = [m for m in modules if hasattr(m, "gradient_checkpointing")]
        """Modules that can checkpoint by themselves: to look for them at each new shape
        took 4 ms of a model of 400 modules."""
        self._sharded_by = self._model, *self._layers
        self._kinds: tuple[type, ...] = ()
        """Of these modules: `fully_shard` replaces them, and with them parameters."""
        self._groups: list[Any] = []
        """FSDP2's, if the model is sharded."""
        self._parameters: tuple[nn.Parameter, ...] = ()
        self._flags: tuple[bool, ...] = ()
        self._modes: dict[tuple[bool, ...], Mode] = {}
        self.mode = Mode("", ())
        """As last seen."""

    def is_outdated(self) -> bool:
        """Whether the model has other modules or buffers than were read."""
        return self._read_structure() != self._structure

    def _read_structure(self) -> tuple[list[nn.Module | None], list[str]]:
        inside = itertools.chain.from_iterable(map(dict.values, self._inside))
        return list(inside), list(itertools.chain.from_iterable(self._buffers))

    def arrive(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[StepInput, SizeTable]:
        """Describe a call that is about to run, and learn its sizes' names from it.

        Raises:
            MimoseError: The inputs are on another device than the model.
            CheckpointingConflictError: The model's own checkpointing was switched on.
        """
        self._read_parameters()
        flags = (*map(_TRAINING, self._attributes), *map(_LEARNS, self._parameters))
        if self._groups:
            flags += (bool(self._groups[0].reduce_grads),)
        if self._odd:
            flags += tuple([module.training for module in self._odd])
        if flags != self._flags:
            self._note_mode(flags)
        has_gradients = bool(self._groups) and waits_for_reduction(self._groups)
        for probe in self.mode.probes:
            if probe.grad is not None:
                has_gradients = True
        masks = partial_masks(args, kwargs, waits=self.waits_for_masks)
        self.hides = bool(masks)
        autocast = autocast_state(self._device)
        key = (fast_key(args, kwargs), masks, has_gradients, autocast, self.mode.key)
        found = self._seen.get(key)
        if found is None:
            shape = call_shape(args, kwargs)
            context = digest((shape.structure, masks, autocast, self.mode.key))
            structure = digest(shape.structure)
            step_input = StepInput(context, shape.sizes, has_gradients, structure)
            found = step_input, self._learn(args, kwargs, shape.names, step_input)
            if len(self._seen) >= _MOST_REMEMBERED:
                self._seen.clear()
            self._seen[key] = found
        self.last = found
        return found

    def _read_parameters(self) -> None:
        """Read the parameters anew, if the model was sharded since the last time."""
        kinds = tuple(map(type, self._sharded_by))
        if kinds != self._kinds:
            self._groups = [group for _, group in groups_in(self._model)]
            self._parameters = tuple(own_parameters(self._model))
            self._kinds = kinds

    def gradient_bytes(self) -> tuple[int, int]:
        """Return the bytes of gradients that are there, and of all there will be."""
        there = to_be = 0
        self._read_parameters()
        for parameter in self._parameters:
            if parameter.grad is not None:
                there += local_bytes(parameter.grad)
            if parameter.requires_grad:
                to_be += local_bytes(parameter)
        return there, to_be

    def by_rows(self, step_input: StepInput) -> StepInput:
        """Return what is known of the same step with its loss by rows.

        Args:
            step_input: What was read, or what this has returned.
        """
        return step_input._replace(
            context=step_input.context.removesuffix(BY_ROWS) + BY_ROWS
        )

    def _learn(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        names: tuple[str, ...],
        step_input: StepInput,
    ) -> SizeTable:
        """Take in a call unlike those seen before; return its structure's table."""
        self._check_device(args, kwargs)
        if any(
            getattr(each, "gradient_checkpointing", False) is True
            for each in self._switches
        ):
            raise_if_checkpointed(self._model)
        table = self.tables.pop(step_input.structure, None)
        table = table or SizeTable(names, self._positional)
        _use(self.tables, step_input.structure, table)
        table.add(step_input.sizes)
        return table

    def _note_mode(self, flags: tuple[bool, ...]) -> None:
        """Record that layers were frozen, unfrozen or put into another mode."""
        mode = self._modes.pop(flags, None)
        if mode is None:
            layer_keys = tuple(map(module_key, self._layers))
            trainable = [p for p in self._parameters if p.requires_grad]
            probes = tuple(trainable[:: max(1, len(trainable) // 4)][:5])
            mode = Mode(digest((flags, layer_keys)), layer_keys, probes)
        self.mode = mode
        _use(self._modes, flags, mode)
        self._flags = flags  # last: an interrupt may come before each line

    def _check_device(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse inputs none of which is with the model; lengths may be elsewhere."""
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
            state: By structure, what the ``state_dict`` of each table returned.
        """
        self.tables = {
            key: SizeTable.from_state(table, self._positional)
            for key, table in state.items()
        }
        self._seen.clear()


def _use(known: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Put a value last; if there are too many, drop the least recently used one."""
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
