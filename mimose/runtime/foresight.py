"""Planning windows whose later forwards are not there yet.

Where their sizes follow a rule, a window is planned like any step, and again if it
comes otherwise. Where they follow none, the first forward does what is best with
forwards as large as most, as long as the largest would still fit behind it. Each later
one is planned with what has run settled, and the last one's plan is exact.
"""

from __future__ import annotations

from mimose.cost.learner import Learner
from mimose.cost.problem import Memory
from mimose.exceptions import InfeasibleBudgetError
from mimose.policy.decision import Decision
from mimose.policy.policy import Policy
from mimose.runtime.expected import Expected
from mimose.types import StepInput

_TOO_SMALL = "no plan is predicted to keep the budget, after what has run"


class Foresight:
    """Makes plans for windows that are expected.

    Args:
        policy: Plans what is known.
        learner: Knows which events are whose.
    """

    def __init__(self, policy: Policy, learner: Learner) -> None:
        self._policy = policy
        self._learner = learner

    def plan(
        self,
        expected: Expected,
        part: int,
        memory: Memory,
        ran: tuple[str, ...],
        *,
        is_first: bool,
    ) -> tuple[StepInput, Decision]:
        """Return what is planned for, and the decision; no plan for it is cached.

        Args:
            expected: The window.
            part: Which of its forwards begins.
            memory: What was held when the first began, and the budget.
            ran: The actions of the events that have run.
            is_first: Whether the session has run no forward before.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget, and all is known.
        """
        sizes = expected.sizes
        if sizes is None:
            return expected.whole, self._make(
                expected, expected.whole, memory, ran, is_first=is_first
            )
        likely = self._decide(expected, sizes.likely, memory, ran, is_first=is_first)
        own = self._own(likely, part)
        if likely.chosen is None or self._fits(expected, memory, (*ran, *own)):
            return sizes.likely, likely
        most = self._decide(expected, expected.whole, memory, ran, is_first=is_first)
        if most.chosen is not None:
            return expected.whole, most
        least = self._least(expected.whole, part)
        safest = self._decide(
            expected, sizes.smallest, memory, (*ran, *least), is_first=is_first
        )
        return sizes.smallest, safest

    def _decide(
        self,
        expected: Expected,
        whole: StepInput,
        memory: Memory,
        ran: tuple[str, ...],
        *,
        is_first: bool,
    ) -> Decision:
        found = self._policy.cached(whole, expected.table, memory, ran)
        if found is not None:
            return found
        return self._make(expected, whole, memory, ran, is_first=is_first)

    def _make(
        self,
        expected: Expected,
        whole: StepInput,
        memory: Memory,
        ran: tuple[str, ...],
        *,
        is_first: bool,
    ) -> Decision:
        try:
            return self._policy.decide(
                whole, expected.table, memory, is_first=is_first, ran=ran
            )
        except InfeasibleBudgetError:
            if expected.sizes is None and not ran:
                raise
            return Decision("fallback", None, reason=_TOO_SMALL)

    def _fits(self, expected: Expected, memory: Memory, ran: tuple[str, ...]) -> bool:
        """Whether the largest forwards that may come fit behind what has run."""
        found = self._decide(expected, expected.whole, memory, ran, is_first=False)
        return found.chosen is not None

    @staticmethod
    def _own(decision: Decision, part: int) -> tuple[str, ...]:
        """Return what a plan does in one of the forwards."""
        chosen = decision.chosen
        return () if chosen is None else chosen.plan.actions[chosen.events_of(part)]

    def _least(self, whole: StepInput, part: int) -> tuple[str, ...]:
        """Return what one of the forwards does if all that can be is recomputed."""
        model = self._learner.model
        events = model.pattern(whole).events
        return tuple(model.allowed(e.unit)[-1] for e in events if e.part == part)
