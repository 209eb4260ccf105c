"""The end of each step: its backward seen, its outcome made and handed on."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from torch import nn

from mimose.exact.late_answers import LateAnswers
from mimose.measure.retained import RetainedOutputs
from mimose.records import Peaks, Records
from mimose.run import backward
from mimose.run.backward import Stage
from mimose.run.footprint import Footprint
from mimose.run.open_steps import OpenSteps
from mimose.run.step import Step
from mimose.run.writers import Writers
from mimose.tensors import tensors_in
from mimose.torch_private import count_graphs
from mimose.watch.compiled import is_compiled

_log = logging.getLogger(__name__)

_NO_END = "the backward did not run to its end, or not through the outputs"
_NO_BACKWARD = "no backward followed"


class StepEnds:
    """Follows steps from the end of their forward to their outcome.

    Args:
        model: The root.
        footprint: What is held of the device.
        reads_peak: Whether the meter tells peaks.
        answers: Tells what only an accelerator knows.
        writers: Take the outcomes.
        records: Takes what is known of a step before its outcome.
        opened: The steps whose backward may still come.
    """

    def __init__(
        self,
        model: nn.Module,
        footprint: Footprint,
        answers: LateAnswers,
        writers: Writers,
        records: Records,
        opened: OpenSteps,
        *,
        reads_peak: bool,
    ) -> None:
        self._footprint = footprint
        self._reads_peak = reads_peak
        self._answers = answers
        self._writers = writers
        self._records = records
        self._is_compiled = is_compiled(model)
        self.open = opened
        self._retained = RetainedOutputs([])
        self.releases = False
        """Whether the user lets a step's outputs go before the next one's backward."""
        self._has_missed = False

    @property
    def carried_bytes(self) -> int:
        """What is alive of the last step's outputs."""
        return self._retained.live_bytes()

    def settle(self) -> bool:
        """Close the steps that get no backward any more; return whether any is open.

        Inside a backward none whose backward has begun is closed: somebody runs a
        forward in it.
        """
        if self._answers.asked:  # by a step without a backward
            self._answers.read()
        if not self.open.steps:
            return False
        if not backward.is_running():
            for step in self.open.take_interrupted():
                self._close(step, had_backward=True, reason=_NO_END)
        for step in self.open.take_dead():
            had_backward = step.saw_gradient
            reason = _NO_END if had_backward else _NO_BACKWARD
            self._close(
                step, had_backward=had_backward, reason=step.backward.unseen or reason
            )
        return bool(self.open.steps)

    def forward_ended(self, step: Step, output: Any) -> None:
        """Wait for the backward of a step.

        Args:
            step: The step.
            output: What the root returned.
        """
        tensors = list(tensors_in(output))
        before, self._retained = self._retained, RetainedOutputs(tensors)
        if not tensors:
            self._miss_outputs(step, output)
        waiting = backward.Waiting(step.backward, partial(self._end_backward, step))
        step.forward_ended(waiting, before)
        waiting.hook(tensors)
        self.open.add(step)
        self._records.put(step.record())

    def _miss_outputs(self, step: Step, output: object) -> None:
        """Say that the backward of this step will not be seen."""
        kind = type(output).__name__
        what = f"no tensors were found in what the model returned ({kind})"
        step.backward.miss(f"{what}, so its backward was not observed")
        if not self._has_missed:
            self._has_missed = True
            _log.warning(
                "mimose: %s: its steps teach nothing, and every layer is recomputed. "
                "Return a tensor, a tuple, a dict or a dataclass",
                what,
            )

    def abort(self, step: Step, error: BaseException) -> None:
        """Close a step whose forward has failed for good."""
        if step.trace is not None:
            step.trace.close()
        self.note_peaks(self._footprint.fold())
        reason = f"forward raised {type(error).__name__}"
        self._close(step, had_backward=False, reason=reason)

    def finish(self) -> None:
        """Close everything, as the session ends."""
        self.note_peaks(self._footprint.fold())
        self.settle()
        for step in self.open.take_all():
            reason = "detached before the backward"
            self._close(step, had_backward=False, reason=reason)

    # ------------------------------------------------------------------ backward

    def _end_backward(self, step: Step) -> None:
        """Make the step's outcome, where this is its only backward."""
        is_first = step.backward.stage is not Stage.AGAIN
        if not step.backward_ended():  # the session was detached before this backward
            self._answers.read()
            return
        carried = step.backward.carried_bytes
        if carried:
            self.releases = step.backward.released_bytes > carried // 2
        self._note_end(step, self._footprint.fold())
        if self._answers.asked:
            self._answers.read()
        if not is_first:
            self._note_again(step)
            return
        if self.open.take(step):
            step.share()
            self.open.share()
        has_compiled = self._is_compiled and count_graphs() != step.n_graphs
        outcome = step.close(had_backward=True, has_compiled=has_compiled)
        self._writers.absorb(outcome, has_ended=True)

    def _note_again(self, step: Step) -> None:
        """Two backwards of one graph: the second is part of the record alone."""
        if not step.backward.is_shared:
            step.end_again()
            self.open.expect_shared()
        self._records.close(step.record())

    def _note_end(self, step: Step, peaks: Peaks) -> None:
        level = step.backward.raise_peak(peaks.level_bytes)
        if level > peaks.level_bytes:  # as the step's own readings told
            self._footprint.note_level(level)
            peaks = peaks._replace(level_bytes=level)
        if self._reads_peak:
            step.backward.note_peaks(peaks)
        self.open.raise_peaks(level)

    def note_peaks(self, peaks: Peaks) -> None:
        """Take in the peaks since the last reading, for the steps that wait."""
        self.open.raise_peaks(peaks.level_bytes)

    def _close(self, step: Step, *, had_backward: bool, reason: str) -> None:
        outcome = step.close(had_backward=had_backward, reason=reason)
        self._writers.absorb(outcome, has_ended=False)
