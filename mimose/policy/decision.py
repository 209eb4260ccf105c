"""What a step does, and what it has shown: plain data between policy and runtime."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from mimose.cost.measured import MeasuredStep
from mimose.cost.problem import Memory
from mimose.planners.actions import REBUILDING
from mimose.policy.plans import CachedPlan
from mimose.records import Peaks, Phase, StepRecord
from mimose.types import StepInput


@dataclass(frozen=True, slots=True)
class Decision:
    """What a step does."""

    phase: Phase
    chosen: CachedPlan | None
    """None: everything is recomputed and measured, except in a baseline."""
    growth_bytes: float | None = None
    """The predicted growth."""
    cache_hit: bool = False
    is_measured: bool = False
    """Whether the step is measured."""
    is_whole: bool = False
    """Whether recomputations run to their end, as on another rank."""
    reason: str = ""
    """Why it is not an ordinary step; "" if it is."""

    @property
    def rebuilds(self) -> bool:
        """Whether a layer rebuilds single tensors."""
        names = () if self.chosen is None else self.chosen.plan.actions
        return not {spec.name for spec in REBUILDING}.isdisjoint(names)

    @property
    def is_baseline(self) -> bool:
        """Whether actions follow from the calls' positions, without a plan."""
        return self.chosen is None and not self.is_measured

    def withdrawn(self, reason: str) -> Decision:
        """Return it without its prediction, for a reason."""
        return replace(self, growth_bytes=None, reason=reason)

    def safest(self, reason: str) -> Decision:
        """Return what replaces it if the step must take as little as possible."""
        is_measured = not self.is_baseline
        return Decision(
            "fallback",
            None,
            is_measured=is_measured,
            is_whole=self.is_whole,
            reason=reason,
        )


BASELINE = Decision("plan", None)
"""The decision of every step of a baseline."""


def without_plan(
    reason: str, phase: Phase = "fallback", growth_bytes: float | None = None
) -> Decision:
    """Return the decision to recompute and measure everything.

    Args:
        reason: Why there is no plan.
        phase: The phase.
        growth_bytes: The predicted growth; None if not known.
    """
    return Decision(phase, None, growth_bytes, is_measured=True, reason=reason)


Ending: TypeAlias = Literal["once", "again", "unclear"]
"""How a step has ended: its backward has run to its end; another one has, through the
same graphs; or neither is known, so that only its records count."""


class StepOutcome(NamedTuple):
    """What a step has shown, once its backward has ended or is not expected any more.

    A step is a window: all forwards before one backward.
    """

    step_input: StepInput
    """The inputs of its forwards, as one."""
    parts: tuple[StepInput, ...]
    """The input of each."""
    decision: Decision
    """The last forward's, which holds for all."""
    memory: Memory
    """What was held when it began, and the budget."""
    ended: Ending
    records: tuple[StepRecord, ...]
    """The record of each forward: why it is no ordinary step, among others."""
    peaks: Peaks | None
    """The readings; None if the meter reads no peak, or there was no backward."""
    is_one: bool
    """Whether its readings are those of one step, so that it can teach something."""
    measured: MeasuredStep | None
    """None if it was not measured, or nothing can be learned from that."""
    began: Any
    """When its first forward began, as `mimose.runtime.seconds` has it; None if that is
    not known."""

    @property
    def is_over(self) -> bool:
        """Whether the peak that the budget limits was over it."""
        return self.records[-1].is_over

    @property
    def headroom_bytes(self) -> float:
        """The most that it could grow within the budget."""
        return self.memory.budget_bytes - self.memory.start_bytes
