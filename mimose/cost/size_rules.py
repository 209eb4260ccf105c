"""How events' own sizes follow from the batch's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from mimose.predictors import SizeMap
from mimose.types import Sizes

Own: TypeAlias = tuple[Sizes, ...]
"""An event's sizes by measured step; () where it did not run."""


Fixed: TypeAlias = tuple[int | None, ...]
"""Root sizes that were the same in all steps; None for those that varied."""


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


class EventRules(NamedTuple):
    """The rules of a pattern's events; equal histories share them."""

    maps: list[tuple[SizeRule, ...]]
    """For each event, the rule of each of its own sizes."""
    fixed: list[Fixed]
    """For each event, of the steps that tell of it."""
    are_found: bool


def fit_rules(
    families: Sequence[str], roots: Sequence[Sizes], histories: Sequence[Own]
) -> EventRules:
    """Find the rules that events' own sizes follow.

    Args:
        families: The events'.
        roots: The batch's sizes in each measured step.
        histories: By event.
    """
    found: dict[tuple[tuple[int, ...], tuple[bool, ...]], SizeRule] = {}
    shared: dict[Own, tuple[tuple[SizeRule, ...], Fixed]] = {}
    histories = _filled(families, histories)
    for history in histories:
        if history in shared:
            continue
        is_there = tuple(map(bool, history))
        told = list(itertools.compress(roots, is_there))
        columns = zip(*filter(None, history), strict=True)
        keys = [(tuple(column), is_there) for column in columns]
        for key in keys:
            if key not in found:
                found[key] = SizeRule(told, key[0])
        shared[history] = tuple(found[key] for key in keys), _fixed(told)
    maps = [shared[history][0] for history in histories]
    fixed = [shared[history][1] for history in histories]
    return EventRules(maps, fixed, all(rule.is_found for rule in found.values()))


def _filled(families: Sequence[str], histories: Sequence[Own]) -> list[Own]:
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


def _fixed(roots: Sequence[Sizes]) -> Fixed:
    columns = zip(*roots, strict=True)
    return tuple(column[0] if len(set(column)) == 1 else None for column in columns)
