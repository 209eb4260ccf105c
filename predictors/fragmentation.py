"""How much more an allocator takes from its device than is asked of it."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Hashable
from math import exp, sqrt
from statistics import median
from typing import Any

_NEAR = 0.8
"""A smaller step counts as one of this share of the largest growth."""
_FADE = 4.0
"""Observations, and kinds of them, after which a third is left of the prior."""
_COARSE = 40 * 2**20
"""Steps of few kinds leave no more doubt than this: two segments of the kind that
requests of 1 to 10 MiB are served from."""


class FragmentationRatio:
    """A windowed upper envelope of reserved growth over requested growth.

    A caching allocator takes segments from the device and hands out parts of them.
    What lies between is fragmentation, in parts of segments that nobody asks for. Its
    share falls with the size of a step, and what is wanted is the share of the large
    ones, that may use the whole budget: the reserved growth of a step smaller than 0.8
    of the largest in the window is taken as a share of that. The ratio is the highest
    share, and above it the distance from the median to it divided by the root of their
    number: of few observations the next may well be higher. At first a prior counts.
    Steps of one kind that repeat each other count as one, the highest: they say little
    of others.

    Args:
        prior: The ratio before any observation; at least as high as `floor`.
        floor: The least ratio.
        window: How many observations are remembered.

    Raises:
        ValueError: A parameter is out of its range.
    """

    def __init__(
        self, prior: float = 1.5, floor: float = 1.0, window: int = 256
    ) -> None:
        if not 0.0 <= floor <= prior or window < 1:
            msg = (
                f"0 <= floor <= prior and window >= 1 are needed, got {floor!r}, "
                f"{prior!r} and {window!r}."
            )
            raise ValueError(msg)
        self.prior = prior
        self.floor = floor
        self._seen: deque[tuple[float, float, int]] = deque(maxlen=window)
        self._n_unlike = 0
        self._value = prior

    def __repr__(self) -> str:
        return f"{type(self).__name__}(value={self.value:.3f}, n={len(self._seen)})"

    @property
    def value(self) -> float:
        """Reserved bytes to count for each requested byte of growth."""
        return self._value

    def observe(
        self, requested_bytes: float, reserved_bytes: float, kind: Hashable = None
    ) -> None:
        """Take in a step.

        Args:
            requested_bytes: By how much its requested bytes grew; none tells nothing.
            reserved_bytes: By how much the reserved bytes grew.
            kind: Equal for steps that ask for the same blocks; None is like no other.
        """
        if requested_bytes <= 0.0:
            return
        self._seen.append(
            (requested_bytes, max(0.0, reserved_bytes), self._number(kind))
        )
        self._value = self._envelope()

    def _number(self, kind: Hashable) -> int:
        """Return a number of a kind, the same in every process; a new one for None."""
        if kind is not None:
            return zlib.crc32(repr(kind).encode())
        self._n_unlike += 1
        return -self._n_unlike

    def _envelope(self) -> float:
        largest = max(requested for requested, _, _ in self._seen)
        by_kind: dict[int, float] = {}
        for requested, taken, kind in self._seen:
            ratio = taken / max(requested, _NEAR * largest)
            by_kind[kind] = max(ratio, by_kind.get(kind, 0.0))
        highest = max(by_kind.values())
        spread = (highest - median(by_kind.values())) / sqrt(len(by_kind))
        prior = self.prior - self.floor
        doubt = max(
            prior * exp(-len(self._seen) / _FADE),
            min(prior * exp(-len(by_kind) / _FADE), _COARSE / largest),
        )
        return max(self.floor + doubt, highest + spread)

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen, ready for JSON."""
        return {"seen": [list(seen) for seen in self._seen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another one has seen; the parameters stay.

        Args:
            state: What ``state_dict`` returned.
        """
        seen = [
            (float(asked), float(taken), int(kind[0]) if kind else -n)
            for n, (asked, taken, *kind) in enumerate(state["seen"], 1)
        ]
        self._n_unlike = max([0, *(-kind for _, _, kind in seen)])
        self._seen = deque(seen, maxlen=self._seen.maxlen)
        self._value = self._envelope() if self._seen else self.prior
