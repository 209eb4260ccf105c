"""The safety margin over a predicted growth."""

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
_HEADROOM = 1.25
"""By how much a miss is over-covered."""
_MEMORY = 100
"""Observations over which the answer to one miss fades."""
_WORST = 4.0
"""Residuals count as no more than this, so that one absurd reading passes."""


class Margin:
    """An upper quantile of how far growth came out above its prediction.

    The residual of an observation is ``(observed - predicted - noise) / predicted``.
    The margin is the largest of

    - ``floor``;
    - an order statistic of the last ``window`` residuals that is exceeded with a
      probability of at most ``1 - quantile`` whatever their distribution (with few
      residuals: the largest), plus ``initial`` times a doubt that fades with the
      number of observations;
    - after a miss, an observation above the margin in force: 1.25 times its
      residual, going down to nothing over the next 100 observations. A miss is kept
      out of the order statistic (the sample that showed it has since improved the
      prediction), but when misses repeat within the window, the answer to the
      latest lasts as many times longer.

    Args:
        initial: The margin before any observation, as a fraction.
        floor: The least margin, as a fraction.
        quantile: Share of observations to be within the margin.
        window: How many residuals are remembered.
        noise_bytes: Absolute noise of a reading, added to every margin.

    Raises:
        ValueError: If a parameter is out of its range.
    """

    __slots__ = (
        "_answer",
        "_answer_age",
        "_answer_life",
        "_doubt",
        "_fraction",
        "_recent_misses",
        "_residuals",
        "floor",
        "initial",
        "misses",
        "n",
        "noise_bytes",
        "quantile",
        "window",
    )

    def __init__(
        self,
        initial: float = 0.06,
        floor: float = 0.01,
        quantile: float = 0.995,
        window: int = 512,
        noise_bytes: float = 0.0,
    ) -> None:
        if not 0.0 <= floor <= initial:
            msg = f"0 <= floor <= initial is needed, got {floor!r} and {initial!r}."
            raise ValueError(msg)
        if not 0.0 < quantile < 1.0:
            msg = f"quantile must lie between 0 and 1, got {quantile!r}."
            raise ValueError(msg)
        if window < 1 or noise_bytes < 0.0:
            msg = (
                "window must be at least 1 and noise_bytes at least 0, "
                f"got {window!r} and {noise_bytes!r}."
            )
            raise ValueError(msg)
        self.initial = initial
        self.floor = floor
        self.quantile = quantile
        self.window = window
        self.noise_bytes = noise_bytes
        self.n = 0
        """Number of observations."""
        self.misses = 0
        """Number of observations above the margin in force at the time."""
        self._fraction = initial
        self._doubt = initial
        self._residuals = SortedWindow(window)
        self._recent_misses: deque[int] = deque()
        self._answer = 0.0
        self._answer_age = 0
        self._answer_life = _MEMORY

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(fraction={self.fraction:.4f}, n={self.n}, "
            f"misses={self.misses})"
        )

    @property
    def fraction(self) -> float:
        """The margin in force, as a fraction of the predicted growth."""
        return self._fraction

    @property
    def coverage(self) -> float:
        """Share of observations within the margin in force; 1 before any."""
        return 1.0 - self.misses / self.n if self.n else 1.0

    def bytes(self, predicted_bytes: float) -> float:
        """Return the bytes to keep free above a predicted growth."""
        return self.fraction * max(predicted_bytes, 0.0) + self.noise_bytes

    def observe(self, predicted_bytes: float, observed_bytes: float) -> None:
        """Take note of how a prediction came out.

        Numbers that are not finite, and predictions of no growth at all, say
        nothing about the margin and are passed over.

        Args:
            predicted_bytes: The growth that was predicted, without margin.
            observed_bytes: The growth that was observed.
        """
        if not (predicted_bytes > 0.0 and _isfinite(predicted_bytes)):
            return
        if not _isfinite(observed_bytes):
            return
        residual = (
            observed_bytes - predicted_bytes - self.noise_bytes
        ) / predicted_bytes
        self.n += 1
        self._doubt *= _FADE
        self._answer_age += 1
        if residual > self._fraction + _ROUNDING:
            self._miss(min(residual, _WORST))
        else:
            self._residuals.append(residual)
        self._refresh()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers and lists, ready for JSON."""
        return {
            "n": self.n,
            "misses": self.misses,
            "residuals": self._residuals.values(),
            "recent_misses": list(self._recent_misses),
            "answer": self._answer,
            "answer_age": self._answer_age,
            "answer_life": self._answer_life,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of another margin; the parameters stay.

        Args:
            state: What ``state_dict`` returned.
        """
        self.n = int(state["n"])
        self.misses = int(state["misses"])
        self._residuals = SortedWindow(self.window, state["residuals"])
        self._recent_misses = deque(map(int, state["recent_misses"]))
        self._answer = float(state["answer"])
        self._answer_age = int(state["answer_age"])
        self._answer_life = int(state["answer_life"])
        self._doubt = self.initial * _FADE**self.n
        self._refresh()

    def _miss(self, residual: float) -> None:
        self.misses += 1
        recent = self._recent_misses
        recent.append(self.n)
        while recent[0] <= self.n - self.window:
            recent.popleft()
        self._answer = _HEADROOM * residual
        self._answer_age = 0
        self._answer_life = _MEMORY * len(recent)

    def _refresh(self) -> None:
        margin = self._doubt
        if self._residuals:
            count = len(self._residuals) + 1
            margin += self._residuals.exceeded_by_at_most(self.quantile, count)
        if self._answer_age < self._answer_life:
            fresh = 1.0 - self._answer_age / self._answer_life
            margin = max(margin, self._answer * fresh)
        self._fraction = margin if margin > self.floor else self.floor
