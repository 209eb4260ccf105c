"""What a caching allocator reserves for each byte that a step asks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

_PRIOR = 1.25
"""At first; 1.08 where segments can grow."""
_KNOWN = 8
"""After so many large steps the prior counts no more."""
_WINDOW = 16
_LARGE = 0.5
"""Of the room; gaps are as large in smaller steps, and tell nothing of a share."""
_LEAST = 1.02
_MOST = 1.5


class FragmentationAllowance:
    """Reserved bytes to count for each requested byte of a step's growth.

    A caching allocator rounds what is asked for, and what lives in a part of a segment
    pins all of it: the gaps beside cannot be freed when the allocator frees its cached
    blocks, and are of no use to a tensor larger than each. How large they are as a
    forward ends, when most is held, is read in large steps. The allowance holds the
    largest of the last ones.

    Args:
        prior: At first.

    Raises:
        ValueError: The prior is less than one.
    """

    def __init__(self, prior: float = _PRIOR) -> None:
        if prior < 1.0:
            msg = (
                f"reserved bytes are at least the requested ones: {prior!r} is below 1"
            )
            raise ValueError(msg)
        self._prior = prior
        self._seen: deque[float] = deque(maxlen=_WINDOW)

    @property
    def value(self) -> float:
        """Reserved bytes for each requested one."""
        ratio = 1.0 + max(self._seen, default=0.0)
        if len(self._seen) < _KNOWN:
            ratio = max(ratio, self._prior)
        return min(_MOST, max(_LEAST, ratio))

    def observe(self, requested: float, taken: float, room: float) -> None:
        """Take in a step as its forward has ended.

        Args:
            requested: By how many bytes the requested ones grew.
            taken: By how much the allocated ones did, with the gaps in their segments.
            room: What the step might reserve.
        """
        if requested > 0.0 and requested >= _LARGE * room:
            self._seen.append(max(0.0, taken / requested - 1.0))

    def state_dict(self) -> dict[str, Any]:
        """Return what steps have taught, ready for JSON."""
        return {"seen": list(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another was taught.

        Args:
            state: What ``state_dict`` returned.
        """
        self._seen.extend(map(float, state["seen"]))
