"""A call compared with its recomputation; what follows from where they differ.

See the notes of `mimose.exactness.fingerprints`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mimose.exactness.changes import SavedBuffers
from mimose.exactness.fingerprints import Fingerprint, differences, fingerprint
from mimose.exactness.late_answers import LateAnswers
from mimose.exactness.unit import Unit
from mimose.inputs.compiled import SCRIPTED, code_in_graph
from mimose.torch_private import next_sequence_number
from mimose.types import OnRecompute


class Comparison:
    """One call of a unit, to be compared with its recomputation.

    Args:
        unit: The unit. If it is in doubt, it is recomputed twice.
        answers: Tells what only an accelerator knows.
    """

    def __init__(self, unit: Unit, answers: LateAnswers) -> None:
        self._unit = unit
        self._answers = answers
        # A run that other ranks take no part in would wait for them.
        self._runs_twice = unit.is_doubted and not unit.waits
        self._seen: Fingerprint | None = None

    def take(self, output: Any) -> None:
        """Take note of what the forward returned."""
        self._seen = fingerprint(output)

    def compared(self, on_recompute: OnRecompute | None) -> OnRecompute:
        """Return another `on_recompute`, which compares.

        Args:
            on_recompute: The one that there would be.
        """

        def run(forward: Callable[[], Any], given: Sequence[torch.Tensor]) -> Any:
            twice = self._seen is not None and self._runs_twice
            trial = self._trial(forward) if twice else None
            began = next_sequence_number()
            output = forward() if on_recompute is None else on_recompute(forward, given)
            if not self._unit.is_compiled and code_in_graph(output, began)[1]:
                self._unit.guard.naming.refuse(SCRIPTED)
            again = None if self._seen is None else fingerprint(output)
            if self._seen is not None and again is not None:
                self._ask(self._seen, trial, again)
            return output

        return run

    def _trial(self, forward: Callable[[], Any]) -> Fingerprint | None:
        """Recompute once more, and leave nothing of it behind.

        The hooks keep what is saved from `checkpoint`, which would count it.
        """
        aside = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _same)
        with SavedBuffers(self._unit.buffers), aside:
            return fingerprint(forward())

    def _ask(
        self, seen: Fingerprint, trial: Fingerprint | None, again: Fingerprint
    ) -> None:
        flags = differences(seen, again)
        n_first = len(flags)
        if trial is not None:
            flags += differences(trial, again)

        def tell(differ: Sequence[bool]) -> None:
            first, both = any(differ[:n_first]), any(differ[n_first:])
            if trial is not None:
                self._settle(is_other=first, is_unsteady=both)
            elif first and again.is_on_cpu:
                self._keep()
            elif first and self._unit.waits:
                self._settle_alone()
            elif first:
                self._unit.note_compared(is_doubted=True)

        self._answers.ask(flags, tell)

    def _settle(self, *, is_other: bool, is_unsteady: bool) -> None:
        self._unit.note_compared(is_doubted=False)
        if is_other and not is_unsteady:
            self._keep()
            return
        why = (
            "two recomputations from the same state differ, for its kernels are not "
            "deterministic on this device (see torch.use_deterministic_algorithms)"
            if is_unsteady
            else "one recomputation differed from its forward, and a later one did not"
        )
        self._unit.note_inexact(why)

    def _settle_alone(self) -> None:
        self._unit.note_compared(is_doubted=False)
        self._unit.note_inexact(
            "its recomputation differed from its forward; it was not run once more to "
            "find out why, since other ranks take part in each run"
        )

    def _keep(self) -> None:
        why = (
            "run again with the same input, it returned something else; until now its "
            "gradients were those of the second run"
        )
        self._unit.keep(why)


def _same(saved: torch.Tensor) -> torch.Tensor:
    return saved
