"""What lossy actions have done to layers' gradients, and whom they are refused."""

from __future__ import annotations

import weakref

from mimose.actions.packing.gradient_error import unmeasurable
from mimose.exactness.unit import Unit


def unbounded(why: str) -> str:
    """Say that a layer's error cannot be bounded, and why."""
    return f"by how much it changes the gradient cannot be measured: {why}"


_EVERY = 256
"""A layer's calls between two measurements, at the least; the first is measured."""


class GradientErrors:
    """The errors of one action in one session: Note: [Gradient error].

    Args:
        max_error: The largest that is allowed, as a part of the gradient's norm; None
            for any.

    Attributes:
        found: By layer, the largest so far.
    """

    def __init__(self, max_error: float | None) -> None:
        self.found: dict[str, float] = {}
        self._max_error = max_error
        self._n_calls: weakref.WeakKeyDictionary[Unit, int] = (
            weakref.WeakKeyDictionary()
        )
        self._next: weakref.WeakKeyDictionary[Unit, int] = weakref.WeakKeyDictionary()

    def cannot_be_bounded(self, unit: Unit) -> str:
        """Return why a layer's error cannot be told to be allowed; "" if it can."""
        if self._max_error is None:
            return ""
        why = unmeasurable(unit.module, unit.calls)
        if unit.shares_weights:
            why = (
                why
                or "another layer has a weight of its, and so a part of its gradient"
            )
        return why and unbounded(why)

    def is_due(self, unit: Unit, *, has_room: bool) -> bool:
        """Take note of a call; return whether it is to be measured.

        Args:
            unit: The layer.
            has_room: Whether it may take as much as a kept layer and its backward,
                which no plan has counted. The first call is measured without, too.
        """
        if self._max_error is None:
            return False
        n_calls = self._n_calls.get(unit, 0)
        is_turn = n_calls >= self._next.get(unit, 0)
        self._n_calls[unit] = n_calls + 1
        if not is_turn or (n_calls and not has_room):
            return False
        self._next[unit] = n_calls + _EVERY
        return True

    def refuse(self, unit: Unit, error: float) -> str:
        """Take in an error; return why the layer may not run so; "" if it may."""
        self.found[unit.name] = max(error, self.found.get(unit.name, 0.0))
        if self._max_error is None or error <= self._max_error:
            return ""
        return (
            f"it changes the layer's gradient by {error:.3g} of its norm, more than "
            f"max_error={self._max_error:g}"
        )
