"""Seeing the optimizer's steps: what its state holds, and that no wall stands then."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from mimose.inputs.placement import only_device
from mimose.inputs.sharding import own_parameters
from mimose.tensors import storages_in
from mimose.torch_private import NO_GRAPH_TASK, current_graph_task


class OptimizerWatch:
    """Knows the optimizers that hold the model's parameters, once they have stepped.

    Args:
        model: The model.
        on_step: Called before each optimizer step that is in no backward.
    """

    def __init__(self, model: nn.Module, on_step: Callable[[], None]) -> None:
        self._on_step = on_step
        self._model = weakref.ref(model)  # hooks of all optimizers refer to this
        self._device = only_device(model)
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool]
        self._known = weakref.WeakKeyDictionary()
        """Those that have stepped, and whether they hold the model's parameters."""
        self._handles: list[RemovableHandle] = []

    @property
    def state_bytes(self) -> int:
        """Bytes that the state of these optimizers holds on the model's device."""
        own = [optimizer for optimizer, is_own in self._known.items() if is_own]
        storages = storages_in([optimizer.state for optimizer in own]).values()
        return sum(s.nbytes() for s in storages if s.device == self._device)

    def start(self) -> None:
        """Set the hooks, which torch has for all optimizers together."""
        self._handles.append(register_optimizer_step_pre_hook(self._pre))
        self._handles.append(register_optimizer_step_post_hook(self._post))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _pre(self, *_: Any) -> None:
        if current_graph_task() == NO_GRAPH_TASK:
            self._on_step()

    def _post(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        model = self._model()
        if model is None or optimizer in self._known:
            return
        own = set(map(id, own_parameters(model)))
        self._known[optimizer] = any(
            id(parameter) in own
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
