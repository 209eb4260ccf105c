"""The steps whose backward may still come."""

from __future__ import annotations

from mimose.runtime.backward import Stage
from mimose.runtime.step import Step
from mimose.runtime.window import Window

_SHARED_STEPS = 20
"""Forwards for which windows that cannot be planned are not forgotten."""


class OpenSteps:
    """The steps whose forward has ended, up to the end of their backward.

    Attributes:
        n_begun: Steps begun so far.
        steps: They themselves.
    """

    def __init__(self) -> None:
        self.n_begun = 0
        self.steps: list[Step] = []
        self._window: Window | None = None
        self._shared_until = -1

    def begin(self) -> int:
        """Count a step, and return its number."""
        self.n_begun += 1
        return self.n_begun - 1

    @property
    def window(self) -> Window | None:
        """The window that a forward is part of that begins now; None for a new one."""
        if self._window is None or not self._window.is_open:
            return None
        return self._window

    def add(self, step: Step) -> None:
        """Take in a step whose forward has ended."""
        self.steps.append(step)
        self._window = step.window

    def take(self, steps: list[Step]) -> None:
        """Take steps out that are closed."""
        self._take([step for step in steps if step in self.steps])

    def take_dead(self) -> list[Step]:
        """Take out the steps whose graph is gone before a backward came."""
        return self._take(
            [s for s in self.steps if not (s.backward.can_come or s.backward.n_ended)]
        )

    def take_interrupted(self) -> list[Step]:
        """Take out the steps whose backward an error has ended; call it outside."""
        broken = {
            id(s.window) for s in self.steps if s.backward.stage is Stage.BACKWARD
        }
        return self._take([s for s in self.steps if id(s.window) in broken])

    def waiting_again(self) -> list[Window]:
        """Return the windows that have had a backward, and expected another."""
        found = {id(s.window): s.window for s in self.steps}
        return [window for window in found.values() if window.is_waiting_again]

    def take_all(self) -> list[Step]:
        """Take out all."""
        return self._take(list(self.steps))

    def _take(self, steps: list[Step]) -> list[Step]:
        for step in steps:
            self.steps.remove(step)
        return steps

    def abandon(self) -> None:
        """Begin a new window with the next forward."""
        self._window = None

    def raise_peaks(self, level_bytes: int) -> None:
        """Take in a peak: it is one of each step that is open."""
        for step in self.steps:
            step.backward.raise_peak(level_bytes)

    def expect_shared(self) -> None:
        """Expect windows that cannot be planned for a while."""
        self._shared_until = self.n_begun + _SHARED_STEPS

    @property
    def expects_shared(self) -> bool:
        """Whether the forward to come is likely to be part of such a window."""
        return self.n_begun < self._shared_until
