"""What a layer's call changes besides its output, and whether it may run twice.

Note: [What is served, what is kept]
`mimose.exactness.guard` restores attributes that a call replaces. A call may also edit
buffers, or tensors among the attributes. These are found in the first call, by
comparing all of them before and after; later calls save only those. A layer is kept,
with a warning, if it draws from Python's or NumPy's generators or from one that it
owns, if it edits its weights, or if it edits an object that it receives.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from mimose.exactness.slots import (
    Changes,
    SavedTensors,
    running_statistics,
    tensor_slots,
)
from mimose.tensors import version

OBJECT_CHANGES = "it changes an object that it receives"


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
