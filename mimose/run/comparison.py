"""A call compared with its recomputation; what follows from where they differ.

See the notes of `mimose.exact.fingerprints`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mimose.exact.changes import Before
from mimose.exact.fingerprints import Fingerprint, differences, fingerprint
from mimose.exact.late_answers import LateAnswers
from mimose.run.findings import Findings
from mimose.run.unit import Unit
from mimose.types import OnRecompute


class Comparison:
    """One call of a unit, to be compared with its recomputation.

    Args:
        unit: The unit. If it is in doubt, it is recomputed twice.
        answers: Tells what only an accelerator knows.
        findings: Is told what is found.
    """

    def __init__(self, unit: Unit, answers: LateAnswers, findings: Findings) -> None:
        self._unit = unit
        self._answers = answers
        self._findings = findings
        self._runs_twice = unit.is_doubted
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
            output = forward() if on_recompute is None else on_recompute(forward, given)
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
        with Before(self._unit.slots), aside:
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
            elif first:
                self._unit.is_doubted, self._unit.is_compared = True, False

        self._answers.ask(flags, tell)

    def _settle(self, *, is_other: bool, is_unsteady: bool) -> None:
        self._unit.is_doubted, self._unit.is_compared = False, True
        if is_other and not is_unsteady:
            self._keep()
            return
        why = (
            "two recomputations from the same state differ, for its kernels are not "
            "deterministic on this device (see torch.use_deterministic_algorithms)"
            if is_unsteady
            else "one recomputation differed from its forward, and a later one did not"
        )
        self._findings.note_inexact(self._unit, why)

    def _keep(self) -> None:
        why = (
            "run again with the same input, it returned something else; until now its "
            "gradients were those of the second run"
        )
        self._findings.keep(self._unit, why)


def _same(saved: torch.Tensor) -> torch.Tensor:
    return saved
