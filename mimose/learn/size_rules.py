"""How events' own sizes follow from the batch's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from mimose.predictors import SizeMap
from mimose.types import Sizes

Own: TypeAlias = tuple[Sizes, ...]
"""An event's sizes by measured step; () where it did not run."""


class SizeRule:
    """How one of an event's own sizes follows from the root's."""

    def __init__(self, roots: Sequence[Sizes], own: Sequence[int]) -> None:
        self._constant = own[0] if all(v == own[0] for v in own) else None
        self._column: int | None = None
        self._map: SizeMap | None = None
        self.is_found = True
        if self._constant is not None:
            return
        for column in range(len(roots[0])):
            if all(row[column] == v for row, v in zip(roots, own, strict=True)):
                self._column = column
                return
        self._map = SizeMap().fit(np.array(roots), np.array(own))
        self.is_found = bool(self._map.found_)

    def __call__(self, root: Sizes) -> int:
        """Return the own size at the root's sizes."""
        if self._constant is not None:
            return self._constant
        if self._column is not None:
            return root[self._column]
        assert self._map is not None
        return int(self._map.predict_one(root))


def filled(families: Sequence[str], histories: Sequence[Own]) -> list[Own]:
    """Complete what events tell of their sizes by what others do that are their like.

    Events of one family whose sizes were the same wherever both ran have one rule, and
    what is known of each is known of all.

    Args:
        families: The events'.
        histories: By event.
    """
    if all(own for history in histories for own in history):
        return list(histories)
    groups: dict[str, list[list[Sizes]]] = {}
    member: list[list[Sizes]] = []
    for family, history in zip(families, histories, strict=True):
        group = next(
            (g for g in groups.setdefault(family, []) if _is_alike(g, history)), None
        )
        if group is None:
            group = list(history)
            groups[family].append(group)
        else:
            group[:] = [old or own for old, own in zip(group, history, strict=True)]
        member.append(group)
    return [tuple(group) for group in member]


def _is_alike(group: Sequence[Sizes], history: Own) -> bool:
    both = [pair for pair in zip(group, history, strict=True) if all(pair)]
    return bool(both) and all(one == other for one, other in both)


def fixed_sizes(roots: Sequence[Sizes]) -> Iterator[int | None]:
    """Yield each size that is the same in all steps; None for those that vary.

    Args:
        roots: The batch's sizes, of each step.
    """
    for column in zip(*roots, strict=True):
        yield column[0] if len(set(column)) == 1 else None
