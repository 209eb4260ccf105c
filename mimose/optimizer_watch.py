"""Seeing the optimizer's steps: its state, and its working memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from mimose.meters import Meter

_STEPS_WATCHED = 3
_ByOptimizer: TypeAlias = "weakref.WeakKeyDictionary[torch.optim.Optimizer, int]"


class OptimizerWatch:
    """Measures the first steps of every optimizer that holds the model's parameters.

    Args:
        model: The model.
        meter: Where the readings come from.
        n_forwards: Tells how often the model's forward has run.

    Not watched are steps inside a backward (a hook on each parameter), whose peak is
    the backward's, and those whose closure runs the model.

    Attributes:
        has_stepped: Whether an optimizer's step was seen; its state exists then.
        excess_bytes: The step's working memory beyond the state it made.
    """

    def __init__(
        self,
        model: nn.Module,
        meter: Meter,
        n_forwards: Callable[[], int] = lambda: 0,
    ) -> None:
        self._parameters = {id(p) for p in model.parameters()}
        self._meter = meter
        self._n_forwards = n_forwards
        self._n_before = 0
        self._n_watched: _ByOptimizer = weakref.WeakKeyDictionary()
        self._before = (0, 0)
        self._state_bytes: _ByOptimizer = weakref.WeakKeyDictionary()
        self.has_stepped = False
        self.excess_bytes = 0.0
        self.peak_bytes = 0
        self._handles: list[RemovableHandle] = []

    @property
    def state_bytes(self) -> int:
        """Bytes of the state tensors of the optimizers seen."""
        return sum(self._state_bytes.values())

    def start(self) -> None:
        """Set the hooks, which torch has for all optimizers together."""
        self._handles.append(register_optimizer_step_pre_hook(self._pre))
        self._handles.append(register_optimizer_step_post_hook(self._post))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _is_watched(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._n_watched.get(optimizer, 0) >= _STEPS_WATCHED:
            return False
        groups = optimizer.param_groups
        return any(id(p) in self._parameters for g in groups for p in g["params"])

    def _pre(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_watched(optimizer) or _in_backward():
            return
        self._n_before = self._n_forwards()
        self.peak_bytes = max(self.peak_bytes, self._meter.peak_bytes())
        self._meter.reset_peak()
        self._before = self._meter.live_bytes(), _state_bytes(optimizer)

    def _post(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_watched(optimizer) or _in_backward():
            return
        self._n_watched[optimizer] = self._n_watched.get(optimizer, 0) + 1
        live, state = self._before
        now = _state_bytes(optimizer)
        self._state_bytes[optimizer] = now
        peak = self._meter.peak_bytes()
        self.peak_bytes = max(self.peak_bytes, peak)
        if (
            self.has_stepped and self._n_forwards() == self._n_before
        ):  # the first step's excess has one-off costs in it
            self.excess_bytes = max(
                self.excess_bytes, float(peak - live - (now - state)), 0.0
            )
        self.has_stepped = True


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
