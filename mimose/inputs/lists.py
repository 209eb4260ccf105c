"""Lists of a varying number of tensors: their number is a size, not a structure.

A list of three images and one of four are called with another number of tensors each.
Taken for two structures, nothing that steps of three have taught would hold for four.
So a list of tensors that are all alike is described by its number and one of them, once
it has come with two different numbers. As long as there was one, as in a pair of
states, its tensors may play parts of their own, and each is described.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

_MOST_PLACES = 1024
"""Places remembered."""


class Alike(NamedTuple):
    """A list of tensors that differ in nothing but their values."""

    number: int
    one: torch.Tensor


def alike(value: Sequence[Any]) -> Alike | None:
    """Return a list of tensors as one of them and their number; None if they differ.

    Args:
        value: A list or tuple of anything.
    """
    if not value or not isinstance(value[0], torch.Tensor) or value[0].is_nested:
        return None
    kind = _kind(value[0])
    if any(not isinstance(t, torch.Tensor) or _kind(t) != kind for t in value[1:]):
        return None
    return Alike(len(value), value[0])


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.requires_grad, tensor.device


class Lists:
    """Remembers with how many tensors lists have come, by their place."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, ...]] = {}
        """Up to two different ones; () where tensors were not alike."""

    def note(self, path: str, value: Sequence[Any]) -> None:
        """Take note of a list at a path.

        Args:
            path: Where it was among the arguments.
            value: What it held.
        """
        if not value or not isinstance(value[0], torch.Tensor):
            return
        found, seen = alike(value), self._counts.get(path)
        if seen is None and len(self._counts) >= _MOST_PLACES:
            return
        if found is None:
            self._counts[path] = ()
        elif seen is None or (len(seen) == 1 and found.number not in seen):
            self._counts[path] = (*(seen or ()), found.number)

    def vary(self, path: str) -> bool:
        """Whether the lists noted at a path are told by their number."""
        return len(self._counts.get(path, ())) > 1

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen, ready for JSON."""
        return {path: list(counts) for path, counts in self._counts.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Lists:
        """Make what ``state_dict`` told of.

        Args:
            state: What it returned.
        """
        lists = cls()
        lists._counts = {str(p): tuple(map(int, n)) for p, n in state.items()}
        return lists
