"""What is kept free: the safety margin, and what an accelerator's allocator needs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

_WINDOW = 99
"""Of so many misses the largest is passed by the next with a chance of one in 100."""
_INITIAL, _FADE = 0.06, math.exp(-1 / 12)
"""The margin added at first, of which a third is left after twelve steps."""
_FLOOR, _MOST = 0.01, 0.5
"""Of a margin, and of a miss: what is farther off was no reading of that step."""
_BEYOND = 0.1
"""More for a step as far beyond the sizes measured as a fit is trusted."""
_QUIET, _MOST_QUIET = 256, 16_384
"""Steps behind an out-of-memory before more is tried; the most, behind several."""


class SafetyMargin:
    """What a step may grow by beyond its prediction, from what predictions missed.

    The largest of the last 99 misses, each ``observed / predicted - 1``: whatever their
    distribution, if the next is drawn like them it is larger with a chance of at most 1
    in 100. At first a margin is added, which fades.

    Args:
        noise_bytes: Absolute noise of a reading, allowed besides.

    Attributes:
        share: The margin, as a share of the predicted growth.
    """

    def __init__(self, noise_bytes: float = 0.0) -> None:
        self.noise_bytes = noise_bytes
        self._missed: deque[float] = deque(maxlen=_WINDOW)
        self._initial = self.share = _INITIAL

    def allowed(self, predicted_bytes: float) -> float:
        """Return the growth that a step within the sizes measured stays below.

        Args:
            predicted_bytes: Its growth.
        """
        return (1.0 + self.share) * max(predicted_bytes, 0.0) + self.noise_bytes

    def largest(self, headroom_bytes: float, extrapolation_ratio: float = 0.0) -> float:
        """Return the largest prediction that such headroom allows.

        Args:
            headroom_bytes: What the step may grow by.
            extrapolation_ratio: How far beyond the sizes measured it lies, as a share
                of how far a fit is trusted.
        """
        share = self.share + _BEYOND * min(1.0, extrapolation_ratio)
        return max(0.0, headroom_bytes - self.noise_bytes) / (1.0 + share)

    def observe(self, predicted_bytes: float, observed_bytes: float) -> None:
        """Record how a prediction came out.

        Args:
            predicted_bytes: The growth that was predicted.
            observed_bytes: The growth that was observed.
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
        """Return what steps have taught, ready for JSON."""
        return {"missed": list(self._missed), "initial": self._initial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another was taught.

        Args:
            state: What ``state_dict`` returned.
        """
        self._missed = deque(map(float, state["missed"]), maxlen=_WINDOW)
        self._initial = float(state["initial"])
        self._settle()


class FragmentationAllowance:
    """Reserved bytes to count for each requested byte of a step's growth.

    A caching allocator rounds what is asked for, and what lives in a part of a segment
    pins all of it: the gaps beside cannot be freed when the allocator frees its cached
    blocks, and are of no use to a tensor larger than each. How large they are as a
    forward ends, when most is held, is read in steps that fill half of the room: gaps
    are as large in smaller ones. The allowance holds the largest of the last 16.

    Args:
        prior: Counts as well until eight such steps came.
    """

    def __init__(self, prior: float = 1.25) -> None:
        self._prior = prior
        self._seen: deque[float] = deque(maxlen=16)

    @property
    def at_first(self) -> float:
        """The prior of another one that begins where this one is now."""
        return max(self._prior, self.value)

    @property
    def value(self) -> float:
        """Reserved bytes for each requested one."""
        ratio = max(self._seen, default=1.0)
        if len(self._seen) < 8:
            ratio = max(ratio, self._prior)
        return min(1.5, max(1.02, ratio))

    def observe(self, requested: float, taken: float, room: float) -> None:
        """Take in a step as its forward has ended.

        Args:
            requested: By how many bytes the requested ones grew.
            taken: By how much the allocated ones did, with the gaps in their segments.
            room: What the step might reserve.
        """
        if requested > 0.0 and requested >= 0.5 * room:
            self._seen.append(taken / requested)

    def state_dict(self) -> dict[str, Any]:
        """Return what steps have taught, ready for JSON."""
        return {"seen": list(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another was taught.

        Args:
            state: What ``state_dict`` returned.
        """
        self._seen.clear()
        self._seen.extend(map(float, state["seen"]))


class LearnedLimit:
    """Falls below what was held when memory ran out, and rises again slowly.

    What a device has is not what a user thinks it has: another process may hold some of
    it, libraries allocate outside of the allocator, a wall may stand somewhere. An
    out-of-memory shows where. After 256 steps without another the limit rises by a
    256th of the budget a step; each failure doubles that time, up to 16,384 steps. Once
    that many more have gone well with the whole budget, what was in the way is gone.

    Attributes:
        bytes: The most bytes to plan for, whatever the budget.
    """

    def __init__(self) -> None:
        self.bytes = math.inf
        self._n_quiet, self._n_needed = 0, _QUIET // 2

    def ran_out(self, held_bytes: float) -> None:
        """Record an allocation that failed.

        Args:
            held_bytes: The most that was held before it did.
        """
        self.bytes = min(self.bytes, 0.98 * held_bytes)
        self._n_quiet, self._n_needed = 0, min(2 * self._n_needed, _MOST_QUIET)

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
            self._n_needed = _QUIET // 2
