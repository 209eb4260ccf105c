"""Counting what a compiled layer's forward computes, where nobody can look inside.

Note: [A copy without storage]
Under a dispatch mode compiled code does not run, so its operators cannot be counted
while it does. They are counted in a run of the plain layer, once for each size, with
tensors that have no storage: nothing is computed and nothing allocated. What runs is a
copy of the layer without hooks, so that nothing of the user's is changed by it or gets
hold of such a tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mimose.exactness.changes import Saved
from mimose.exactness.impurities import GLOBAL_GENERATORS
from mimose.exceptions import first_line
from mimose.inputs.compiled import forward_is_compiled, unwrapped
from mimose.inputs.shapes import call_shape
from mimose.memory.out_of_memory import is_out_of_memory
from mimose.memory.tracker import StorageTracker
from mimose.tensors import tensors_in
from mimose.torch_private import FakeTensorMode, clear_hooks, pytree

_MOST_COUNTS = 10_000


class UncountableError(Exception):
    """A forward cannot be run without its values."""


class ForwardFlops:
    """Counts the FLOPs of layers' forwards: see Note: [A copy without storage].

    Layers that are alike share a copy, and each size is counted once.
    """

    def __init__(self) -> None:
        self._fake: FakeTensorMode | None = None
        self._copies: dict[str, nn.Module] = {}
        self._counts: dict[object, int | str] = {}
        """Or why there is none, by layer and by what it was called with."""

    def count(
        self,
        key: str,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> int:
        """Return the FLOPs of a forward.

        Args:
            key: Equal for layers that cost the same; another mode is another key.
            module: The layer.
            args: What it is called with.
            kwargs: What it is called with by name.

        Raises:
            UncountableError: What it does depends on the values of its tensors, or it
                cannot be copied.
        """
        called = key, call_shape(args, kwargs)
        if called not in self._counts:
            if len(self._counts) >= _MOST_COUNTS:
                self._counts.clear()
                self._copies.clear()
            self._counts[called] = self._try(key, module, args, kwargs)
        found = self._counts[called]
        if isinstance(found, str):
            raise UncountableError(found)
        return found

    def _try(
        self,
        key: str,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> int | str:
        try:
            return self._run(key, module, args, kwargs)
        except Exception as error:  # whatever a layer of the user's may raise
            if is_out_of_memory(error):
                raise
            return f"{type(error).__name__}: {first_line(error)}"

    def _run(
        self,
        key: str,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> int:
        if self._fake is None:
            self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        fake = self._fake
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda t: fake.from_tensor(t.detach()), (args, kwargs)
        )
        if key not in self._copies:
            self._copies[key] = _plain_copy(module, fake)
        eager: Any = torch.compiler.set_stance
        tracker = StorageTracker()
        generators = Saved(GLOBAL_GENERATORS)
        try:
            with eager("force_eager"), torch.no_grad(), fake, tracker:
                self._copies[key].forward(*args, **kwargs)
        finally:
            generators.restore()
        return tracker.flops


def _plain_copy(module: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """Copy a module as it was before it was compiled, without hooks and storage."""
    module = unwrapped(module)
    memo: dict[int, Any] = {
        id(tensor): fake.from_tensor(tensor.detach())
        for inner in module.modules()
        for tensor in tensors_in(vars(inner))
    }
    copied = copy.deepcopy(module, memo)
    for inner in list(copied.modules()):
        clear_hooks(inner)
        for name, child in inner.named_children():
            inner.register_module(name, unwrapped(child))
        if forward_is_compiled(inner):
            del inner.forward
    return copied
