"""What stays free: the safety margin, and the allocator's allowance and limit."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

_WINDOW = 99
"""The next miss exceeds the largest of this many with a probability of 1 in 100."""
_INITIAL, _FADE = 0.06, math.exp(-1 / 12)
"""The margin added at first; a third of it is left after twelve steps."""
_FLOOR, _MOST = 0.01, 0.5
"""The smallest margin, and the largest miss that counts: a larger one is a disturbed
reading."""
_BEYOND = 0.1
"""The share added for a step at the largest size up to which a fit is trusted."""
_ENOUGH = 8
"""Large steps until the first allowance for fragmentation does not count any more."""
_STEPS_TO_WAIT, _MOST_STEPS_TO_WAIT = 256, 16_384
"""Steps to wait after one out-of-memory error, and at most after several."""


class SafetyMargin:
    """Learns by how much a step may grow beyond its prediction.

    The margin is the largest of the last 99 misses, each ``observed / predicted - 1``.
    If the next miss has the same distribution, whatever that is, it is larger with a
    probability of at most 1 in 100. At first an additional margin applies, which fades.

    Args:
        noise_bytes: The absolute noise of a reading, which is added to the margin.

    Attributes:
        share: The margin, as a share of the predicted growth.
    """

    def __init__(self, noise_bytes: float = 0.0) -> None:
        self.noise_bytes = noise_bytes
        self._missed: deque[float] = deque(maxlen=_WINDOW)
        self._initial = self.share = _INITIAL

    def allowed(self, predicted_bytes: float) -> float:
        """Return the growth in bytes that a step of a measured size should stay below.

        Args:
            predicted_bytes: Its predicted growth.
        """
        return (1.0 + self.share) * max(predicted_bytes, 0.0) + self.noise_bytes

    def largest(self, headroom_bytes: float, extrapolation_ratio: float = 0.0) -> float:
        """Return the largest predicted growth in bytes that fits into the headroom.

        Args:
            headroom_bytes: By how much the step may grow.
            extrapolation_ratio: How far the step lies beyond the measured sizes, as a
                share of the distance up to which fits are trusted.
        """
        share = self.share + _BEYOND * min(1.0, extrapolation_ratio)
        return max(0.0, headroom_bytes - self.noise_bytes) / (1.0 + share)

    def observe(self, predicted_bytes: float, observed_bytes: float) -> None:
        """Learn from a step.

        Args:
            predicted_bytes: The predicted growth.
            observed_bytes: The observed growth.
        """
        if predicted_bytes <= 0.0 or not math.isfinite(predicted_bytes):
            return
        missed = (observed_bytes - self.noise_bytes) / predicted_bytes - 1.0
        if math.isfinite(missed):
            self._missed.append(min(missed, _MOST))
            self._initial *= _FADE
            self._settle()

    def _settle(self) -> None:
        self.share = max(_FLOOR, max(self._missed, default=0.0) + self._initial)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned as plain JSON data."""
        return {"missed": list(self._missed), "initial": self._initial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what was learned.

        Args:
            state: What ``state_dict`` returned.
        """
        self._missed = deque(map(float, state["missed"]), maxlen=_WINDOW)
        self._initial = float(state["initial"])
        self._settle()


class FragmentationAllowance:
    """Learns how many reserved bytes a step needs for each requested byte of growth.

    A caching allocator rounds requests up. A tensor in a segment pins the whole
    segment: the gaps beside it cannot be freed, and no tensor larger than a gap fits
    there. The size of the gaps is read when a forward ends, which is when most is held,
    in steps that fill at least half of the headroom (in smaller steps the gaps are just
    as large, so their ratio says nothing). The allowance is the largest ratio of the
    last 16 such steps.

    Args:
        prior: A lower bound until eight such steps were read.
    """

    def __init__(self, prior: float = 1.25) -> None:
        self._prior = prior
        self._seen: deque[float] = deque(maxlen=16)

    @property
    def at_first(self) -> float:
        """The prior for another allowance that starts from this one."""
        return max(self._prior, self.value)

    @property
    def is_learned(self) -> bool:
        """Whether enough steps were read, so that the prior does not count."""
        return len(self._seen) >= _ENOUGH

    @property
    def value(self) -> float:
        """Reserved bytes for each requested one."""
        ratio = max(self._seen, default=1.0)
        if not self.is_learned:
            ratio = max(ratio, self._prior)
        return min(1.5, max(1.02, ratio))

    def observe(self, requested: float, taken: float, room: float) -> None:
        """Learn from a step, at the end of its forward.

        Args:
            requested: The growth of requested bytes.
            taken: The growth of allocated bytes, with the gaps in their segments.
            room: The bytes that the step could reserve.
        """
        if requested > 0.0 and requested >= 0.5 * room:
            self._seen.append(taken / requested)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned as plain JSON data."""
        return {"seen": list(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what was learned.

        Args:
            state: What ``state_dict`` returned.
        """
        self._seen.clear()
        self._seen.extend(map(float, state["seen"]))


class LearnedLimit:
    """A limit that falls when memory runs out, and rises again slowly.

    A device may have less memory than the budget assumes: other processes hold some,
    and libraries allocate outside of the allocator. An out-of-memory error shows the
    true limit. After 256 steps without another error the limit rises by 1/256 of the
    budget a step. Each further error doubles this wait, up to 16,384 steps. After as
    many steps with the whole budget and without an error, the wait is 256 steps again.

    Attributes:
        bytes: The most bytes to plan for, whatever the budget.
    """

    def __init__(self) -> None:
        self.bytes = math.inf
        self._n_quiet, self._n_needed = 0, _STEPS_TO_WAIT // 2

    def ran_out(self, held_bytes: float) -> None:
        """Record that an allocation failed.

        Args:
            held_bytes: The most that was held before.
        """
        self.bytes = min(self.bytes, 0.98 * held_bytes)
        self._n_quiet, self._n_needed = 0, min(2 * self._n_needed, _MOST_STEPS_TO_WAIT)

    def step(self, budget_bytes: float) -> None:
        """Record a step in which memory did not run out.

        Args:
            budget_bytes: The budget.
        """
        if budget_bytes < 0.99 * self.bytes:
            return
        self._n_quiet += 1
        if self._n_quiet <= self._n_needed:
            return
        if self.bytes < budget_bytes:
            self.bytes += budget_bytes / 256.0
            if self.bytes >= budget_bytes:
                self._n_quiet = 0
        else:
            self._n_needed = _STEPS_TO_WAIT // 2
