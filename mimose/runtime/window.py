"""A window: the forwards that run before a backward, one step for memory.

See Note: [Windows]. Each of its forwards is a `Step` with a record of its own; what is
planned, predicted, measured and learned is the window's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mimose.cost.problem import Memory
from mimose.cost.windows import joined
from mimose.runtime.backward import Stage
from mimose.types import StepInput

if TYPE_CHECKING:
    from mimose.memory.marks import Trace
    from mimose.policy.decision import Decision
    from mimose.runtime.step import Step


OTHERS = "other forwards or backwards make up this step than before"
NOT_ALL = "the backward did not go through all forwards before it"


class Window:
    """The forwards up to a backward, and the backwards that go through them.

    Args:
        memory: What was held when the first began, and the budget.
        carried_bytes: What it began with of the outputs of the step before.

    Attributes:
        steps: Its forwards, those that have ended.
        n_backwards: Backwards that have run to their end.
        n_expected: Backwards that are expected.
        planned: What the last plan was made for; None before.
        decision: What was decided last; None before.
        calls: How often each unit was called, up to the last forward's end.
        between: The same where each forward but the last has ended.
        released_bytes: By forward but the first, what went of the carried outputs
            before it began.
        reason: Why it is not an ordinary window; "" if it is.
        is_shared: Whether nothing is to be learned of it as a step.
        is_left: Whether it is one forward that another window's backward went past.
        is_closed: Whether its outcome is made.
    """

    def __init__(self, memory: Memory, carried_bytes: int) -> None:
        self.memory = memory
        self.carried_bytes = carried_bytes
        self.steps: list[Step] = []
        self.n_backwards = 0
        self.n_expected = 1
        self.planned: StepInput | None = None
        self.decision: Decision | None = None
        self.calls: tuple[int, ...] = ()
        self.between: tuple[tuple[int, ...], ...] = ()
        self.released_bytes: list[float] = []
        self.reason = ""
        self.is_shared = False
        self.is_left = False
        self.is_closed = False

    # ------------------------------------------------------------------ forwards

    @property
    def parts(self) -> list[StepInput]:
        """What was known of each forward."""
        return [step.facts for step in self.steps]

    @property
    def trace(self) -> Trace | None:
        """What its boundaries are read into; None if they are not read."""
        return self.steps[0].trace if self.steps else None

    @property
    def ran(self) -> tuple[str, ...]:
        """The actions of the events that have run."""
        return tuple(action for step in self.steps for action in step.actions)

    @property
    def is_open(self) -> bool:
        """Whether a forward that begins now is part of it."""
        return bool(self.steps) and all(
            step.backward.stage is Stage.WAITING and not step.backward.n_ended
            for step in self.steps
        )

    def begin_at(self, start_bytes: int) -> None:
        """Take note of where its first forward really began."""
        self.memory = self.memory._replace(start_bytes=float(start_bytes))

    def begin_next(self) -> None:
        """Take note that another forward of it begins."""
        gone = self.steps[0].backward.gone_bytes()
        self.released_bytes.append(gone - sum(self.released_bytes))

    def plan(self, whole: StepInput, n_backwards: int, decision: Decision) -> None:
        """Take note of what was decided for all of it.

        Args:
            whole: The window that is expected.
            n_backwards: How many backwards of it.
            decision: What it is to do.
        """
        self.planned, self.n_expected, self.decision = whole, n_backwards, decision

    def goes_on_as(self, whole: StepInput) -> Decision | None:
        """Return what was decided, if it holds for what is known of the window now."""
        decision = self.decision
        if not self.steps or decision is None:
            return None
        if decision.chosen is not None and whole != self.planned:
            return None
        self.planned = whole
        return decision

    def agree(self, decision: Decision) -> None:
        """Take note of what all ranks do, which is for what this one had planned for.

        Args:
            decision: It.
        """
        if self.decision is not None:
            self.decision = decision
        if self.steps and decision.chosen is None:
            self.give_up(decision.reason)

    def add(self, step: Step, calls: tuple[int, ...]) -> None:
        """Take in a forward that has ended."""
        if self.steps:
            self.between = (*self.between, self.calls)
        self.steps.append(step)
        self.calls = calls

    def give_up(self, reason: str) -> None:
        """Run the rest under the safest plan, for a reason; nothing is predicted."""
        self.reason = self.reason or reason

    def spoil(self, reason: str) -> None:
        """Learn nothing of it: what was read is not that of one step."""
        self.reason, self.is_shared = reason, True
        self.stop_reading()

    def stop_reading(self) -> None:
        """Read no boundaries any more."""
        if self.trace is not None:
            self.trace.close()
        for step in self.steps:
            step.trace = None

    # ------------------------------------------------------------------ backwards

    @property
    def is_in_backward(self) -> bool:
        """Whether the end of a backward of one of its forwards is still to come."""
        return any(step.backward.is_running for step in self.steps)

    @property
    def is_waiting_again(self) -> bool:
        """Whether another backward is expected, after one that has ended."""
        return bool(self.n_backwards) and not self.is_closed

    def await_backward(self) -> None:
        """Wait for another backward of the same graphs."""
        for step in self.steps:
            step.backward.await_another()
        if self.trace is not None:
            self.trace.await_backward()

    def leave(self, step: Step) -> None:
        """Let a forward go that is not part of the backward."""
        self.steps.remove(step)

    def left_by(self, step: Step) -> Window:
        """Return the window of a forward that has left: it is the only one there."""
        alone = Window(self.memory, 0)
        alone.spoil(NOT_ALL)
        alone.steps, alone.is_left = [step], True
        return alone

    def close(self) -> None:
        """Take note that its outcome is made."""
        self.is_closed = True

    @property
    def facts(self) -> StepInput:
        """What it was, as one step."""
        return joined(self.parts, max(1, self.n_backwards))

    @property
    def is_as_planned(self) -> bool:
        """Whether it came as it was planned for."""
        return not self.reason and self.planned == self.facts
