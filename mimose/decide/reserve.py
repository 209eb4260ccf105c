"""What is kept free between a prediction and the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mimose.decide.infeasible import LeastPeaks
from mimose.decide.learning import Learning
from mimose.predictors import Calibration, Margin
from mimose.types import MOST_CONTEXTS, Context

_STAGES = (0.35, 0.7)
"""Shares of the way from the safest plan to the whole budget, each checked by a step
before a context is planned freely."""
_BEYOND = 0.1
"""Kept free, besides the margin, over a prediction as far beyond the sizes measured as
a fit of readings is trusted, and in the first step; nearer to them less."""
_LARGE = 0.5
"""Steps that grow by less of the largest growth calibrate nothing: noise is all."""
_RELEVANT = 0.5
"""Steps that grow by less of the headroom say nothing of the margin: noise is all."""


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
    n_measured: int
    """Steps measured so far."""
    keeps_some: bool
    recomputes_some: bool
    is_over: bool = False


class Reserve:
    """Everything that stands between what is predicted and the budget.

    Predictions are corrected, the margin is kept free on top, and more of it where a
    step lies beyond the sizes measured. A new context gets only a part of the way to
    the whole budget at first. `absorb` is all that changes it.

    Args:
        noise_bytes: By so much a reading of the meter means nothing.
        margin: Kept free over every corrected prediction.
        calibration: Corrects predictions that come out too low as a rule.
        learning: How long plans are measured.
        stages: Shares of the way from the safest plan to the whole budget.
        beyond: Kept free, as a share of growth, as far beyond the sizes measured as a
            fit is trusted.
        least_peaks: What steps with everything recomputed needed.
    """

    def __init__(
        self,
        noise_bytes: float,
        *,
        margin: Margin | None = None,
        calibration: Calibration | None = None,
        learning: Learning | None = None,
        stages: tuple[float, ...] = _STAGES,
        beyond: float = _BEYOND,
        least_peaks: LeastPeaks | None = None,
    ) -> None:
        self.noise_bytes = 5.0 * noise_bytes
        self.margin = margin or Margin(noise_bytes=self.noise_bytes)
        self.calibration = calibration or Calibration()
        self.least_peaks = least_peaks or LeastPeaks()
        self._learning = learning or Learning(self.noise_bytes)
        self._shares = stages
        self._beyond = beyond
        self._stages: dict[Context, int] = {}

    # ------------------------------------------------------------------ readers

    @property
    def correction(self) -> float:
        """What predictions are raised by, as a share of growth."""
        return self.calibration.factor - 1.0

    @property
    def fraction(self) -> float:
        """What is kept free over a corrected prediction, as a share of it."""
        return self.margin.fraction

    def corrected(self, growth_bytes: float) -> float:
        """Return the growth to expect where the cost model says so much."""
        return growth_bytes * self.calibration.factor

    def allowed_growth(self, growth_bytes: float) -> float:
        """Return the most that a step of such a corrected growth may grow by."""
        return growth_bytes + self.margin.bytes(growth_bytes)

    def beyond_fraction(self, extrapolation_ratio: float) -> float:
        """Return what is kept free besides, as a share of growth.

        Args:
            extrapolation_ratio: How far beyond the sizes measured a step lies, as a
                share of the way that fits are trusted for.
        """
        return self._beyond * min(1.0, extrapolation_ratio)

    def usable_budget(self, memory: _Memory, extrapolation_ratio: float = 0.0) -> float:
        """Return the level that predictions may reach, before they are corrected.

        Args:
            memory: What is held, and the budget.
            extrapolation_ratio: As for `beyond_fraction`.
        """
        headroom = memory.headroom_bytes - self.noise_bytes
        more = self.beyond_fraction(extrapolation_ratio)
        share = (1.0 + self.fraction + more) * self.calibration.factor
        return memory.start_bytes + max(0.0, headroom) / share

    def knows(self, context: Context) -> bool:
        """Tell whether a step of a context came out under a plan."""
        return context in self._stages

    def stage_share(self, context: Context) -> float:
        """Return the share of the way to the whole budget that a plan may go."""
        stage = self._stages.get(context, 0)
        return self._shares[stage] if stage < len(self._shares) else 1.0

    def is_learning(self, n_measured: int) -> bool:
        """Tell whether the next step of a new shape is worth measuring.

        Args:
            n_measured: Steps measured so far.
        """
        return self._learning.is_on(n_measured)

    # ------------------------------------------------------------------ writers

    def absorb(self, step: PredictedStep) -> bool:
        """Take in how a prediction came out.

        Returns:
            Whether it was so far off that the plan is to be made again.
        """
        expected = self.corrected(step.predicted_bytes)
        self._pass_stage(step, expected)
        if step.observed_bytes is None:
            return False
        is_off = self._learn_again(step, expected, step.observed_bytes)
        if step.is_over or expected >= _RELEVANT * step.headroom_bytes:
            self.margin.observe(expected, step.observed_bytes)
        if step.predicted_bytes >= _LARGE * step.scale_bytes:
            self.calibration.observe(step.predicted_bytes, step.observed_bytes)
        return is_off

    def forget(self, context: Context) -> None:
        """Step down again where a context comes again."""
        self._stages.pop(context, None)

    def _pass_stage(self, step: PredictedStep, expected: float) -> None:
        """Go on to the next stage, if it was checked; the oldest contexts go."""
        stage = self._stages.pop(step.context, 0)
        observed = step.observed_bytes
        is_within = observed is None or observed <= self.allowed_growth(expected)
        if stage < len(self._shares) and is_within and step.keeps_some:
            stage += 1
        self._stages[step.context] = stage
        if len(self._stages) > MOST_CONTEXTS:
            del self._stages[next(iter(self._stages))]

    def _learn_again(
        self, step: PredictedStep, expected: float, observed: float
    ) -> bool:
        self._learning.observe(expected, observed, step.scale_bytes)
        if not step.recomputes_some:
            return False
        if not self.noise_bytes:  # a correction is no cause to find
            expected = step.predicted_bytes
        return self._learning.begin_again_if_off(expected, observed, step.n_measured)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return what steps have taught, ready for JSON."""
        return {
            "stages": dict(self._stages),
            "margin": self.margin.state_dict(),
            "calibration": self.calibration.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another reserve was taught.

        Args:
            state: What ``state_dict`` returned.
        """
        self._stages = {str(key): int(stage) for key, stage in state["stages"].items()}
        self.margin.load_state_dict(state["margin"])
        self.calibration.load_state_dict(state["calibration"])
