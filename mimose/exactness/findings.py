"""Which layers must be kept, and which are not exact when recomputed, and why.

Note: [Deferred device checks]
To read a number from an accelerator, the host waits until all queued work is done. So
the flags of a step are read together at the end of its backward: one wait for all
checks, none if there are no checks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from mimose.cost.learner import Learner
from mimose.exactness.call_inputs import CallInputs

_log = logging.getLogger(__name__)

_Deferred: TypeAlias = "tuple[Sequence[torch.Tensor], Callable[[list[bool]], None]]"


class Findings:
    """Records which layers cannot be recomputed, or not to the last bit.

    A layer is known by its index among the layers.

    Args:
        names: The names of the layers, in order.
        learner: Learns which of them are always kept.
        on_compiled: Called when a layer turns out to run compiled code.
        on_out_of_memory: Called when a recomputation has run out of memory.

    Attributes:
        kept: By name, why a layer cannot be recomputed.
        inexact: By name, why the recomputation of a layer has other bits.
        families: For each layer a key; layers built alike have the same.
        version: Changes whenever calls of a layer have shown something, or will.
        read: What recomputed calls of this step were given.
        impure: Layers that cannot run again, found in this step, and why.
        on_compiled: The argument.
        on_out_of_memory: The argument.
        deferred: Flags not read yet, and the functions that take their values.
    """

    def __init__(
        self,
        names: Sequence[str],
        learner: Learner,
        on_compiled: Callable[[], object],
        on_out_of_memory: Callable[[], object],
    ) -> None:
        self._names = names
        self._learner = learner
        self.kept: dict[str, str] = {}
        self.inexact: dict[str, str] = {}
        self.families: Sequence[str] = ()
        self._excluded: set[tuple[str, str]] = set()
        self.version = 0
        self.read: list[tuple[int, CallInputs]] = []
        self.impure: dict[int, str] = {}
        self.on_compiled, self.on_out_of_memory = on_compiled, on_out_of_memory
        self.deferred: list[_Deferred] = []

    def use_families(self, families: Sequence[str]) -> None:
        """Set which layers are built alike in the present mode."""
        self.families = families

    def keep(self, index: int, why: str) -> None:
        """Never recompute a layer again."""
        name = self._names[index]
        if name in self.kept:
            return
        self._keep_only(index)
        self.kept[name] = why
        self.version += 1
        _log.warning(
            "mimose: %s keeps its activations from now on, because it cannot be "
            "recomputed: %s",
            name,
            why,
        )

    def keep_alike(self, index: int, why: str) -> None:
        """Never recompute a layer again, nor layers that are built like it."""
        self.keep(index, why)
        if not self.families:
            return
        own, family = self._names[index], self.families[index]
        for other, name in enumerate(self._names):
            if self.families[other] == family and name not in self.kept:
                self._keep_only(other)
                self.kept[name] = f"it is built like {own}, which is kept: {why}"

    def exclude(self, index: int, action: str, why: str) -> None:
        """Never choose an action for a layer again."""
        model = self._learner.model
        allowed = [name for name in model.allowed(index) if name != action]
        self._learner.restrict(index, allowed)
        if (action, why) not in self._excluded:
            self._excluded.add((action, why))
            _log.warning(
                "mimose: the action %s is not used for %s: %s (other layers for which "
                "this holds are not logged)",
                action,
                self._names[index],
                why,
            )

    def _keep_only(self, index: int) -> None:
        self._learner.restrict(index, [self._learner.model.menu.first])

    def note_inexact(self, index: int, why: str) -> None:
        """Record a layer that is recomputed, but not to the bit."""
        name = self._names[index]
        if not self.inexact:
            _log.warning(
                "mimose: the recomputation of %s differs in its last bits: %s. The "
                "session's report lists all such layers",
                name,
                why,
            )
        self.inexact.setdefault(name, why)

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
