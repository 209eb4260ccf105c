"""The steps whose backward may still come."""

from __future__ import annotations

from mimose.run.backward import Stage
from mimose.run.step import Step

_SHARED_STEPS = 20
"""Forwards after which several forwards before one backward are forgotten."""


class OpenSteps:
    """The steps whose forward has ended, up to the end of their backward.

    Attributes:
        n_begun: Steps begun so far.
        steps: They themselves.
    """

    def __init__(self) -> None:
        self.n_begun = 0
        self.steps: list[Step] = []
        self._shared_until = -1

    def begin(self) -> int:
        """Count a step, and return its number.

        If those that are open get a backward, it is that of this one, too.
        """
        self.n_begun += 1
        for step in self.steps:
            step.backward.join()
        return self.n_begun - 1

    def add(self, step: Step) -> None:
        """Take in a step whose forward has ended."""
        self.steps.append(step)

    def take(self, step: Step) -> bool:
        """Take a step out whose backward has ended; return whether others share it."""
        if step in self.steps:
            self.steps.remove(step)
        if step.backward.is_shared or not self.steps:
            return step.backward.is_shared
        return any(other.backward.stage is Stage.BACKWARD for other in self.steps)

    def take_dead(self) -> list[Step]:
        """Take out the steps whose graph is gone."""
        return self._take([step for step in self.steps if not step.backward.can_come])

    def take_interrupted(self) -> list[Step]:
        """Take out the steps whose backward an error has ended; call it outside."""
        return self._take([s for s in self.steps if s.backward.stage is Stage.BACKWARD])

    def take_all(self) -> list[Step]:
        """Take out all."""
        return self._take(list(self.steps))

    def _take(self, steps: list[Step]) -> list[Step]:
        for step in steps:
            self.steps.remove(step)
        return steps

    def raise_peaks(self, level_bytes: int) -> None:
        """Take in a peak: it is one of each step that is open."""
        for step in self.steps:
            step.backward.raise_peak(level_bytes)

    def share(self) -> None:
        """Take note that the open steps have one backward: nobody's samples."""
        for step in self.steps:
            step.share()
        self.expect_shared()

    def expect_shared(self) -> None:
        """Expect steps of several forwards, or several backwards, for a while."""
        self._shared_until = self.n_begun + _SHARED_STEPS

    @property
    def expects_shared(self) -> bool:
        """Whether the step to come is likely to be part of a larger one."""
        return self.n_begun < self._shared_until
