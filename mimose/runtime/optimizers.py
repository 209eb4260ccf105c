"""Finds the optimizers of the model's parameters, when they step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from mimose.memory.wall import MemoryLimit
from mimose.model.placement import only_device
from mimose.model.sharding import own_parameters
from mimose.tensors import storages_in
from mimose.torch_private import NO_GRAPH_TASK, current_graph_task

OptimizerKind: TypeAlias = Literal["own", "copy", "other"]
"""Whose parameters it holds: the model's, others of the same shapes, or others."""


class OptimizerWatch:
    """Finds the optimizers of the model's parameters, when they step.

    Args:
        model: The model.
        memory_limit: Its wall is dropped before each optimizer step outside a backward.
        on_step: Called before such a step.
        on_stepped: Each is called after each optimizer's step, with whose parameters it
            holds: the model's, others of the same shapes, as of a copy, or quite
            others.

    Attributes:
        n_steps: How many optimizer steps there were, outside of a backward.
    """

    def __init__(
        self,
        model: nn.Module,
        memory_limit: MemoryLimit,
        on_step: Callable[[], None],
        on_stepped: Sequence[Callable[[OptimizerKind], None]],
    ) -> None:
        self._memory_limit = memory_limit
        self._on_step, self._on_stepped = on_step, on_stepped
        self._model = weakref.ref(model)  # hooks of all optimizers refer to this
        self._device = only_device(model)
        self.n_steps = 0
        self._known: weakref.WeakKeyDictionary[
            torch.optim.Optimizer, tuple[OptimizerKind, int]
        ]
        self._known = weakref.WeakKeyDictionary()
        """The optimizers that have stepped: whose parameters they hold, and in how many
        groups, because later groups may hold the model's."""
        self._handles: list[RemovableHandle] = []

    @property
    def state_bytes(self) -> int:
        """Bytes that the state of these optimizers holds on the model's device."""
        known = self._known.items()
        own = [optimizer for optimizer, (kind, _) in known if kind == "own"]
        storages = storages_in([optimizer.state for optimizer in own]).values()
        return sum(s.nbytes() for s in storages if s.device == self._device)

    @property
    def have_stepped(self) -> bool:
        """Whether an optimizer of the model has stepped, so that its state exists."""
        return any(kind == "own" for kind, _ in self._known.values())

    def are_due(self, n_steps: int) -> bool:
        """Whether there are gradients that no optimizer step has used yet.

        Args:
            n_steps: How many there were when a window began.
        """
        model = self._model()
        if self.n_steps > n_steps or model is None:
            return False
        return any(p.grad is not None for p in own_parameters(model))

    def start(self) -> None:
        """Set the hooks, which torch has for all optimizers together."""
        self._handles.append(register_optimizer_step_pre_hook(self._pre))
        self._handles.append(register_optimizer_step_post_hook(self._post))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _pre(self, *_: Any) -> None:
        if current_graph_task() == NO_GRAPH_TASK:
            self.n_steps += 1
            if self._memory_limit.has_wall:
                self._memory_limit.drop_wall()
            self._on_step()

    def _post(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        model = self._model()
        if model is None:
            return
        kind, n_groups = self._known.get(optimizer, ("other", 0))
        if kind != "own" and n_groups != len(optimizer.param_groups):
            kind = _kind_of(optimizer, own_parameters(model))
            self._known[optimizer] = kind, len(optimizer.param_groups)
        for told in self._on_stepped:
            told(kind)


def _kind_of(
    optimizer: torch.optim.Optimizer, own: Sequence[nn.Parameter]
) -> OptimizerKind:
    """Return whose parameters an optimizer holds."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    ids = set(map(id, own))
    if any(id(parameter) in ids for parameter in held):
        return "own"
    trained = [parameter.shape for parameter in own if parameter.requires_grad]
    return "copy" if sorted(trained) == sorted(p.shape for p in held) else "other"
