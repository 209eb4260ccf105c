"""Seeing the optimizer's steps: its state, and its working memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from mimose.inputs.placement import only_device
from mimose.inputs.sharding import own_parameters
from mimose.memory.meters import Meter
from mimose.memory.optimizer_state import (
    bytes_to_come,
    optimizers_of,
    parameters_of,
    state_bytes,
)
from mimose.torch_private import NO_GRAPH_TASK, current_graph_task

_STEPS_WATCHED = 3
_ByOptimizer: TypeAlias = "weakref.WeakKeyDictionary[torch.optim.Optimizer, int]"


class OptimizerWatch:
    """Measures the first steps of every optimizer that holds the model's parameters.

    Args:
        model: The model.
        meter: Where the readings come from.
        n_forwards: Tells how often the model's forward has run.
        on_step: Called before each optimizer step that is in no backward.

    Not watched are steps inside a backward (a hook on each parameter), whose peak is
    the backward's, and those whose closure runs the model.

    Note: [State to come]
    An optimizer is heard of when it steps, and makes its state in its first step. A
    plan made before that (under accumulation, or after what was learned was loaded) is
    used after it as well, so it has to leave room for that state. The optimizers that
    have not stepped are then searched for, once: one that is made after that is not
    known before its first step. From then on the state is part of what every step
    starts from.

    Attributes:
        has_stepped: Whether an optimizer's step was seen; its state exists then.
        excess_bytes: The step's working memory beyond the state it made.
    """

    def __init__(
        self,
        model: nn.Module,
        meter: Meter,
        n_forwards: Callable[[], int] = lambda: 0,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_step = on_step
        self._model = weakref.ref(model)  # hooks of all optimizers refer to this
        self._device = only_device(model)
        self._waiting: weakref.WeakSet[torch.optim.Optimizer] | None = None
        """Not stepped yet, as far as is known; None: not searched for yet."""
        self._stepped: set[int] = set()
        """Parameters of the optimizers that have stepped."""
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
        """Bytes that the state of the optimizers seen holds on the model's device."""
        return sum(self._state_bytes.values())

    @property
    def state_to_come_bytes(self) -> float:
        """Bytes that optimizers will make on the model's device: [State to come].

        As well as that can be told: see `mimose.memory.optimizer_state.bytes_to_come`.
        What several optimizers would make for one parameter counts once.
        """
        if self._waiting is None:
            found = () if self.has_stepped else optimizers_of(self._parameters())
            self._waiting = weakref.WeakSet(found)
        if not self._waiting:
            return 0.0
        most: dict[int, float] = {}
        for optimizer in self._waiting:
            for parameter, n_bytes in bytes_to_come(optimizer, self._device).items():
                most[id(parameter)] = max(n_bytes, most.get(id(parameter), 0.0))
        wanted = most.keys() & self._parameters() - self._stepped
        return sum(most[key] for key in wanted)

    def _parameters(self) -> set[int]:
        """Return the model's, which are others once it is sharded, by identity."""
        model = self._model()
        return set() if model is None else set(map(id, own_parameters(model)))

    def start(self) -> None:
        """Set the hooks, which torch has for all optimizers together."""
        self._handles.append(register_optimizer_step_pre_hook(self._pre))
        self._handles.append(register_optimizer_step_post_hook(self._post))

    def state_dict(self) -> dict[str, Any]:
        """Return what a step needs while it works, ready for JSON."""
        return {"excess_bytes": self.excess_bytes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another watch has seen.

        Args:
            state: What ``state_dict`` returned.
        """
        self.excess_bytes = float(state["excess_bytes"])

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _is_watched(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._n_watched.get(optimizer, 0) >= _STEPS_WATCHED:
            return False
        own = self._parameters()
        return any(id(p) in own for p in parameters_of(optimizer))

    def _pre(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if _in_backward():
            return
        self._on_step()
        if not self._is_watched(optimizer):
            return
        self._n_before = self._n_forwards()
        self.peak_bytes = max(self.peak_bytes, self._meter.peak_bytes())
        self._meter.reset_peak()
        self._before = self._meter.live_bytes(), self._state_of(optimizer)

    def _post(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_watched(optimizer):
            return
        self._stepped.update(map(id, parameters_of(optimizer)))
        if self._waiting:
            self._waiting.discard(optimizer)
        if _in_backward():
            return
        self._n_watched[optimizer] = self._n_watched.get(optimizer, 0) + 1
        live, state = self._before
        now = self._state_of(optimizer)
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

    def _state_of(self, optimizer: torch.optim.Optimizer) -> int:
        return state_bytes(optimizer, self._device)


def _in_backward() -> bool:
    return current_graph_task() != NO_GRAPH_TASK
