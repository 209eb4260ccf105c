"""The end of each step: its backward seen, its outcome made and handed on."""

from __future__ import annotations

import logging
import weakref
from functools import partial
from typing import Any

from mimose.cost.windows import Windows
from mimose.exactness.late_answers import LateAnswers
from mimose.memory.marks import RetainedOutputs
from mimose.memory.wall import Footprint
from mimose.records import Peaks, Records
from mimose.runtime import backward
from mimose.runtime.inner_gradients import InnerGradients
from mimose.runtime.open_steps import OpenSteps
from mimose.runtime.step import Step
from mimose.runtime.window import NOT_ALL, OTHERS, Window
from mimose.runtime.writers import Writers
from mimose.tensors import tensors_in
from mimose.torch_private import count_graphs

_log = logging.getLogger(__name__)

_NO_END = "the backward did not run to its end, or not through the outputs"
_NO_GRADIENT = "what the model returned needs no gradient, so no backward was observed"
_NO_BACKWARD = "no backward followed"


def _nothing() -> None:
    """Do nothing."""


class StepEnds:
    """Follows steps from the end of their forward to their outcome.

    Args:
        footprint: What is held of the device.
        reads_peak: Whether the meter tells peaks.
        answers: Tells what only an accelerator knows.
        writers: Take the outcomes.
        records: Takes what is known of a step before its outcome.
        opened: The steps whose backward may still come.
        windows: Learns which forwards make up a step.
        inner: Looks for gradients that are taken inside forwards.
    """

    def __init__(
        self,
        footprint: Footprint,
        answers: LateAnswers,
        writers: Writers,
        records: Records,
        opened: OpenSteps,
        windows: Windows,
        inner: InnerGradients,
        *,
        reads_peak: bool,
    ) -> None:
        self._footprint = footprint
        self._reads_peak = reads_peak
        self._answers = answers
        self._writers = writers
        self._records = records
        self.open = opened
        self._windows = windows
        self._inner = inner
        self._retained = RetainedOutputs([])
        self._graph: weakref.ref[Any] | None = None
        """Of the last forward: as it goes without a backward, the wall falls."""
        self.releases = False
        """Whether the user lets a step's outputs go before the next one's backward."""
        self._has_missed = False

    @property
    def carried_bytes(self) -> int:
        """What is alive of the last step's outputs."""
        return self._retained.live_bytes()

    def settle(self) -> None:
        """Close the steps that get no backward any more.

        Inside a backward none whose backward has begun is closed: somebody runs a
        forward in it.
        """
        if self._answers.asked:  # by a step without a backward
            self._answers.read()
        if not self.open.steps:
            return
        if not backward.is_running():
            for step in self.open.take_interrupted():
                self._close(step, had_backward=True, reason=_NO_END)
            for window in self.open.waiting_again():
                self._end_window(window)
        for step in self.open.take_dead():
            self._close_dead(step)

    def _close_dead(self, step: Step) -> None:
        """Close a step whose graph is gone; the window goes on without it."""
        had_backward = step.saw_gradient
        reason = _NO_END if had_backward else _NO_BACKWARD
        window = step.window
        if len(window.steps) > 1:
            window.spoil(NOT_ALL)
        self._close(
            step, had_backward=had_backward, reason=step.backward.unseen or reason
        )
        window.leave(step)

    def forward_ended(self, step: Step, output: Any, calls: tuple[int, ...]) -> None:
        """Wait for the backward of a step.

        Args:
            step: The step.
            output: What the root returned.
            calls: How often each unit was called in its window.
        """
        tensors = list(tensors_in(output))
        before = self._retained
        self._retained = RetainedOutputs(tensors, before if step.part else None)
        if not tensors:
            self._miss_outputs(step, output)
        elif not any(tensor.requires_grad for tensor in tensors):
            step.backward.miss(_NO_GRADIENT)
        # Somebody may have run an evaluation, or another optimizer, meanwhile.
        begin = self._footprint.raise_wall if step.has_wall else _nothing
        end = partial(self._end_backward, step)
        waiting = backward.Waiting(step.backward, begin, end)
        drop = self._footprint.drop_wall
        self._graph = weakref.ref(waiting, lambda _: drop())
        step.forward_ended(waiting, before)
        waiting.hook(tensors)
        step.window.add(step, calls)
        self.open.add(step)
        step.share_parts(self._records.share)
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

    def drop_wall(self) -> None:
        """Let the user's own limit hold: another step begins, or none."""
        self._graph = None
        self._footprint.drop_wall()

    def abort(self, step: Step, error: BaseException) -> None:
        """Close a step whose forward has failed for good."""
        reason = f"forward raised {type(error).__name__}"
        if step.part:
            step.window.spoil(reason)
        if step.trace is not None:
            step.trace.close()
        self._footprint.drop_wall()
        self.note_peaks(self._footprint.fold())
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
        """Make the outcome of a window, where this was its last backward."""
        if not step.backward_ended():  # the session was detached before this backward
            self._answers.read()
            return
        if self._writers.plans:
            self._inner.note_backward(step.backward.number)
        carried = step.backward.carried_bytes
        if carried:
            self.releases = step.backward.released_bytes > carried // 2
        window = step.window
        if window.is_in_backward:
            return
        window.n_backwards += 1
        if window.n_backwards == 1:
            self._part_with_others(window)
        is_last = bool(window.reason) or window.n_backwards >= window.n_expected
        if window.trace is not None:
            window.trace.end(is_last=is_last)
        self._footprint.drop_wall()
        self._note_end(window, self._footprint.fold())
        if self._answers.asked:
            self._answers.read()
        if window.is_closed:
            self._note_again(window)
        elif is_last:
            self._end_window(window)
        else:
            window.await_backward()

    def _part_with_others(self, window: Window) -> None:
        """Let forwards go that the backward did not go through.

        Where their graphs live, theirs may still come.
        """
        others = [step for step in window.steps if not step.backward.n_ended]
        if not others:
            return
        window.spoil(NOT_ALL)
        self.open.abandon()
        for step in others:
            window.leave(step)
            step.be_alone()
        for step in self.open.take_dead():
            self._close(step, had_backward=False, reason=_NO_BACKWARD)

    def _end_window(self, window: Window) -> None:
        """Make the outcome of a window: that of its last forward tells all."""
        steps = window.steps
        last = steps[-1]
        self.open.take(steps)
        if window.is_left:
            self.open.expect_shared()
        elif self._writers.plans:
            self._windows.absorb(window.parts, window.n_backwards)
        if window.planned is not None and not window.is_as_planned:
            for step in steps:
                step.withdraw(window.reason or OTHERS)
        window.close()
        has_compiled = count_graphs() != steps[0].n_graphs
        for step in steps[:-1]:
            step.predict_as(last)
            outcome = step.close(had_backward=True, has_compiled=has_compiled)
            self._records.close(outcome.record)
        outcome = last.close(had_backward=True, has_compiled=has_compiled)
        self._writers.absorb(outcome, has_ended=True)

    def _note_again(self, window: Window) -> None:
        """Another backward than was expected: part of the records alone.

        Where another forward has begun since, that runs beside what this one holds:
        such steps are not planned for a while.
        """
        if self.open.n_begun > window.steps[-1].number + 1:
            self.open.expect_shared()
        elif self._writers.plans and not window.is_shared:
            self._windows.correct(window.parts, window.n_backwards)
            self._writers.take_back()
        for step in window.steps:
            step.end_again()
            self._records.close(step.record())

    def _note_end(self, window: Window, peaks: Peaks) -> None:
        read = window.trace.peak_bytes if window.trace is not None else 0
        own = (step.backward.peak_bytes for step in window.steps)
        level = max(peaks.level_bytes, read, *own)
        if level > peaks.level_bytes:  # as the step's own readings told
            self._footprint.note_level(level)
            peaks = peaks._replace(level_bytes=level)
        for step in window.steps:
            step.backward.raise_peak(level)
            if self._reads_peak:
                step.backward.note_peaks(peaks)
        self.open.raise_peaks(level)

    def note_peaks(self, peaks: Peaks) -> None:
        """Take in the peaks since the last reading, for the steps that wait."""
        self.open.raise_peaks(peaks.level_bytes)

    def _close(self, step: Step, *, had_backward: bool, reason: str) -> None:
        outcome = step.close(had_backward=had_backward, reason=reason)
        self._writers.absorb(outcome, has_ended=False)
