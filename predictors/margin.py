"""How much a step may grow by, where so much was predicted."""

from __future__ import annotations

from collections import deque
from math import exp
from math import isfinite as _isfinite
from typing import Any

from ._window import SortedWindow

_FADE = exp(-1 / 12)
"""What an observation leaves of the initial doubt: a third after twelve."""
_ROUNDING = 1e-12
"""A residual is a miss only beyond this, so that a tie is none."""
_OVERCOVER = 1.25
"""By how much a miss is over-covered."""
_MEMORY = 100
"""Observations over which the answer to one miss fades."""
_WORST = 4.0
"""Residuals count as no more than this, so that one absurd reading passes."""
_USUAL = 0.8
"""Share of growths to lie at or below their corrected prediction."""
_LEAST, _RECENT = 8, 64
"""Observations before anything is corrected, and those that count."""


class GrowthBound:
    """An upper bound of growth, from what predictions missed.

    All that it knows is one residual a step, ``observed / predicted - 1``. Two order
    statistics of it count, as in split conformal prediction:

    - The **correction** is exceeded by one in five of the last 64, between 0 and
      ``most_correction``. A step's peak is the highest of many segments, each of them
      predicted with an error; the highest of several near-equal ones lies above every
      single prediction more often than not.
    - The **upper** one is, over the last ``window`` without a reading's noise,
      exceeded with a probability of at most ``1 - quantile`` whatever the distribution
      (with few residuals: the largest), plus ``initial`` times a doubt that fades with
      the number of observations. After a miss, an observation above the bound in force,
      it is at least 1.25 times that residual, going down to nothing over the next 100
      observations. A miss is kept out of the window (the sample that showed it has
      since improved the prediction), but when misses repeat within the window, the
      answer to the latest lasts as many times longer.

    The margin is what lies between the two, and no less than ``floor``. The farther
    a step lies beyond the sizes measured, the more is added.

    Args:
        initial: The margin before any observation, as a fraction.
        floor: The least margin, as a fraction.
        quantile: Share of observations to be within the bound.
        window: How many residuals are remembered.
        noise_bytes: Absolute noise of a reading, allowed besides.
        most_correction: The most that a prediction is corrected by, as a fraction.
        beyond: Added to the margin for a step as far beyond the sizes measured as a fit
            is trusted, as a fraction.

    Raises:
        ValueError: If a parameter is out of its range.
    """

    def __init__(
        self,
        initial: float = 0.06,
        floor: float = 0.01,
        quantile: float = 0.995,
        window: int = 512,
        noise_bytes: float = 0.0,
        most_correction: float = 0.03,
        beyond: float = 0.1,
    ) -> None:
        if not 0.0 <= floor <= initial:
            msg = f"0 <= floor <= initial is needed, got {floor!r} and {initial!r}."
            raise ValueError(msg)
        if not 0.0 < quantile < 1.0:
            msg = f"quantile must lie between 0 and 1, got {quantile!r}."
            raise ValueError(msg)
        if window < 1 or min(noise_bytes, most_correction, beyond) < 0.0:
            msg = (
                "window must be at least 1, noise_bytes, most_correction and beyond at "
                f"least 0, got {window!r}, {noise_bytes!r}, {most_correction!r} and "
                f"{beyond!r}."
            )
            raise ValueError(msg)
        self.initial = initial
        self.floor = floor
        self.quantile = quantile
        self.window = window
        self.noise_bytes = noise_bytes
        self.most_correction = most_correction
        self.beyond = beyond
        self.n = 0
        """Number of observations."""
        self.misses = 0
        """Number of observations above the bound in force at the time."""
        self.correction = 0.0
        """By what fraction predictions are raised."""
        self._upper = initial
        self._doubt = initial
        self._usual = SortedWindow(_RECENT)
        self._residuals = SortedWindow(window)
        self._recent_misses: deque[int] = deque()
        self._answer = 0.0
        self._answer_age = 0
        self._answer_life = _MEMORY

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(margin={self.margin():.4f}, "
            f"correction={self.correction:.4f}, n={self.n}, misses={self.misses})"
        )

    @property
    def coverage(self) -> float:
        """Share of observations within the bound in force; 1 before any."""
        return 1.0 - self.misses / self.n if self.n else 1.0

    def margin(self, extrapolation_ratio: float = 0.0) -> float:
        """Return what is kept free over a corrected prediction, as a fraction.

        Args:
            extrapolation_ratio: How far beyond the sizes measured a step lies, as a
                share of how far a fit is trusted.
        """
        more = self.beyond * min(1.0, extrapolation_ratio)
        return max(self.floor, self._upper - self.correction) + more

    def corrected(self, predicted_bytes: float) -> float:
        """Return the growth to expect."""
        return predicted_bytes * (1.0 + self.correction)

    def allowed(self, predicted_bytes: float) -> float:
        """Return the growth that a step within the sizes measured stays below.

        Args:
            predicted_bytes: Its growth, not corrected.
        """
        share = max(self.correction + self.floor, self._upper)
        return (1.0 + share) * max(predicted_bytes, 0.0) + self.noise_bytes

    def largest(self, headroom_bytes: float, extrapolation_ratio: float = 0.0) -> float:
        """Return the largest prediction, not corrected, that such headroom allows.

        Args:
            headroom_bytes: What the step may grow by.
            extrapolation_ratio: As for `margin`.
        """
        share = self.correction + self.margin(extrapolation_ratio)
        return max(0.0, headroom_bytes - self.noise_bytes) / (1.0 + share)

    def observe(
        self,
        predicted_bytes: float,
        observed_bytes: float,
        *,
        is_near: bool = True,
        is_large: bool = True,
    ) -> None:
        """Take note of how a prediction came out.

        Numbers that are not finite, and predictions of no growth at all, say nothing
        and are passed over.

        Args:
            predicted_bytes: The growth that was predicted, not corrected.
            observed_bytes: The growth that was observed.
            is_near: Whether it is of the size that the bound is for. A reading's noise
                is more of a smaller one, which widens no margin.
            is_large: Whether it is one of the larger, which alone correct.
        """
        if not (predicted_bytes > 0.0 and _isfinite(predicted_bytes)):
            return
        if not _isfinite(observed_bytes):
            return
        residual = observed_bytes / predicted_bytes - 1.0
        if is_near:
            self._note(residual - self.noise_bytes / predicted_bytes)
        if is_large:
            self._usual.append(residual)
        if is_near or is_large:
            self._refresh()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers and lists, ready for JSON."""
        return {
            "n": self.n,
            "misses": self.misses,
            "usual": self._usual.values(),
            "residuals": self._residuals.values(),
            "recent_misses": list(self._recent_misses),
            "answer": self._answer,
            "answer_age": self._answer_age,
            "answer_life": self._answer_life,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of another bound; the parameters stay.

        Args:
            state: What ``state_dict`` returned.
        """
        self.n = int(state["n"])
        self.misses = int(state["misses"])
        self._usual = SortedWindow(_RECENT, state["usual"])
        self._residuals = SortedWindow(self.window, state["residuals"])
        self._recent_misses = deque(map(int, state["recent_misses"]))
        self._answer = float(state["answer"])
        self._answer_age = int(state["answer_age"])
        self._answer_life = int(state["answer_life"])
        self._doubt = self.initial * _FADE**self.n
        self._refresh()

    def _note(self, residual: float) -> None:
        self.n += 1
        self._doubt *= _FADE
        self._answer_age += 1
        if residual > self.correction + self.margin() + _ROUNDING:
            self._miss(min(residual, _WORST))
        else:
            self._residuals.append(residual)

    def _miss(self, residual: float) -> None:
        self.misses += 1
        recent = self._recent_misses
        recent.append(self.n)
        while recent[0] <= self.n - self.window:
            recent.popleft()
        self._answer = _OVERCOVER * residual
        self._answer_age = 0
        self._answer_life = _MEMORY * len(recent)

    def _refresh(self) -> None:
        self.correction = 0.0
        if len(self._usual) >= _LEAST:
            usual = self._usual.exceeded_by_at_most(_USUAL, len(self._usual))
            self.correction = min(max(0.0, usual), self.most_correction)
        upper = self.correction
        if self._residuals:  # one more is to come, that the bound is for
            count = len(self._residuals) + 1
            upper = self._residuals.exceeded_by_at_most(self.quantile, count)
        self._upper = upper + self._doubt
        if self._answer_age < self._answer_life:
            fresh = 1.0 - self._answer_age / self._answer_life
            self._upper = max(self._upper, self._answer * fresh)
