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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from mimose.changes import Before, random_slots
from mimose.compiled import forward_is_compiled, unwrapped
from mimose.recovery import is_out_of_memory
from mimose.shapes import call_shape
from mimose.tracker import StorageTracker, tensors_in

_MOST_COUNTS = 10_000


class UncountableError(Exception):
    """A forward cannot be run without its values."""


class ForwardFlops:
    """Counts the FLOPs of one layer's forwards: see Note: [A copy without storage].

    Args:
        module: The layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._copy: nn.Module | None = None
        self._mode = ""
        self._counts: dict[object, int | str] = {}
        """Or why there is none, by what the forward was called with."""

    def count(self, mode: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Return the FLOPs of a forward.

        Args:
            mode: Names the layer's settings; another one makes another copy.
            args: What it is called with.
            kwargs: What it is called with by name.

        Raises:
            UncountableError: What it does depends on the values of its tensors, or it
                cannot be copied.
        """
        key = mode, call_shape(args, kwargs)
        if key not in self._counts:
            if len(self._counts) >= _MOST_COUNTS:
                self._counts.clear()
            self._counts[key] = self._try(mode, args, kwargs)
        found = self._counts[key]
        if isinstance(found, str):
            raise UncountableError(found)
        return found

    def _try(
        self, mode: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> int | str:
        try:
            return self._run(mode, args, kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            first_line = (str(error) or type(error).__name__).splitlines()[0]
            return f"{type(error).__name__}: {first_line}"

    def _run(self, mode: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda t: self._fake.from_tensor(t.detach()), (args, kwargs)
        )
        eager: Any = torch.compiler.set_stance
        tracker = StorageTracker()
        if self._copy is None or mode != self._mode:
            self._copy = _plain_copy(self._module, self._fake)
            self._mode = mode
        with (
            eager("force_eager"),
            torch.no_grad(),
            Before(random_slots(())),
            self._fake,
            tracker,
        ):
            self._copy.forward(*args, **kwargs)
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
    for inner in copied.modules():
        inner._forward_hooks.clear()
        inner._forward_pre_hooks.clear()
        if forward_is_compiled(inner):
            del inner.forward
    return copied
