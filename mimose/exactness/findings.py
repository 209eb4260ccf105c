"""Which layers must be kept, and which are not exact when recomputed, and why.

Note: [Deferred device checks]
To read a number from an accelerator, the host waits until all queued work is done. So
the flags of a step are read together at the end of its backward: one wait for all
checks, none if there are no checks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from mimose.cost.learner import Learner

if TYPE_CHECKING:
    from mimose.exactness.layer import Layer
    from mimose.exactness.side_effects import Given

_log = logging.getLogger(__name__)

_Deferred: TypeAlias = "tuple[Sequence[torch.Tensor], Callable[[list[bool]], None]]"


class Findings:
    """Records which layers cannot be recomputed, or not to the last bit.

    Args:
        names: The names of the layers, in order.
        learner: Learns which of them are always kept.

    Attributes:
        kept: By name, why a layer cannot be recomputed.
        inexact: By name, why the recomputation of a layer has other bits.
        families: For each layer a key; layers built alike have the same.
        version: Changes whenever calls of a layer have shown something, or will.
        read: What recomputed calls of this step were given.
        impure: Layers that cannot run again, found in this step.
        on_compiled: Called when a layer turns out to run compiled code.
        on_out_of_memory: Called when a recomputation has run out of memory.
        deferred: Flags not read yet, and the functions that take their values.
    """

    def __init__(self, names: Sequence[str], learner: Learner) -> None:
        self._names = names
        self._learner = learner
        self.kept: dict[str, str] = {}
        self.inexact: dict[str, str] = {}
        self.families: Sequence[str] = ()
        self._excluded: set[tuple[str, str]] = set()
        self.version = 0
        self.read: list[tuple[Layer, Given]] = []
        self.impure: dict[Layer, str] = {}
        self.on_compiled: Callable[[], object] = lambda: None
        self.on_out_of_memory: Callable[[], object] = lambda: None
        self.deferred: list[_Deferred] = []

    def keep(self, layer: Layer, why: str) -> None:
        """Never recompute a layer again."""
        if layer.name in self.kept:
            return
        self._keep_only(layer.index)
        self.kept[layer.name] = why
        self.version += 1
        _log.warning(
            "mimose: %s keeps its activations from now on, because it cannot be "
            "recomputed: %s",
            layer.name,
            why,
        )

    def keep_alike(self, layer: Layer, why: str) -> None:
        """Never recompute a layer again, nor layers that are built like it.

        If an earlier recomputation was right, the cause is in this call and not in how
        the layer is built: then only this layer is kept.
        """
        self.keep(layer, why)
        if layer.is_compared or not self.families:
            return
        family = self.families[layer.index]
        for index, name in enumerate(self._names):
            if self.families[index] == family and name not in self.kept:
                self._keep_only(index)
                self.kept[name] = f"it is built like {layer.name}, which is kept: {why}"

    def exclude(self, layer: Layer, action: str, why: str) -> None:
        """Never choose an action for a layer again."""
        model = self._learner.model
        allowed = [name for name in model.allowed(layer.index) if name != action]
        self._learner.restrict(layer.index, allowed)
        if (action, why) not in self._excluded:
            self._excluded.add((action, why))
            _log.warning(
                "mimose: the action %s is not used for %s: %s (other layers for which "
                "this holds are not logged)",
                action,
                layer.name,
                why,
            )

    def _keep_only(self, index: int) -> None:
        self._learner.restrict(index, [self._learner.model.menu.first])

    def note_inexact(self, layer: Layer, why: str) -> None:
        """Record a layer that is recomputed, but not to the bit."""
        if not self.inexact:
            _log.warning(
                "mimose: the recomputation of %s differs in its last bits: %s. The "
                "session's report lists all such layers",
                layer.name,
                why,
            )
        self.inexact.setdefault(layer.name, why)

    def defer(
        self, flags: Sequence[torch.Tensor], then: Callable[[list[bool]], None]
    ) -> None:
        """Read flags after the step; at once if all are on a CPU.

        Args:
            flags: Tensors of one truth value each.
            then: Called with their values.
        """
        if all(flag.is_cpu for flag in flags):
            then(list(map(bool, flags)))
        else:
            self.deferred.append((flags, then))

    def read_deferred(self) -> None:
        """Read all deferred flags, with one copy from one accelerator."""
        deferred, self.deferred = self.deferred, []
        flags = [flag for flags, _ in deferred for flag in flags]
        device = next((flag.device for flag in flags if not flag.is_cpu), "cpu")
        there = [flag.to(device, non_blocking=True) for flag in flags]
        answers = iter(torch.stack(there).tolist() if there else ())
        for own, then in deferred:
            then([next(answers) for _ in own])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep also the layers that another session had to keep.

        Args:
            state: Its `kept`.
        """
        saved = {str(name): str(why) for name, why in state.items()}
        self.kept = {**saved, **self.kept}
        self.version += 1
        for index, name in enumerate(self._names):
            if name in self.kept:
                self._keep_only(index)
