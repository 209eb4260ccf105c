"""What makes a layer impure: attributes that change, and draws that torch knows not of.

An impure layer's output depends on state that nobody saves, or its forward leaves
another state behind. Run again it would count twice, or draw other numbers. So a layer
is compared before and after: its attributes and its own generators over a forward of
the whole model, which finds what the model sets on its layers as well; Python's and
NumPy's generators over a first call of its own, since the model may draw from them too.
What is found is kept, with the reason, and the forward it was found in is run again.

Attributes are looked at where they are numbers, texts, tensors or tuples of these.
"""

from __future__ import annotations

import pickle
import random
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from mimose.exactness.attributes import INTERNAL
from mimose.tensors import same_bits, tensors_in, version

_SCALARS = (type(None), bool, int, float, str, bytes)
_LOOKED_AT = (*_SCALARS, tuple, torch.Tensor)
_MISSING: Any = object()
_OPAQUE: Any = object()
"""In place of a tuple with a graph in it, or what cannot be looked at."""


class _State(NamedTuple):
    """An attribute's value.

    A tensor with a graph is not held: from here, a chain of old steps could stay alive.
    """

    get: Callable[[], Any]
    tensors: tuple[tuple[torch.Tensor, int, torch.Tensor | None], ...] = ()
    """Those in it, with their versions, and copies of the smaller ones."""
    is_other: bool = False
    """Whether it is of a kind that is not looked at."""


class AttributesSlot:
    """All attributes of one module that can be looked at.

    Args:
        module: The module.
        most_numel: Tensors of more elements are not copied: of these only versions are
            compared, and what is edited in place stays so.
    """

    def __init__(self, module: nn.Module, most_numel: float) -> None:
        self._table = vars(module)
        self._most_numel = most_numel

    @property
    def key(self) -> object:
        """Where they are."""
        return id(self._table)

    def read(self) -> dict[str, Any]:
        """Return the state of each, by name."""
        return {
            name: self._state(value)
            for name, value in self._table.items()
            if name not in INTERNAL
        }

    def differs(self, state: Mapping[str, Any]) -> bool:
        """Whether one was set, edited or taken away."""
        return bool(self._first(state))

    def why(self, state: Mapping[str, Any]) -> str:
        """Say of a layer that holds this module what makes it impure."""
        return f"its attribute {self._first(state)!r} is changed by the forward"

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put all back; take away what was not there."""
        for name in [name for name, _ in self._present() if name not in state]:
            del self._table[name]
        for name, old in state.items():
            value = old.get()
            if value is _OPAQUE or (value is None and isinstance(old.get, weakref.ref)):
                continue
            self._table[name] = value
            for tensor, _, copied in old.tensors:
                if copied is not None and not same_bits(tensor, copied):
                    with torch.no_grad():
                        tensor.copy_(copied)

    def _present(self) -> list[tuple[str, Any]]:
        return [
            (name, value)
            for name, value in self._table.items()
            if isinstance(value, _LOOKED_AT) and name not in INTERNAL
        ]

    def _first(self, state: Mapping[str, Any]) -> str:
        for name, old in state.items():
            if not _is_same(old, self._table.get(name, _MISSING)):
                return name
        new = (name for name, _ in self._present() if name not in state)
        return next(new, "")

    def _state(self, value: Any) -> _State:
        if not isinstance(value, _LOOKED_AT):
            return _State(lambda: value, is_other=True)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return _State(weakref.ref(value))
        if not _may_be_held(value):
            return _State(lambda: _OPAQUE)
        tensors = [
            (t, version(t), t.clone() if t.numel() <= self._most_numel else None)
            for t in tensors_in(value)
        ]
        return _State(lambda: value, tuple(tensors))


def _is_same(state: _State, value: Any) -> bool:
    """Whether a value is what it was when its state was read."""
    old = state.get()
    if state.is_other:
        return value is not _MISSING and not isinstance(value, _LOOKED_AT)
    if old is _OPAQUE:
        return isinstance(value, tuple) and not _may_be_held(value)
    is_equal = type(old) is type(value) and not state.tensors and _is_plain(value)
    if old is not value and not (is_equal and old == value):
        return False
    return all(
        version(tensor) == counted and (copied is None or same_bits(tensor, copied))
        for tensor, counted, copied in state.tensors
    )


def _may_be_held(value: object) -> bool:
    return not any(tensor.requires_grad for tensor in tensors_in(value)) and (
        isinstance(value, torch.Tensor) or _is_plain(value, torch.Tensor)
    )


def _is_plain(value: object, *besides: type) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item, *besides) for item in value)
    return isinstance(value, (*_SCALARS, *besides))


class RandomSlot:
    """A random state that torch's own saving does not know.

    Args:
        key: Equal for the same generator.
        name: What users call it.
        get: Returns its state.
        put: Puts a state there.
    """

    def __init__(
        self,
        key: object,
        name: str,
        get: Callable[[], Any],
        put: Callable[[Any], Any],
    ) -> None:
        self.key = key
        self.name = name
        self.read = get
        self.restore = put

    def differs(self, state: Any) -> bool:
        """Compare the bytes of both states."""
        return pickle.dumps(self.read()) != pickle.dumps(state)

    def why(self, _: object) -> str:
        """Say of a layer what makes it impure."""
        return f"its forward draws from {self.name}"


def _numpy_state() -> Any:
    return np.random.get_state(legacy=False)  # noqa: NPY002 - what users draw from


GLOBAL_GENERATORS = (
    RandomSlot("python", "Python's generator", random.getstate, random.setstate),
    RandomSlot("numpy", "NumPy's generator", _numpy_state, np.random.set_state),
)


def _generator_slot(value: object) -> RandomSlot | None:
    name = "a generator of its own"
    if isinstance(value, torch.Generator):
        return RandomSlot(id(value), name, value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return RandomSlot(id(value), name, value.getstate, value.setstate)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator

        def put(state: Any) -> None:
            bits.state = state

        return RandomSlot(id(value), name, lambda: bits.state, put)
    return None


def own_slots(
    modules: Iterable[nn.Module], most_numel: float
) -> list[AttributesSlot | RandomSlot]:
    """Return the modules' attributes, and the generators among these.

    Args:
        modules: The modules.
        most_numel: See `AttributesSlot`.
    """
    found: list[AttributesSlot | RandomSlot] = []
    for module in modules:
        found.append(AttributesSlot(module, most_numel))
        generators = map(_generator_slot, vars(module).values())
        found.extend(slot for slot in generators if slot is not None)
    return found


def tensor_attributes(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return the tensors without a graph among the modules' attributes."""
    return [
        value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
        and not value.requires_grad
        and name not in INTERNAL
    ]


class Draws:
    """Where Python's and NumPy's generators are now, and those of some modules.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        own = [
            slot
            for module in modules
            for value in vars(module).values()
            if (slot := _generator_slot(value)) is not None
        ]
        self._states = [(slot, slot.read()) for slot in (*GLOBAL_GENERATORS, *own)]

    def why(self) -> str:
        """Say what was drawn from since then; nothing where that was neither."""
        found = (slot.why(None) for slot, state in self._states if slot.differs(state))
        return next(found, "")
