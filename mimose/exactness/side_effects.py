"""What a layer's call changes besides its output, and whether it may run twice.

Note: [What is served, what is kept]
`mimose.exactness.guard` restores attributes that a call replaces. A call may also edit
buffers, or tensors among the attributes. These are found in the first call, by
comparing all of them before and after; later calls save only those. A layer is kept,
with a warning, if it draws from Python's or NumPy's generators or from one that it
owns, if it edits its weights, or if it edits an object that it receives.

Note: [Around a forward]
A recomputation needs torch's random state (of the CPU and of accelerators), autocast,
and the flags that choose kernels as its forward had them. For example,
``with sdpa_kernel(...)`` around a forward has ended when the backward runs, and another
attention kernel would save other tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from mimose.exactness.guard import MOST_ITEMS
from mimose.tensors import different_bits, same_bits, version
from mimose.torch_private import (
    KERNEL_FLAGS,
    buffers_of,
    choose_attention,
    function_modes,
    matmul_precision,
    pytree,
    set_function_modes,
    version_of,
)

_CPU = torch.default_generator
_WITHOUT = frozenset(("cpu", "meta"))
"""Device types without a random state beyond the CPU's."""


def accelerators(tensors: Iterable[object]) -> tuple[torch.device, ...]:
    """Return the devices of these tensors that have their own random state."""
    found = dict.fromkeys(t.device for t in tensors if isinstance(t, torch.Tensor))
    return tuple([device for device in found if device.type not in _WITHOUT])


def accelerators_of(module: nn.Module) -> tuple[torch.device, ...]:
    """Return the accelerators of a module's parameters and buffers."""
    return accelerators(itertools.chain(module.parameters(), module.buffers()))


def saved_random_state(devices: Iterable[torch.device] = ()) -> Callable[[], None]:
    """Save the random state of the CPU and of some accelerators.

    Args:
        devices: The accelerators.

    Returns:
        A function that restores it.
    """
    cpu = _CPU.get_state()
    others = []
    for device in devices:
        state = torch.get_device_module(device).get_rng_state(device)
        others.append((device, state))

    def restore() -> None:
        _CPU.set_state(cpu)
        for device, state in others:
            torch.get_device_module(device).set_rng_state(state, device)

    return restore


def _casts(kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the autocast settings by device type."""
    return [
        {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for kind in kinds
    ]


_OPEN: Any = object()
"""Stands for a flag that cannot be read, and so stays unchanged."""


def _set_precision(precision: Any) -> None:
    if precision is not _OPEN:
        torch.set_float32_matmul_precision(precision)


_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (function_modes, set_function_modes),
    *KERNEL_FLAGS,
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_default_dtype, torch.set_default_dtype),
    # The last one: see `flags_now`.
    (matmul_precision, _set_precision),
)
_READ = tuple(get for get, _ in _FLAGS)


def flags_now() -> list[Any]:
    """Return the values of all flags.

    A precision that was set through torch's newer API cannot be read through the older.
    """
    try:
        return [read() for read in _READ]
    except RuntimeError:
        return [*(read() for read in _READ[:-1]), _OPEN]


def _set_flags(flags: list[Any]) -> None:
    for (_, put), is_now, value in zip(_FLAGS, flags_now(), flags, strict=True):
        if is_now != value:
            put(value)


def settle_flags(device: torch.device) -> None:
    """Make torch set now the flags that it sets at a process's first attention.

    On Hopper and Blackwell, torch then prefers cuDNN's kernels to flash attention's. If
    a layer's forward read the order before, its recomputation would use other kernels.

    Args:
        device: Where attention will run.
    """
    if device.type == "cuda":
        choose_attention(torch.empty(1, 1, 1, 8, dtype=torch.half, device=device))


class Context:
    """The random state, autocast and flags around a call that begins now.

    Args:
        devices: Accelerators from which the call may draw random numbers.

    Attributes:
        draw_again: Restores the random state, so that the same numbers are drawn.
    """

    __slots__ = ("_casts", "_devices", "_flags", "_kinds", "draw_again")

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self._devices = devices
        self.draw_again = saved_random_state(devices)
        self._kinds = (*{device.type: None for device in devices}, "cpu")
        self._casts = _casts(self._kinds)
        self._flags = flags_now()

    @contextlib.contextmanager
    def as_then(self) -> Iterator[None]:
        """Restore all of it; put back today's settings afterwards."""
        restore_random, flags = saved_random_state(self._devices), flags_now()
        now = _casts(self._kinds)
        try:
            if flags != self._flags:
                _set_flags(self._flags)
            with contextlib.ExitStack() as stack:
                for cast, today in zip(self._casts, now, strict=True):
                    if cast != today:
                        stack.enter_context(torch.autocast(**cast))
                yield
        finally:
            restore_random()
            if flags_now() != flags:
                _set_flags(flags)


OBJECT_CHANGES = "it changes an object that it receives"


class TensorSlot:
    """The place of a tensor: a buffer of a module, or another attribute.

    Values are compared as well as versions, because batch norms change their statistics
    without a new version.

    Args:
        table: The dictionary that holds it.
        name: Its name there.
    """

    def __init__(self, table: dict[str, Any], name: str) -> None:
        self._table = table
        self._name = name

        self.key = id(table), name
        """Equal for slots of the same place."""

    def __eq__(self, other: object) -> bool:
        """Whether two slots are the same place."""
        return isinstance(other, TensorSlot) and other.key == self.key

    def __hash__(self) -> int:
        """Hash the place."""
        return hash(self.key)

    def now(self) -> torch.Tensor | None:
        """Return the tensor there; None if there is none."""
        try:
            found = self._table[self._name]  # those of scripted modules have no `get`
        except KeyError:
            return None
        return found if isinstance(found, torch.Tensor) else None

    def read(self) -> Any:
        """Return a copy, and the identity and version of the original."""
        tensor = self.now()
        if tensor is None:
            return None, None, 0
        return tensor.detach().clone(), id(tensor), version(tensor)

    def differs(self, state: Any) -> bool | torch.Tensor:
        """Compare identity, version and value.

        If only an accelerator can decide, the result is a flag on it, not read yet.
        """
        old, identity, counted = state
        tensor = self.now()
        if tensor is None or old is None:
            return tensor is not old
        if id(tensor) != identity or version(tensor) != counted:
            return True
        return different_bits(tensor, old)

    def lend(self, state: Any) -> None:
        """Put a copy of the old tensor in its place."""
        self._table[self._name] = None if state[0] is None else state[0].clone()

    def restore(self, state: Any) -> None:
        """Copy the old values in place, if they have changed."""
        tensor, old = self.now(), state[0]
        if tensor is None or old is None or tensor.shape != old.shape:
            self._table[self._name] = old
        elif not same_bits(tensor, old):
            with torch.no_grad():
                tensor.copy_(old)


class SavedTensors:
    """Copies of the tensors at some places.

    Args:
        slots: The places.
    """

    def __init__(self, slots: Iterable[TensorSlot]) -> None:
        self.states: list[tuple[TensorSlot, Any]] = [(s, s.read()) for s in slots]

    def lend(self) -> None:
        """Put copies in their places, for a run that may change them."""
        for slot, state in self.states:
            slot.lend(state)

    def compare(self, known: Iterable[TensorSlot]) -> Changes:
        """Return the places that have changed, and those with a flag not read yet.

        Args:
            known: Places that are known to change, and need not be compared.
        """
        known, changed = set(known), []
        unclear: dict[TensorSlot, torch.Tensor] = {}
        for slot, state in self.states:
            found = slot in known or slot.differs(state)
            if isinstance(found, torch.Tensor):
                unclear[slot] = found
            elif found:
                changed.append(slot)
        return changed, unclear


Changes: TypeAlias = tuple[list[TensorSlot], dict[TensorSlot, torch.Tensor]]


def tensor_slots(modules: Iterable[nn.Module]) -> list[TensorSlot]:
    """Return the places of all buffers, and of tensors among the attributes."""
    found = []
    for module in modules:
        buffers, own = buffers_of(module), vars(module)
        found += [TensorSlot(buffers, name) for name, _ in buffers.items()]
        found += [TensorSlot(own, n) for n, value in own.items() if _is_tensor(value)]
    return found


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is None


def running_statistics(modules: Iterable[nn.Module]) -> list[TensorSlot]:
    """Return the buffers that forwards are known to change."""
    return [
        TensorSlot(buffers_of(module), name)
        for module in modules
        for name, buffer in buffers_of(module).items()
        if buffer is not None
        and (name.startswith("running_") or name == "num_batches_tracked")
    ]


class Generator(NamedTuple):
    """A random generator that torch does not save."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], Any]


_GLOBAL = (
    Generator("Python's generator", random.getstate, random.setstate),
    Generator(
        "NumPy's generator",
        partial(np.random.get_state, legacy=False),
        np.random.set_state,
    ),
)


def _generator(value: object) -> Generator | None:
    name = "its own generator"
    if isinstance(value, torch.Generator):
        return Generator(name, value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return Generator(name, value.getstate, value.setstate)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        read, put = partial(getattr, bits, "state"), partial(setattr, bits, "state")
        return Generator(name, read, put)
    return None


def generators(modules: Iterable[nn.Module]) -> list[Generator]:
    """Return Python's and NumPy's generators, and those that modules own."""
    own = (_generator(v) for module in modules for v in vars(module).values())
    return [*_GLOBAL, *(each for each in own if each is not None)]


class FirstCall:
    """Finds what the first call of a layer changes; made before its forward.

    Args:
        module: The layer's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = tuple(module.modules())
        self._weights = dict(module.named_parameters())
        self._versions = self._count()
        self._drawn = [(each, each.read()) for each in generators(self._modules)]
        self.saved = SavedTensors(tensor_slots(self._modules))
        """The tensors before the call, for a recomputation."""

    def _count(self) -> list[int]:
        return list(map(version, self._weights.values()))

    def changed(self) -> Changes:
        """Return what the call has changed: see `SavedTensors.compare`."""
        changed, unclear = self.saved.compare(running_statistics(self._modules))
        needed = {*changed, *unclear}
        self.saved.states = [each for each in self.saved.states if each[0] in needed]
        return changed, unclear

    def why_impure(self) -> str:
        """Return why the layer must not run again; "" if it may."""
        if self._versions != self._count():
            return "its forward edits its own weights"
        for each, state in self._drawn:
            if pickle.dumps(each.read()) != pickle.dumps(state):
                return f"its forward draws from {each.name}"
        return ""


class Given:
    """What a call received, to detect later changes.

    Tensors are not held, but objects are. An object may refer to the graph that holds
    this, so code that abandons a forward must call `give_up`.

    Args:
        values: Tensors and objects, recorded by `add`.
    """

    __slots__ = ("_looks", "_tensors", "holder")

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._tensors: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._looks: list[tuple[Any, Any]] = []
        self.holder: Callable[[], Any] = lambda: None
        """Returns the object that holds the inputs for a recomputation, if it lives."""
        for value in values:
            self.add(value)

    def add(self, value: Any) -> None:
        """Record a tensor or an object."""
        if isinstance(value, torch.Tensor):
            if not value.is_inference():
                self._tensors.append((weakref.ref(value), version_of(value)))
        elif type(value) not in PLAIN:
            self._looks.append((value, _look(value)))

    @property
    def has_objects(self) -> bool:
        """Whether there are objects besides tensors, numbers and their containers."""
        return bool(self._looks)

    def are_edited(self) -> bool:
        """Whether a tensor was edited in place, or an object changed."""
        for ref, counted in self._tensors:
            tensor = ref()
            if tensor is not None and version_of(tensor) != counted:
                return True
        # After a caller's ``x += layer(x)`` only the holder refers to the tensor.
        held = self.holder()
        if held is not None and held.are_edited:
            return True
        return bool(self._looks) and self.are_objects_changed()

    def are_objects_changed(self) -> bool:
        """Whether an object or its content has changed."""
        return any(look != _look(value) for value, look in self._looks)

    def give_up(self) -> None:
        """Free everything, because the forward is abandoned."""
        self._looks.clear()
        holder = self.holder()
        if holder is not None:
            holder.clear()


PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))
_ONE_PIECE = (nn.Module, type)


def is_opaque(value: object) -> bool:
    """Whether a value is no tensor, no number, and no container known to torch."""
    kind = type(value)
    return kind not in PLAIN and pytree.tree_is_leaf(value) and _parts(value) != {}


def _parts(value: Any) -> dict[Any, Any]:
    """Return the parts of an object or a container; {} if it has none."""
    kind = type(value)
    if kind in (list, tuple):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, _ONE_PIECE):
        return {}
    try:
        own = value.__dict__
    except Exception:  # whatever a class of the user's raises
        return {}
    return dict(own) if isinstance(own, dict) else {}


def _look(value: Any) -> Any:
    """Describe a value and all its parts by identity, value and version.

    Returns:
        A description, equal while nothing changes; None if there are too many parts.
    """
    seen: set[int] = set()
    look: list[Any] = []
    left: list[tuple[Any, Any]] = [("", value)]
    while left:
        if len(look) + len(left) > MOST_ITEMS:
            return None
        name, value = left.pop()
        key = name if isinstance(name, (str, int)) else id(name)
        if type(value) in PLAIN:
            look.append((key, value))
        elif isinstance(value, torch.Tensor):
            look.append((key, id(value), version(value)))
        elif id(value) in seen:
            look.append((key, id(value)))
        else:
            seen.add(id(value))
            parts = _parts(value)
            look.append((key, id(value), len(parts), "parts"))
            left.extend(parts.items())
    return look
