"""Describes a step from the model's arguments, before it runs.

Two calls with one structure differ only in their sizes. Sizes that were equal in every
call count as one size with one name: that of the main input, if it is among them (for
example ``input_ids``, not its mask). A tensor that is passed by position has the name
of the forward's parameter.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import math
import operator
import types
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from cachetools import LRUCache
from torch import nn

from mimose.exceptions import MimoseError
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

# ------------------------------------------------------------------- a call's shape

_MANY = ".*"
"""Ends the path of texts and numbers in a list, which are data and count as one."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """The structure and sizes of a call's arguments."""

    structure: tuple[object, ...]
    """The path of each argument with its dtype and rank, or its value or type."""
    names: tuple[str, ...]
    """`path.dimension` of every dimension of every tensor."""
    sizes: tuple[int, ...]
    """The dimensions, in the order of `names`."""


def call_shape(args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallShape:
    """Describe a call's arguments, with nested containers.

    A jagged tensor has the sizes of its batch and of its values, all rows together. A
    text that is an argument itself is a setting and counts by value. Texts and numbers
    in a container count by type.

    Args:
        args: The arguments.
        kwargs: The keyword arguments.
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


def argument_values(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[str, str], ...] | None:
    """Return paths and values of a call's arguments, tensors aside.

    None if one is an object that may change while it stays the same.
    """
    leaves = [
        leaf for leaf in _leaves(args, kwargs) if not isinstance(leaf[1], torch.Tensor)
    ]
    if not {type(value) for _, value in leaves} <= _VALUES:
        return None
    return tuple((path, repr(value)) for path, value in leaves)


_VALUES = {type(None), bool, int, float, complex, str, torch.dtype, torch.device}


def fast_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[object, ...]:
    """Return a hashable key, to look up the `CallShape` of an earlier call.

    Calls with equal keys have equal shapes. The key takes a microsecond.
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
    """Return the names of masks that hide something, or may do so.

    Attention runs differently under a mask of all ones. To read a mask on an
    accelerator, the host must wait; otherwise each mask there may hide something.

    Args:
        args: The model's arguments.
        kwargs: Its keyword arguments.
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
    """Return a tensor's sizes; of a nested one, the batch and its values' sizes."""
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
    """Return what stands for an argument: settings by value, others by type."""
    is_setting = isinstance(leaf, str) and "." not in path
    is_value = leaf is None or isinstance(leaf, bool) or is_setting
    return leaf if is_value else type(leaf).__qualname__


# --------------------------------------------------------------- the names of sizes

_ABOUT = (
    "input_ids",
    "inputs_embeds",
    "pixel_values",
    "input_values",
    "input_features",
)
"""Main inputs of transformers' models, the preferred first."""
_ASIDE = ("label", "token_type", "position", "mask")
"""Words in names of other inputs, the preferred first."""


class SizeTable:
    """Groups the dimensions of one structure that are always equal, and names them.

    Dimensions are in one group while they were equal in every call. The batch
    (dimension 0) is never in a group with another dimension.

    Args:
        names: `CallShape.names` of the structure.
        positional: The names of positional arguments.
    """

    def __init__(self, names: tuple[str, ...], positional: Sequence[str] = ()) -> None:
        self.names = names
        self._spoken = tuple(_spoken(name, positional) for name in names)
        self._index = {name: i for i, name in enumerate(names)}
        self._index.update({name: i for i, name in enumerate(self._spoken)})
        self._group: list[int] = []
        self._alike: list[int | None] = []
        """The size of each dimension in all calls; None if it has varied."""
        self._shown: list[tuple[str, int]] = []

    def add(self, sizes: tuple[int, ...]) -> None:
        """Record a call's sizes, which may split a group."""
        together: dict[tuple[int, bool, int], int] = {}
        old = self._group or [0] * len(sizes)
        self._group = [
            together.setdefault((old[i], self.names[i].endswith(".0"), size), i)
            for i, size in enumerate(sizes)
        ]
        before = self._alike or sizes
        self._alike = [
            size if size == old else None
            for size, old in zip(sizes, before, strict=True)
        ]
        self._show()

    def _show(self) -> None:
        """Choose the sizes that get a name: those that vary."""
        columns = sorted(set(self._group))
        varying = [c for c in columns if self._alike[c] is None] or columns
        self._shown = [(self._name(c), c) for c in varying]

    def _name(self, column: int) -> str:
        """Return the name of a group."""
        named = zip(self._spoken, self._group, strict=True)
        return min((name for name, c in named if c == column), key=_rank)

    def column(self, name: str) -> int | None:
        """Return the column of a size's group; None for an unknown name."""
        at = self._index.get(name)
        return at if at is None or not self._group else self._group[at]

    def named(self, sizes: tuple[int, ...]) -> Mapping[str, int]:
        """Return the sizes that vary, by name; all of them while none has varied."""
        return {name: sizes[column] for name, column in self._shown}

    def n_elements(self, sizes: tuple[int, ...], argument: str) -> int:
        """Return the number of elements of an argument's tensor; 0 without a tensor."""
        own = [i for i, n in enumerate(self.names) if n.rpartition(".")[0] == argument]
        return math.prod(sizes[i] for i in own) if own else 0

    def fill(
        self, shape: Mapping[str, int], others: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return all sizes of a shape: named ones from it, the others from `others`.

        Raises:
            MimoseError: A name is unknown, or a size is not a positive integer.
        """
        group = self._group or list(range(len(self.names)))
        sizes = list(others)
        for name, size in shape.items():
            if name not in self._index:
                known = ", ".join(map(self._name, sorted(set(self._group))))
                msg = f"shape: there is no size {name!r}; the model's sizes are {known}"
                raise MimoseError(msg)
            if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
                msg = f"shape: {name} must be an integer of at least 1, got {size!r}"
                raise MimoseError(msg)
            chosen = group[self._index[name]]
            for i, column in enumerate(group):
                if column == chosen:
                    sizes[i] = int(size)
        return tuple(sizes)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        names = list(self.names)
        return {"names": names, "group": self._group, "alike": self._alike}

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], positional: Sequence[str] = ()
    ) -> SizeTable:
        """Make the table from what ``state_dict`` returned.

        Args:
            state: What it returned.
            positional: The names of positional arguments.
        """
        table = cls(tuple(map(str, state["names"])), positional)
        table._group = list(map(int, state["group"]))
        table._alike = [n if n is None else int(n) for n in state["alike"]]
        table._show()
        return table


def _spoken(name: str, positional: Sequence[str]) -> str:
    """Return a size's name, with the argument's name instead of its position."""
    first, dot, rest = name.partition(".")
    is_known = first.isdecimal() and int(first) < len(positional)
    return positional[int(first)] + dot + rest if is_known else name


def _rank(name: str) -> int:
    """Return the rank of a name; the one with the lowest rank names a group."""
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
    """Return a key that is equal for layers that cost the same in equal calls.

    It holds the classes and settings of the module and all modules inside, the training
    flags, and the shapes, dtypes and `requires_grad` of its parameters. Read it only
    once, because a forward may change settings, such as a counter of its calls.

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


def autocast_state(device: torch.device) -> Hashable:
    """Return autocast's dtypes for the device and the CPU; None if it is off."""
    kinds, is_on = (device.type, "cpu"), torch.is_autocast_enabled
    if not any(map(is_on, kinds)):
        return None
    return tuple(torch.get_autocast_dtype(k) if is_on(k) else None for k in kinds)


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
    cls = type(module)
    name = f"{cls.__module__}.{cls.__qualname__}"
    return name, module.training, attention, settings


def _setting(value: object) -> Hashable:
    """Return what counts of a setting: of floats (rates) only whether they are 0."""
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
