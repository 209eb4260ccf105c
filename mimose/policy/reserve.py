"""What is kept free between a prediction and the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mimose.policy.learning import Learning
from mimose.policy.least_peaks import LeastPeaks
from mimose.predictors import GrowthBound
from mimose.types import BY_ROWS, MOST_CONTEXTS, Context

_STAGES = (0.35, 0.7)
"""Shares of the way from the safest plan to the whole budget, each checked by a step
before a context is planned freely."""
_LARGE = 0.5
"""Steps that grow by less of the headroom widen no margin, and by less of the largest
growth teach the bound nothing: noise is all."""


class _Memory(Protocol):
    """What is held when a step begins."""

    @property
    def start_bytes(self) -> float: ...

    @property
    def headroom_bytes(self) -> float: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStep:
    """How a step came out whose growth was predicted."""

    context: Context
    predicted_bytes: float
    """The growth, as the cost model says it: nothing corrected."""
    observed_bytes: float | None
    """The growth; None where the meter tells no peak."""
    headroom_bytes: float
    """What it might have grown by."""
    scale_bytes: float
    """The largest growth so far."""
    keeps_some: bool
    is_over: bool = False


class Reserve:
    """Everything that stands between what is predicted and the budget.

    Plans leave what the bound says free, and more where a step lies beyond the sizes
    measured. A new context gets only a part of the way to the whole budget at first.
    `absorb` teaches all of it.

    Args:
        noise_bytes: By so much a reading of the meter means nothing.
        bound: Of growth, given its prediction.
        learning: How long plans are measured.
        stages: Shares of the way from the safest plan to the whole budget.
        least_peaks: What steps with everything recomputed needed.
    """

    def __init__(
        self,
        noise_bytes: float,
        *,
        bound: GrowthBound | None = None,
        learning: Learning | None = None,
        stages: tuple[float, ...] = _STAGES,
        least_peaks: LeastPeaks | None = None,
    ) -> None:
        self.noise_bytes = 5.0 * noise_bytes
        self.bound = bound or GrowthBound(noise_bytes=self.noise_bytes)
        self.least_peaks = least_peaks or LeastPeaks()
        self.allowed_growth = self.bound.allowed
        """Returns what a step may come to grow by, given its prediction."""
        self._learning = learning or Learning(self.noise_bytes)
        self._shares = stages
        self._stages: dict[Context, int] = {}

    # ------------------------------------------------------------------ readers

    def usable_budget(self, memory: _Memory, extrapolation_ratio: float = 0.0) -> float:
        """Return the level that predictions, not corrected, may reach.

        Args:
            memory: What is held, and the budget.
            extrapolation_ratio: How far beyond the sizes measured the step lies, as a
                share of how far a fit is trusted.
        """
        largest = self.bound.largest(memory.headroom_bytes, extrapolation_ratio)
        return memory.start_bytes + largest

    def knows(self, context: Context) -> bool:
        """Tell whether a step of a context came out under a plan."""
        return context in self._stages

    def stage_share(self, context: Context) -> float:
        """Return the share of the way to the whole budget that a plan may go."""
        stage = self._stage(context)
        return self._shares[stage] if stage < len(self._shares) else 1.0

    def is_learning(self, n_measured: int) -> bool:
        """Tell whether the next step of a new shape is worth measuring.

        Args:
            n_measured: Steps measured so far.
        """
        return self._learning.is_on(n_measured)

    def is_open(self, n_measured: int) -> bool:
        """Tell whether steps may still be measured to learn of more actions.

        Args:
            n_measured: Steps measured so far.
        """
        return self._learning.is_open(n_measured)

    # ------------------------------------------------------------------ writers

    def absorb(self, step: PredictedStep) -> None:
        """Take in how a prediction came out."""
        self._pass_stage(step)
        predicted, observed = step.predicted_bytes, step.observed_bytes
        if observed is None:
            return
        expected = self.bound.corrected(predicted)
        self._learning.observe(expected, observed, step.scale_bytes)
        self.bound.observe(
            predicted,
            observed,
            is_near=step.is_over or predicted >= _LARGE * step.headroom_bytes,
            is_large=predicted >= _LARGE * step.scale_bytes,
        )

    def forget(self, context: Context) -> None:
        """Step down again where a context comes again."""
        self._stages.pop(context, None)

    def _stage(self, context: Context) -> int:
        """Return how far a context has come, or the same with another loss."""
        other = context.removesuffix(BY_ROWS)
        other = context + BY_ROWS if other == context else other
        return self._stages.get(context, self._stages.get(other, 0))

    def _pass_stage(self, step: PredictedStep) -> None:
        """Go on to the next stage, if it was checked; the oldest contexts go."""
        stage = self._stage(step.context)
        self._stages.pop(step.context, None)
        if stage < len(self._shares) and step.keeps_some:
            observed = step.observed_bytes
            allowed = self.allowed_growth(step.predicted_bytes)
            stage += observed is None or observed <= allowed
        self._stages[step.context] = stage
        if len(self._stages) > MOST_CONTEXTS:
            del self._stages[next(iter(self._stages))]

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return what steps have taught, ready for JSON."""
        return {"stages": dict(self._stages), "bound": self.bound.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another reserve was taught.

        Args:
            state: What ``state_dict`` returned.
        """
        self._stages = {str(key): int(stage) for key, stage in state["stages"].items()}
        self.bound.load_state_dict(state["bound"])
