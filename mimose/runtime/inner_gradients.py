"""Gradients taken inside a forward that nobody measures: noticed at what layers return.

Note: [Suspicion]
A hook on what each layer returns costs more than a kept layer may. So forwards are
watched only where something hints at such a gradient: a measured step has seen one, or
torch has run more backwards between those of two steps than it did before. Where so
many are no sign of one (they belong to another model, or to what a layer does inside),
a number of forwards shows that, and they are no hint any more.
"""

from __future__ import annotations

from typing import Any

import torch

from mimose.memory.marks import INNER_GRADIENT
from mimose.tensors import tensors_in

_PATIENCE = 16
"""Forwards that are watched on a suspicion."""


class InnerGradients:
    """Notices that gradients pass layers while the model's forward runs.

    Attributes:
        is_watching: Whether what layers return is to be told of.
    """

    def __init__(self) -> None:
        self.is_watching = False
        self._is_certain = False
        self._is_found = False
        self._is_forward = False
        self._n_in_event = 0
        self._n_to_watch = 0
        self._last_backward = 0
        self._usual = self._most = 1
        """Backwards from one of a step to the next: no hint, and the most seen."""

    def begin(self, *, is_measured: bool) -> None:
        """Take note that a forward begins; one that is measured shows it by itself."""
        self._is_forward, self._is_found, self._n_in_event = True, False, 0
        is_suspicious = self._is_certain or self._n_to_watch > 0
        self.is_watching = is_suspicious and not is_measured

    def end(self) -> None:
        """Take note that it is left."""
        self._is_forward = False
        if self.is_watching and not self._is_certain:
            self._n_to_watch -= 1
            if not self._n_to_watch:
                self._usual = self._most

    def seen(self, spoilt: str) -> str:
        """Return why the forward that was left is not an ordinary one; "" if it is.

        Args:
            spoilt: What a measured one has shown.
        """
        told = INNER_GRADIENT if self._is_found else spoilt
        self._is_certain = self._is_certain or told == INNER_GRADIENT
        return told

    def enter(self) -> None:
        """Take note that a layer runs: gradients are its own meanwhile."""
        self._n_in_event += 1

    def leave(self, output: Any) -> None:
        """Watch what a layer returns; None where it raised."""
        self._n_in_event -= 1
        for tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, _: torch.Tensor) -> None:
        if self._is_forward and not self._n_in_event:
            self._is_found = True

    def note_backward(self, number: int) -> None:
        """Take note of a step's backward: Note: [Suspicion].

        Args:
            number: What torch counts it as.
        """
        before, self._last_backward = self._last_backward, number
        n_run = number - before
        if before and n_run > self._usual and not self._is_certain:
            self._most = max(self._most, n_run)
            self._n_to_watch = self._n_to_watch or _PATIENCE
